"""Reports of clients after messages may have been lost: which dispatch they are working on. No I/O and
no clock."""

from __future__ import annotations

from collections.abc import Iterator

from agents import events
from agents.aggregator.actions import Action, AskForReport, Log
from agents.aggregator.dispatches import Dispatched
from agents.aggregator.inputs import Reported
from agents.aggregator.sending import Sending
from agents.aggregator.settings import Settings
from agents.aggregator.timers import Timers
from agents.config import silence_timeout
from agents.rules.interface import Server
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds

_SILENCE = from_seconds(silence_timeout())


class Reports:
    def __init__(self, settings: Settings, server: Server, timers: Timers, sending: Sending) -> None:
        self._silence = settings.silence
        self._server = server
        self._timers = timers
        self._sending = sending
        self._asked_about: dict[str, int] = {}
        """By client that owes a report: dispatch that it was last asked about; 0 if it had no open one,
        or counts as absent because it did not answer."""

    def record_disruption(self, reason: str, since: Nanoseconds, at: Nanoseconds) -> list[Action]:
        """Ask every present client which dispatch it is working on."""
        record = events.Disrupted(to_seconds(at), to_seconds(since), reason)
        return [Log(record), *(self.ask(client, at) for client in self._server.clients)]

    def ask(self, client: str, at: Nanoseconds) -> AskForReport:
        """Ask about the newest dispatch that the client may still answer."""
        newest = self._asked_about[client] = self._sending.dispatches.newest_open(client)
        self._timers.set(("report", client), at + self._silence.get(client, _SILENCE))
        return AskForReport(client, newest)

    def asked_about(self, client: str) -> int | None:
        """None if the client owes no report."""
        return self._asked_about.get(client)

    def expect_none(self, client: str) -> None:
        self._timers.cancel(("report", client))
        self._asked_about.pop(client, None)

    def miss(self, client: str) -> None:
        """The client has not answered in time, and counts as absent until it does."""
        self._asked_about[client] = 0

    def brings_back(self, client: str) -> bool:
        """A report has arrived. Return whether the client counted as absent before."""
        if client not in self._asked_about or client in self._server.clients:
            return False
        self.expect_none(client)
        return True

    def handle(self, event: Reported) -> Dispatched | None:
        """The client's next update will answer `event.dispatch`. If the dispatch that the client was
        asked about is newer and still open, it or its update was lost: close and return it."""
        client, about = event.client, event.about
        asked = self._asked_about.get(client)
        if asked is None or about > asked:
            return None
        if about == asked:  # otherwise the client was asked again and will answer that request
            self.expect_none(client)
            self._sending.outgoing.request_again(client)  # the rule's request for its update may be lost
        lost = self._sending.dispatches.find(client, about)
        if lost is None or event.dispatch >= about:
            return None
        self._sending.dispatches.close(client, about)
        return lost

    def suspend(self) -> None:
        """All processes are new when the run resumes."""
        for client in [*self._asked_about]:
            self.expect_none(client)

    def problems(self) -> Iterator[str]:
        for timer in self._timers.names():
            if timer[0] == "report" and timer[1] not in self._asked_about.keys() & self._server.clients:
                yield f"a timer waits for a report of {timer[1]}, which owes none or is not present"
