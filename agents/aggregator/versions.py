"""Versions of the model, and records of the updates in them. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agents import events
from agents.aggregator.actions import Action, Log
from agents.aggregator.arrivals import Arrivals
from agents.aggregator.settings import Settings
from agents.pipeline import ServerSteps
from agents.rules.interface import Aggregated, Server
from agents.timing.nanoseconds import Nanoseconds, to_seconds


class Versions:
    """`arrivals`: updates that wait to be applied."""

    def __init__(self, settings: Settings, server: Server, steps: ServerSteps) -> None:
        self._settings = settings
        self._steps = steps
        self._server = server
        self.arrivals = Arrivals()
        self.applied = 0
        """Updates so far."""

    def add(self, aggregated: Aggregated, at: Nanoseconds) -> list[Action]:
        """Add the noise of the pipeline's steps, average the buffers, and return the records."""
        version, used = aggregated.version, aggregated.contributions
        if used:
            for step in self._steps.halves:
                step.add_noise(self._server.w, version, max(one.weight for one in used))
        if used and self._server.buffers.nbytes:
            self._server.buffers = self.arrivals.averaged_buffers(
                self._server.buffers, used, shares=self._settings.side.kind in ("model", "residual")
            )
        records: list[Action] = [self.arrivals.apply(one, version, at) for one in used]
        self.applied += len(used)
        records.append(Log(events.VersionMade(to_seconds(at), version, len(used))))
        return records

    def buffered_records(self, at: Nanoseconds, *, is_cut_short: bool) -> list[Log]:
        """Records of updates in the rule's buffer at the end of the run; one note with their number if
        it ended early: they are applied when it is resumed."""
        now, count = to_seconds(at), len(self.arrivals)
        if is_cut_short:
            what = f"not applied yet, but in the rule's buffer: {count}"
            return [Log(events.Note(now, f"updates {what}"))] if count else []
        reason = "in the rule's buffer when the run ended"
        return [
            Log(events.UpdateRejected(now, client, reason, number)) for client, number in self.arrivals
        ]

    def problems(self, sent: Callable[[int], bool]) -> Iterator[str]:
        """`sent`: whether a dispatch was sent."""
        for client, number in self.arrivals:
            if client not in self._settings.importance or not sent(number):
                yield f"{client} answered dispatch {number}, which it was never sent"
        if min(self._server.version, self.applied) < 0:
            yield f"{self.applied} updates made {self._server.version} versions"
