"""The aggregator's state machine: events in, actions out. No clock, no socket, no disk.

It guards the rule (who is present, which updates are valid), keeps the run's books (records, stop
conditions, when to evaluate) and leaves the mathematics, and who gets a model when, to the rule.

Times are device time in seconds since the run clock started. A shell calls `start` once, then the other
methods as things happen, `due` when `next_timer` has come, and `end_of_instant` when all that happened
at one instant has been handed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents import events
from agents.config import Stop
from agents.rules.interface import Actions as RuleActions
from agents.rules.interface import (
    Aggregated,
    Contribution,
    Ignored,
    Kind,
    Send,
    Server,
    SetTimer,
    State,
    Update,
)
from agents.vectors import is_finite
from agents.wire import UpdateMessage

_EVALUATE = "evaluate"
_CHECKPOINT = "checkpoint"
_AFTER = "after"
_RULE = "rule:"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the global model, as it is now, to `client`."""

    client: str
    version: int
    number: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the global model, as it is now, and call `evaluated`."""

    version: int


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the global model, as it is now; `final` at the end of the run."""

    version: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class Log:
    record: events.Record


@dataclass(frozen=True, slots=True)
class StopClients:
    """Tell every client that the run is over."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over and its books are closed."""

    reason: str


Action = Dispatch | Evaluate | Save | Log | StopClients | Finish
Actions = Sequence[Action]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run asks of its aggregator, beyond the rule."""

    run: str
    schema: str
    """Hash of the model's schema; updates must carry the same."""
    kind: Kind
    importance: Mapping[str, float]
    """p_i of every client that may take part, in device order."""
    stop: Stop
    evaluate_every: float
    checkpoint_every: float


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What the record of an update needs, kept until the update is applied."""

    message: UpdateMessage
    size: int
    dispatched: float
    at: float


class AggregatorCore:
    def __init__(self, settings: Settings, rule: State, server: Server) -> None:
        self._settings = settings
        self._rule = rule
        self._server = server
        self._epoch = 0.0
        self._ready: set[str] = set()
        self._running = False
        self._timers: dict[str, float] = {}
        self._deferred: list[str] = []
        self._dispatches = 0
        self._dispatched: dict[str, dict[int, float]] = {}
        self._sequence: dict[str, int] = {}
        self._arrivals: dict[tuple[str, int], _Arrival] = {}
        self._applied = 0
        self._evaluating: float | None = None
        self._evaluated_version = -1
        self._ending: tuple[float, str] | None = None

    @property
    def ready(self) -> Sequence[str]:
        """The clients that are ready, in device order."""
        return [client for client in self._settings.importance if client in self._ready]

    @property
    def next_timer(self) -> float | None:
        """When `due` is to be called next."""
        return min(self._timers.values(), default=None)

    def start(self, wall_clock: float, epoch: float) -> Actions:
        """The run clock starts with the clients that are ready now.

        `wall_clock` is Unix time; `epoch` is what the clients' own clocks show at this moment.
        """
        self._epoch = epoch
        self._running = True
        self._set_present()
        clients = tuple(self._server.clients)
        missing = tuple(c for c in self._settings.importance if c not in self._server.clients)
        self._timers[_EVALUATE] = self._settings.evaluate_every
        self._timers[_CHECKPOINT] = self._settings.checkpoint_every
        if self._settings.stop.after is not None:
            self._timers[_AFTER] = self._settings.stop.after
        return [
            Log(events.RunStarted(0.0, wall_clock, clients, missing)),
            Save(self._server.version),
            *self._evaluate(0.0),
            *self._obey(self._rule.start(), 0.0),
        ]

    def status(self, client: str, state: str, at: float) -> Actions:
        """A client said where it stands; `offline` also comes from its last will."""
        if client not in self._settings.importance:
            return []
        if state == "joining":
            self._sequence[client] = 0
        if state == "ready":
            self._ready.add(client)
        else:
            self._ready.discard(client)
        if not self._running:
            return []
        log = Log(events.ClientStatus(at, client, state))
        present = client in self._server.clients
        if (client in self._ready) == present:
            return [log]
        self._set_present()
        self._dispatched.pop(client, None)
        moved = self._rule.leave(client) if present else self._rule.join(client)
        actions = [log, *self._obey(moved, at)]
        if not self._server.clients:
            actions += self.end("no clients left", at)
        return actions

    def update(self, sender: str, message: UpdateMessage, size: int, at: float) -> Actions:
        """`message`, of `size` bytes, came in on `sender`'s topic."""
        if not self._running or self._ending:
            return []
        problem = self._problem(sender, message)
        if problem is not None:
            return self.reject(sender, problem, at)
        self._sequence[sender] = message.sequence
        dispatched = self._dispatched[sender].pop(message.dispatch)
        key = (sender, message.sequence)
        self._arrivals[key] = _Arrival(message, size, dispatched, at)
        update = Update(sender, message.sequence, message.base_version, message.vector)
        return self._obey(self._rule.update(update), at, key)

    def reject(self, sender: str, reason: str, at: float) -> Actions:
        """What `sender` sent cannot be used; the run goes on."""
        return [Log(events.UpdateRejected(at, sender, reason))] if self._running else []

    def evaluated(self, version: int, loss: float, accuracy: float, at: float) -> Actions:
        """The evaluation that `Evaluate` asked for is done."""
        taken, self._evaluating = self._evaluating or 0.0, None
        self._evaluated_version = version
        log = Log(events.Evaluated(taken, version, loss, accuracy))
        target = self._settings.stop.target_accuracy
        if not self._ending and target is not None and accuracy >= target:
            return [log, *self.end("target_accuracy", at)]
        return [log, *self._close_books()]

    def due(self, at: float) -> Actions:
        """Fire every timer that is due at time `at`, the earliest first."""
        actions: list[Action] = []
        while (first := self.next_timer) is not None and first <= at:
            name = min(self._timers, key=self._timers.__getitem__)
            del self._timers[name]
            actions += self._fire(name, first, at)
        return actions

    def end_of_instant(self, at: float) -> Actions:
        """Everything that happened at time `at` has been handed in: send the deferred replies."""
        clients, self._deferred = self._deferred, []
        return [self._dispatch(c, at) for c in clients if c in self._server.clients]

    def end(self, reason: str, at: float) -> Actions:
        """The run is over; the final model is evaluated before the books are closed."""
        if not self._running or self._ending:
            return []
        self._ending = (at, reason)
        self._timers.clear()
        self._deferred.clear()
        return [StopClients(), *self._close_books()]

    def _set_present(self) -> None:
        """Bring the rule's view of who is present up to date: in place, in device order."""
        importance = self._settings.importance
        self._server.clients.clear()
        self._server.clients.update({c: importance[c] for c in self.ready})

    def _problem(self, sender: str, message: UpdateMessage) -> str | None:
        """Why `message` is not a valid update of `sender`, or None."""
        settings, w = self._settings, self._server.w
        if sender not in self._server.clients:
            return "from a client that is not present"
        if (message.run, message.client) != (settings.run, sender):
            return f"says it is from {message.client} in run {message.run}"
        if message.sequence <= self._sequence.get(sender, 0):
            return f"duplicate: sequence {message.sequence}"
        if message.kind != settings.kind:
            return f"kind {message.kind}, the rule takes {settings.kind}"
        if message.schema != settings.schema or message.vector.size != w.size:
            return f"another model: schema {message.schema}, {message.vector.size} parameters"
        if message.dispatch not in self._dispatched.get(sender, {}):
            return f"answers dispatch {message.dispatch}, which is not open"
        if not 0 <= message.base_version <= self._server.version:
            return f"base version {message.base_version} of {self._server.version}"
        if not is_finite(message.vector):
            return "not finite: local training diverged"
        return None

    def _obey(self, actions: RuleActions, at: float, key: tuple[str, int] | None = None) -> list[Action]:
        """Carry out what the rule wants; `key` is the update that it was just given."""
        done: list[Action] = []
        for action in actions:
            match action:
                case Send(client, deferred=True):
                    self._deferred.append(client)
                case Send(client):
                    if not self._ending:
                        done.append(self._dispatch(client, at))
                case Aggregated():
                    done += self._record(action, at)
                case SetTimer(name, after):
                    self._timers[_RULE + name] = at + after
                case Ignored(reason):
                    if key is not None:
                        del self._arrivals[key]
                        done += self.reject(key[0], reason, at)
        return done

    def _dispatch(self, client: str, at: float) -> Dispatch:
        self._dispatches += 1
        self._dispatched.setdefault(client, {})[self._dispatches] = at
        return Dispatch(client, self._server.version, self._dispatches)

    def _record(self, aggregated: Aggregated, at: float) -> list[Action]:
        records: list[Action] = [
            Log(self._applied_record(c, aggregated.version, at)) for c in aggregated.contributions
        ]
        count = len(records)
        self._applied += count
        records.append(Log(events.VersionMade(at, aggregated.version, count)))
        limit = self._settings.stop.updates
        if limit is not None and self._applied >= limit:
            records += self.end("updates", at)
        return records

    def _applied_record(self, c: Contribution, version: int, at: float) -> events.UpdateApplied:
        arrival = self._arrivals.pop((c.client, c.sequence))
        message = arrival.message
        return events.UpdateApplied(
            client=c.client,
            sequence=c.sequence,
            kind=message.kind,
            base_version=c.base_version,
            applied_version=version,
            staleness=version - 1 - c.base_version,
            weight=c.weight,
            samples=message.samples,
            steps=message.steps,
            loss=message.loss,
            bytes=arrival.size,
            dispatched=arrival.dispatched,
            downloaded=message.downloaded - self._epoch,
            train_start=message.train_start - self._epoch,
            train_end=message.train_end - self._epoch,
            sent=message.sent - self._epoch,
            arrived=arrival.at,
            applied=at,
        )

    def _fire(self, name: str, planned: float, at: float) -> Actions:
        if name == _EVALUATE:
            self._timers[name] = _next(planned, self._settings.evaluate_every, at)
            return self._evaluate(at)
        if name == _CHECKPOINT:
            self._timers[name] = _next(planned, self._settings.checkpoint_every, at)
            return [Save(self._server.version)]
        if name == _AFTER:
            return self.end("after", at)
        return self._obey(self._rule.timer(name.removeprefix(_RULE)), at)

    def _evaluate(self, at: float) -> Actions:
        """Evaluate, unless the last evaluation is still going or nothing changed since."""
        if self._evaluating is not None or self._server.version == self._evaluated_version:
            return []
        self._evaluating = at
        return [Evaluate(self._server.version)]

    def _close_books(self) -> Actions:
        if self._ending is None or self._evaluating is not None:
            return []
        at, reason = self._ending
        if last := self._evaluate(at):
            return last
        return [
            Save(self._server.version, final=True),
            Log(events.RunEnded(at, reason, self._server.version, self._applied)),
            Finish(reason),
        ]


def _next(planned: float, period: float, at: float) -> float:
    """The first multiple of `period` after `planned` that is still ahead at time `at`."""
    return planned + period * max(1, math.floor((at - planned) / period) + 1)
