"""Clients of a run: who is present, what is sent to them, and what they report. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from enum import Enum

from agents import events
from agents.aggregator.actions import Action, BroadcastModel, Dispatch, Log
from agents.aggregator.dispatches import Arrivals, Dispatched, Dispatches, Losses
from agents.aggregator.inputs import Reported, Settings
from agents.aggregator.progress import Timers
from agents.checks import DeclarationError
from agents.config import silence_timeout
from agents.models.vectors import Vector
from agents.pipeline.steps import ServerSteps
from agents.rules import interface as rules
from agents.rules.client_half import checked_copies, sizes
from agents.rules.interface import RequestUpdate, Send, Server, Vectors
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import ReportRequest
from agents.wire.payloads import UpdateMessage


class MembershipChange(Enum):
    JOINED = "joined"
    LEFT = "left"
    RECONNECTED = "reconnected"
    """Reported `ready` again, so messages may be lost."""


class Membership:
    """A client is ready from its status `ready` until `joining` (its process restarts) or `offline`.
    While the run clock runs, the ready clients are present, and the rule knows them. Idle clients are
    never present.

    `importance`: p_i of each client that trains, in device order. `idle`: the others.
    """

    def __init__(
        self, importance: Mapping[str, float], server: Server, idle: Sequence[str] = ()
    ) -> None:
        self._importance = importance
        self._idle = idle
        self._server = server
        self._ready: set[str] = set()

    @property
    def ready(self) -> list[str]:
        """Clients that train, in device order."""
        return [client for client in self._importance if client in self._ready]

    @property
    def missing(self) -> list[str]:
        """Clients that train and are not present, then idle ones that are not ready, each in device
        order."""
        absent = [client for client in self._importance if client not in self._server.clients]
        return [*absent, *(client for client in self._idle if client not in self._ready)]

    @property
    def waiting(self) -> list[str]:
        """Idle clients that are ready, in device order."""
        return [client for client in self._idle if client in self._ready]

    def report(self, client: str, state: str) -> MembershipChange | None:
        """The status may come from the client's last will. None without a change, or for an idle
        client."""
        was_ready = client in self._ready
        if state == "ready":
            self._ready.add(client)
            if client in self._idle:
                return None
            return MembershipChange.RECONNECTED if was_ready else MembershipChange.JOINED
        if state not in ("joining", "offline"):
            return None
        self._ready.discard(client)
        return MembershipChange.LEFT if was_ready and client not in self._idle else None

    def admit(self, clients: AbstractSet[str]) -> None:
        """Make exactly `clients` present. The rule's mapping is changed in place, and stays in device
        order."""
        present = {client: p for client, p in self._importance.items() if client in clients}
        self._server.clients.clear()
        self._server.clients.update(present)

    def suspend(self) -> None:
        """All processes start again: no client is ready."""
        self._ready.clear()

    def problems(self, *, clock_runs: bool) -> Iterator[str]:
        present = self._server.clients
        if list(present.items()) != [(c, p) for c, p in self._importance.items() if c in present]:
            yield f"{present} are present, and not of this run in this order"
        if not self._ready <= {*self._importance, *self._idle}:
            yield f"{self._ready} are ready, and not all of this run"
        if clock_runs and list(present) != self.ready:
            yield f"{list(present)} are present, {self.ready} are ready"


# Messages at the end of an instant, after all inputs with the same time.
#
# The broadcast is sent first, then the deferred models, then the requests. So a client gets a model
# before the request for an update that was trained from it.


class Outgoing:
    """At most one model and one request per client; a newer one replaces an older one.

    A request is remembered until an update of the same client is passed to the rule (`close_request`).
    Until then `request_again` can repeat it.
    """

    def __init__(self) -> None:
        self._broadcast = False
        self._sends: dict[str, Send] = {}
        self._requests: dict[str, RequestUpdate] = {}
        self._open_requests: dict[str, RequestUpdate] = {}

    @property
    def is_empty(self) -> bool:
        return not (self._broadcast or self._sends or self._requests)

    def broadcast(self) -> None:
        self._broadcast = True

    def send(self, send: Send) -> None:
        self._sends[send.client] = send

    def has_model(self, client: str) -> bool:
        """Return whether a model for `client` waits."""
        return self._broadcast or client in self._sends

    def request(self, request: RequestUpdate) -> None:
        self._requests[request.client] = self._open_requests[request.client] = request

    def request_again(self, client: str) -> None:
        """No valid update has arrived. Do nothing if no request is open."""
        if client in self._open_requests:
            self._requests[client] = self._open_requests[client]

    def close_request(self, client: str) -> None:
        """An update of the client is passed to the rule."""
        self._open_requests.pop(client, None)
        self._requests.pop(client, None)

    def forget(self, client: str) -> None:
        self.close_request(client)
        self._sends.pop(client, None)

    def clear(self) -> None:
        self._broadcast = False
        self._sends.clear()
        self._requests.clear()

    def pop_all(self) -> tuple[bool, list[Send], list[RequestUpdate]]:
        """Whether a broadcast was waiting, the deferred models, and the requests."""
        taken = self._broadcast, [*self._sends.values()], [*self._requests.values()]
        self.clear()
        return taken

    def problems(self, present: Container[str]) -> Iterator[str]:
        for client in self._sends | self._requests | self._open_requests:
            if client not in present:
                yield f"{client} is not present, and is to be sent something"


class Sending:
    """`dispatches`: sent; `outgoing`: messages for the end of the instant; `arrivals`: answers that wait
    to be applied."""

    def __init__(
        self, settings: Settings, server: Server, arrivals: Arrivals, steps: ServerSteps
    ) -> None:
        self._server = server
        self._known = settings.importance
        self.arrivals = arrivals
        self._keeps_models = settings.keeps_models
        self._is_residual = settings.side.kind == "residual"
        self._remembers = bool(settings.side.memory)
        self._own_sizes = sizes(settings.side.model_vectors, server.w.size)
        """Elements of each vector that the rule sends with a model."""
        self._tells_losses = self._is_residual and steps.sums is not None
        self.dispatches = Dispatches()
        self.outgoing = Outgoing()
        self._acknowledged: dict[str, int] = {}
        """Sequence number of each client's last update that was passed to the rule."""
        self.bases: dict[int, Vector] = {}
        """Copies of models by version, because an update may be encoded as the difference to one. Empty
        unless `keeps_models`."""
        self._losses = Losses()

    def with_copies(self, sends: Sequence[Send]) -> list[Send]:
        """The rule may change its vectors in place. One copy of an array serves all clients. Raises
        DeclarationError for vectors that the rule has not declared."""
        copies: dict[tuple[tuple[str, int], ...], Vectors] = {}
        copied: list[Send] = []
        for send in sends:
            key = tuple((name, id(vector)) for name, vector in send.vectors.items())
            if key not in copies:
                what = f"Send to {send.client}"
                copies[key] = checked_copies(what, send.vectors, self._own_sizes, self._server.w)
            copied.append(replace(send, vectors=copies[key]))
        return copied

    def check_broadcast(self) -> None:
        """Raise DeclarationError if the rule sends vectors of its own: a broadcast cannot contain
        them."""
        if self._own_sizes:
            raise DeclarationError(
                f"Broadcast has no vector {next(iter(self._own_sizes))}, which the rule declares: use a "
                "Send for each client"
            )

    def dispatch(self, send: Send, at: Nanoseconds) -> Dispatch:
        """Raises DeclarationError if the run has no such client, or if `send` has vectors, and the rule
        has declared none."""
        client, version = send.client, self._server.version
        if client not in self._known:
            raise DeclarationError(f"Send to {client!r:.80}, which is not a client of this run")
        if send.vectors and not self._own_sizes:
            raise DeclarationError(
                f"Send to {client} has the vector {next(iter(send.vectors))}, which the rule does not "
                "declare: name it in model_vectors of its client_side"
            )
        if self._keeps_models:
            self._keep_model()
        number = self.dispatches.send(client, version, at, send.lr)
        known = self._acknowledged.get(client, 0)
        if not self._tells_losses:
            return Dispatch(client, version, number, send.lr, known, vectors=send.vectors)
        waiting, lost = self.arrivals.dispatches_of(client), self._losses.announce(client, number)
        return Dispatch(client, version, number, send.lr, known, waiting, lost, send.vectors)

    def instant_over(self, at: Nanoseconds) -> list[Action]:
        """Send what waited: the broadcast, the models, then the requests."""
        broadcast, sends, requests = self.outgoing.pop_all()
        actions: list[Action] = []
        if broadcast:
            version = self._server.version
            if self._keeps_models:
                self._keep_model()
            number = self.dispatches.broadcast(version, at, self._server.clients)
            actions.append(BroadcastModel(version, number))
        return [*actions, *(self.dispatch(send, at) for send in sends), *requests]

    def _keep_model(self) -> None:
        """Copy the model about to be sent: the update may come back as a difference to it. Remove copies
        that no client may still answer."""
        version = self._server.version
        if version in self.bases:
            return
        wanted = self.dispatches.open_versions(self._server.clients)
        self.bases = {known: w for known, w in self.bases.items() if known in wanted}
        self.bases[version] = self._server.w.copy()

    # Passed and lost updates

    def note_passed(self, message: UpdateMessage, wanted: rules.Actions) -> None:
        """`wanted`: actions that the rule returned."""
        client = message.client
        if self._is_residual and any(isinstance(action, rules.Ignored) for action in wanted):
            self._acknowledged.pop(
                client, None
            )  # the rule does not know the number of the update that the client remembers
            self._losses.forget(client)
            return
        if self._remembers and any(isinstance(action, rules.Ignored) for action in wanted):
            return  # the client continues with its memory from before the update
        self._acknowledged[client] = message.sequence
        if self._tells_losses:
            self._losses.confirm(client, message.dispatch)

    def acknowledged(self, client: str) -> int:
        """0 if no update of the client was passed to the rule."""
        return self._acknowledged.get(client, 0)

    def retire(self, client: str) -> None:
        """A client that comes back starts like a new one."""
        self._acknowledged.pop(client, None)

    def lose(self, client: str, dispatch: int) -> None:
        """The update that answered `dispatch` is lost with its sum."""
        if self._is_residual:
            self._losses.add(client, dispatch)

    # Unanswered models

    def open_since(self) -> dict[str, Nanoseconds]:
        """By present client: when its oldest unanswered model was sent."""
        first = self.dispatches.first_open
        return {client: sent.at for client in self._server.clients if (sent := first(client))}

    def unanswered(self, client: str, at: Nanoseconds) -> list[Log]:
        """Record of models that the client has not answered, if any."""
        if (dispatch := self.dispatches.first_open(client)) is None:
            return []
        return [unfinished(client, dispatch, self.dispatches.newest_open(client), at, at)]

    def has_model(self, client: str) -> bool:
        """Return whether `client` has been sent a model that it may still answer, or will be sent one at
        the end of this instant. An earlier broadcast does not count."""
        return self.dispatches.has_open(client) or self.outgoing.has_model(client)

    def forget(self, client: str) -> None:
        self.dispatches.forget(client)
        self.outgoing.forget(client)

    def problems(self, *, is_over: bool) -> Iterator[str]:
        present = self._server.clients
        yield from self.dispatches.problems(present, is_over=is_over)
        yield from self.outgoing.problems(present)
        if self._keeps_models and self.dispatches.open_versions(present) - self.bases.keys():
            yield "a model that may be answered is not kept"
        if not all(sequence > 0 for sequence in self._acknowledged.values()):
            yield f"acknowledged are {self._acknowledged}"


def unfinished(
    client: str, dispatch: Dispatched, number: int, at: Nanoseconds, until: Nanoseconds
) -> Log:
    """No answer to the dispatches from `dispatch` to `number` was applied."""
    begun, now = to_seconds(dispatch.at), to_seconds(at)
    return Log(events.RoundUnfinished(now, client, dispatch.version, begun, to_seconds(until), number))


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

    def ask(self, client: str, at: Nanoseconds) -> ReportRequest:
        """Ask about the newest dispatch that the client may still answer."""
        newest = self._asked_about[client] = self._sending.dispatches.newest_open(client)
        self._timers.set(("report", client), at + self._silence.get(client, _SILENCE))
        return ReportRequest(client, newest)

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
