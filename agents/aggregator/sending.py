"""Models on their way to clients, and updates that were passed to the rule or lost. No I/O and no
clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from agents import events
from agents.aggregator.actions import Action, BroadcastModel, Dispatch, Log
from agents.aggregator.arrivals import Arrivals
from agents.aggregator.dispatches import Dispatched, Dispatches
from agents.aggregator.losses import Losses
from agents.aggregator.outgoing import Outgoing
from agents.aggregator.settings import Settings
from agents.checks import DeclarationError
from agents.models.vectors import Vector
from agents.pipeline import ServerSteps
from agents.rules import interface as rules
from agents.rules.client_half import checked_copies, sizes
from agents.rules.interface import Send, Server, Vectors
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from agents.wire.payloads import UpdateMessage


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
