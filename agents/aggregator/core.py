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
from typing import cast

from agents import events
from agents.aggregator.actions import (
    Action,
    Actions,
    Broadcast,
    Dispatch,
    Evaluate,
    Finish,
    Log,
    Request,
    Save,
    StopClients,
)
from agents.aggregator.arrivals import Arrivals
from agents.aggregator.dispatches import Dispatched, Dispatches
from agents.config import Stop
from agents.rules import interface as rules
from agents.rules.interface import ClientSide, Kind, Send, Server, State
from agents.vectors import is_finite
from agents.wire import FAREWELL, UpdateMessage

_EVALUATE = "evaluate"
_CHECKPOINT = "checkpoint"
_AFTER = "after"
_RULE = "rule:"
_MOST = 2**63 - 1
"""What the tables that are made of the records can hold."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run asks of its aggregator, beyond the rule."""

    run: str
    schema: str
    """Hash of the model's schema; updates must carry the same."""
    side: ClientSide
    """What the rule asks of its clients."""
    importance: Mapping[str, float]
    """p_i of every client that may take part, in device order."""
    stop: Stop
    evaluate_every: float
    checkpoint_every: float
    patient: bool = False
    """Go on where no client is left."""


@dataclass(frozen=True, slots=True)
class Past:
    """What has been of a run when its aggregator starts; nothing, for a new one."""

    at: float = 0.0
    """Device time of the last record, in seconds."""
    updates: int = 0
    """Updates applied."""
    version: int = 0
    """The last version that was made. The count goes on from here, so that no number comes twice."""


_NOTHING = Past()


class AggregatorCore:
    def __init__(self, settings: Settings, rule: State, server: Server) -> None:
        self._settings = settings
        self._rule = rule
        self._server = server
        self._epoch = 0.0
        self._ready: set[str] = set()
        self._running = False
        self._timers: dict[str, float] = {}
        self._deferred: dict[str, Send] = {}
        self._broadcast_due = False
        self._dispatches = Dispatches()
        self._acknowledged: dict[str, int] = {}
        self._requested: dict[str, Request] = {}
        self._sequence: dict[str, int] = {}
        self._arrivals = Arrivals()
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

    @property
    def rule_waits(self) -> bool:
        """Whether the rule will do something by itself, at a time that it has set."""
        return any(name.startswith(_RULE) for name in self._timers)

    def start(self, wall_clock: float, epoch: float, past: Past = _NOTHING) -> Actions:
        """The run clock starts, or goes on after `past`, with the clients that are ready now.

        `wall_clock` is Unix time; `epoch` is what the clients' own clocks showed at time 0.
        """
        at = past.at
        self._epoch = epoch
        self._applied = past.updates
        self._running = True
        self._set_present()
        clients = tuple(self._server.clients)
        missing = tuple(c for c in self._settings.importance if c not in self._server.clients)
        self._timers[_EVALUATE] = at + self._settings.evaluate_every
        self._timers[_CHECKPOINT] = at + self._settings.checkpoint_every
        if self._settings.stop.after is not None:
            self._timers[_AFTER] = self._settings.stop.after
        return [
            Log(events.RunStarted(at, wall_clock, clients, missing)),
            Save(self._server.version),
            *self._evaluate(at),
            *self._obey(self._rule.start(), at),
        ]

    def status(self, client: str, state: str, at: float) -> Actions:
        """A client said where it stands; `offline` also comes from its last will.

        It is present from `ready` until `joining` (it starts anew) or `offline`.
        """
        if client not in self._settings.importance or self._ending:
            return []
        present = client in self._ready
        if state == "joining":
            self._sequence[client] = 0
            self._dispatches.begin_anew(client)
        if state in ("joining", "offline"):
            self._ready.discard(client)
        elif state == "ready":
            self._ready.add(client)
        if not self._running:
            return []
        actions: list[Action] = [Log(events.ClientStatus(at, client, state))]
        if present and client not in self._ready:
            actions += self._leave(client, at)
            if not self._server.clients and not self._settings.patient:
                actions += self.end("no clients left", at)
        elif client in self._ready and not present:
            actions += self._join(client, at)
        return actions

    def update(
        self, sender: str, message: UpdateMessage, size: int, at: float, arrived: float | None = None
    ) -> Actions:
        """`message`, of `size` bytes, came in on `sender`'s topic.

        `arrived` is when all of it was there, where it waited until `at` to be handled.
        """
        if not self._running or self._ending:
            return []
        if message.kind == FAREWELL:
            return self._farewell(sender, message, at)
        news = message.sequence > self._sequence.get(sender, 0)
        dispatch = self._answered(sender, message)
        if isinstance(dispatch, str):
            return [*self.reject(sender, dispatch, at), *(self._ask_again(sender) if news else [])]
        self._sequence[sender] = message.sequence
        self._dispatches.answered(sender, message.dispatch)
        arrived = at if arrived is None else arrived
        if (problem := self._unusable(message, dispatch)) is not None:
            rejected = self.reject(sender, problem, at)
            at_work = self._dispatches.has_open(sender)
            then = self._ask_again(sender) if at_work else self._start_over(sender, at)
            return [*rejected, *then]
        self._requested.pop(sender, None)
        self._arrivals.keep(message, size, dispatch.at, arrived, self._epoch)
        update = rules.Update(
            sender,
            message.dispatch,
            message.base_version,
            message.vector,
            cast(Kind, message.kind),
            message.samples,
            message.steps,
            message.effective_steps,
            arrived - dispatch.at,
        )
        wanted = self._rule.update(update)
        if not any(isinstance(action, rules.Ignored) for action in wanted):
            self._acknowledged[sender] = message.sequence
        return self._obey(wanted, at, update)

    def reject(self, sender: str, reason: str, at: float) -> Actions:
        """What `sender` sent cannot be used; the run goes on."""
        if not self._running or self._ending:
            return []
        return [Log(events.UpdateRejected(at, sender, reason))]

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
            together = [name for name, planned in self._timers.items() if planned == first]
            name = min(together, key=_rank)
            del self._timers[name]
            actions += self._fire(name, first, at)
        return actions

    def end_of_instant(self, at: float) -> Actions:
        """Everything that happened at time `at` has been handed in: send the deferred replies."""
        sends, self._deferred = self._deferred, {}
        actions: list[Action] = []
        if self._broadcast_due:
            self._broadcast_due = False
            version = self._server.version
            actions.append(Broadcast(version, self._dispatches.broadcast(version, at)))
        present = self._server.clients
        actions += [self._dispatch(send, at) for send in sends.values() if send.client in present]
        return actions

    def end(self, reason: str, at: float) -> Actions:
        """The run is over; the final model is evaluated before the books are closed."""
        if not self._running or self._ending:
            return []
        self._ending = (at, reason)
        self._timers.clear()
        self._deferred.clear()
        self._broadcast_due = False
        return [StopClients(), *self._close_books()]

    def _set_present(self) -> None:
        """Bring the rule's view of who is present up to date: in place, in device order."""
        importance = self._settings.importance.items()
        self._server.clients.clear()
        self._server.clients.update({client: p for client, p in importance if client in self._ready})

    def _leave(self, client: str, at: float) -> list[Action]:
        del self._server.clients[client]
        self._dispatches.forget(client)
        self._requested.pop(client, None)
        self._deferred.pop(client, None)
        return self._obey(self._rule.leave(client), at)

    def _farewell(self, sender: str, message: UpdateMessage, at: float) -> Actions:
        """`sender` leaves for good and hands its memory in; one that we have not applied is none."""
        told = (message.run, message.client, message.sequence)
        if told != (self._settings.run, sender, self._acknowledged.get(sender)):
            return []
        if (problem := self._no_model(message)) is not None:
            return self.reject(sender, problem, at)
        return self._obey(self._rule.retire(sender, message.vector), at)

    def _join(self, client: str, at: float) -> list[Action]:
        self._set_present()
        return self._obey(self._rule.join(client), at)

    def _start_over(self, client: str, at: float) -> list[Action]:
        """The work of `client` came to nothing. It waits for a model, and perhaps the rule for it: to
        the rule it leaves and joins again, which both know how to go on from."""
        self._ready.discard(client)
        left = self._leave(client, at)
        self._ready.add(client)
        return [*left, *self._join(client, at)]

    def _ask_again(self, client: str) -> list[Action]:
        """The update that the rule has requested was of no use: the rule still waits for one."""
        return [self._requested[client]] if client in self._requested else []

    def _answered(self, sender: str, message: UpdateMessage) -> Dispatched | str:
        """The open dispatch of `sender` that `message` answers, or why it answers none: a stray, by
        which nothing changes."""
        if sender not in self._server.clients:
            return "from a client that is not present"
        if (message.run, message.client) != (self._settings.run, sender):
            return f"says it is from {message.client} in run {message.run}"
        if message.sequence <= self._sequence.get(sender, 0):
            return f"duplicate: sequence {message.sequence}"
        dispatch = self._dispatches.find(sender, message.dispatch)
        return dispatch or f"answers dispatch {message.dispatch}, which is not open"

    def _unusable(self, message: UpdateMessage, dispatch: Dispatched) -> str | None:
        """Why a rule cannot be given `message`, which answers `dispatch`, or None."""
        settings = self._settings
        # A client without memory has no residual to tell.
        kinds = {"residual": ("residual", "model")}.get(settings.side.kind, (settings.side.kind,))
        if message.kind not in kinds:
            return f"kind {message.kind}, the rule takes {settings.side.kind}"
        if (problem := self._no_model(message)) is not None:
            return problem
        if message.base_version != dispatch.version:
            return f"base version {message.base_version}, it was sent {dispatch.version}"
        return _impossible(message)

    def _no_model(self, message: UpdateMessage) -> str | None:
        """Why the vector of `message` cannot go into this run's model, or None."""
        if message.schema != self._settings.schema or message.vector.shape != self._server.w.shape:
            return f"another model: schema {message.schema}, {message.vector.size} parameters"
        if not is_finite(message.vector):
            return "not finite: local training diverged"
        return None

    def _obey(
        self,
        actions: rules.Actions,
        at: float,
        update: rules.Update | None = None,
        ticked: float | None = None,
    ) -> list[Action]:
        """Carry out what the rule wants; it was just given `update`, or the timer due at `ticked`."""
        done: list[Action] = []
        for action in actions:
            match action:
                case rules.Aggregated():
                    done += self._record(action, at)
                case rules.Ignored(reason) if update is not None:
                    self._arrivals.drop(update.client, update.dispatch)
                    done += self.reject(update.client, reason, at)
                case rules.Remark(text):
                    done.append(Log(events.Note(at, text)))
                case _ if self._ending:
                    continue  # the last version is made: no models, no timers
                case Send(client, deferred=True):
                    self._deferred[client] = action
                case Send():
                    done.append(self._dispatch(action, at))
                case rules.Broadcast():
                    self._broadcast_due = True
                case rules.Request(client, what):
                    self._requested[client] = Request(client, what)
                    done.append(self._requested[client])
                case rules.SetTimer(name, after):
                    self._timers[_RULE + name] = (at if ticked is None else ticked) + after
        return done

    def _dispatch(self, send: Send, at: float) -> Dispatch:
        version = self._server.version
        number = self._dispatches.send(send.client, version, at)
        return Dispatch(send.client, version, number, send.lr, self._acknowledged.get(send.client, 0))

    def _record(self, aggregated: rules.Aggregated, at: float) -> list[Action]:
        records: list[Action] = [
            Log(self._arrivals.applied(used, aggregated.version, at))
            for used in aggregated.contributions
        ]
        count = len(records)
        self._applied += count
        records.append(Log(events.VersionMade(at, aggregated.version, count)))
        limit = self._settings.stop.updates
        if limit is not None and self._applied >= limit:
            records += self.end("updates", at)
        return records

    def _fire(self, name: str, planned: float, at: float) -> Actions:
        if name == _EVALUATE:
            self._timers[name] = _next(planned, self._settings.evaluate_every, at)
            return self._evaluate(at)
        if name == _CHECKPOINT:
            self._timers[name] = _next(planned, self._settings.checkpoint_every, at)
            return [Save(self._server.version)]
        if name == _AFTER:
            return self.end("after", at)
        # The next tick counts from when this one was due: a late one does not make all others late.
        return self._obey(self._rule.timer(name.removeprefix(_RULE)), at, ticked=planned)

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


def _impossible(message: UpdateMessage) -> str | None:
    """What no client can have counted; a rule may divide by it, or weight the model with it."""
    if max(message.sequence, message.samples, message.steps) > _MOST:
        return f"a count of more than {_MOST}"
    if message.samples < 1:
        return f"{message.samples} samples, expected at least 1"
    if message.steps < 0:  # interrupted before its first step, a client has done none
        return f"{message.steps} steps, expected at least 0"
    if not 0 < message.effective_steps < math.inf:
        return f"{message.effective_steps:g} effective steps, expected a number above 0"
    return None


def _rank(timer: str) -> int:
    """The order of timers that are due at once: the rule's work still counts, the end comes last."""
    return {_EVALUATE: 1, _CHECKPOINT: 2, _AFTER: 3}.get(timer, 0)


def _next(planned: float, period: float, at: float) -> float:
    """The first multiple of `period` after `planned` that is still ahead at time `at`."""
    return planned + period * max(1, math.floor((at - planned) / period) + 1)
