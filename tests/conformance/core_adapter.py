"""The testbed's own aggregator core as an adapter of the conformance kit."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import inputs
from agents.aggregator.core import AggregatorCore
from agents.aggregator.inputs import Settings
from agents.config import StopConditions
from agents.models.vectors import Vector
from agents.pipeline.steps import ServerSteps
from agents.rules import RULES
from agents.rules.interface import Server
from agents.selection.draws import Draws
from agents.selection.interface import ClientSelection, Draw, ServerView
from agents.timing.nanoseconds import from_seconds, to_seconds
from agents.wire.payloads import FAREWELL, UpdateMessage
from fl_conformance.adapter import ClientUpdate, Setting


@dataclass(frozen=True)
class Sent:
    """The core sent `client` the model of `version`."""

    at: float
    client: str
    version: int
    number: int
    """Number of the core's dispatch."""
    model: Vector


@dataclass(frozen=True)
class Made:
    """The core made `version` from the updates in `weights`."""

    at: float
    version: int
    model: Vector
    weights: Sequence[tuple[str, int, float]]
    """Client, number of the core's dispatch, and weight of each update."""


@dataclass(frozen=True)
class Recorded(ClientSelection):
    """Draws the clients that the scenario has recorded."""

    draws: deque[list[str]]

    def choose(self, draw: Draw, view: ServerView, rng: np.random.Generator) -> Sequence[str]:
        return self.draws.popleft() if self.draws else [draw.idle[0]]


class _Intervals:
    """Stands in for the random generator: returns recorded intervals instead of drawing them."""

    def __init__(self, intervals: Sequence[float]) -> None:
        self._intervals = iter(intervals)

    def exponential(self, _: float) -> float:
        return next(self._intervals, 1e6)


class Adapter:
    """An `AggregatorCore` in float64, with `log` of what it has sent and made."""

    def __init__(self) -> None:
        self.log: list[Sent | Made] = []
        self.server: Server
        self._core: AggregatorCore
        self._unsent: defaultdict[str, deque[Sent]] = defaultdict(deque)
        self._numbers: list[int] = []
        """Number of the core's dispatch, by the kit's number minus 1."""
        self._sequences: dict[str, int] = {}
        """Sequence number of the last update of each client; 0 after a goodbye."""
        self._weights: list[tuple[str, int, float]] = []

    def start(self, setting: Setting) -> None:
        parameters = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in setting.parameters.items()
        }
        rule = RULES[setting.rule](**parameters)
        importance = {name: client.importance for name, client in setting.clients.items()}
        samples = {name: client.samples for name, client in setting.clients.items()}
        rng: Any = _Intervals(setting.intervals) if setting.intervals else np.random.default_rng(0)
        self.server = Server(setting.model.copy(), {}, rng, population=importance)
        parts = []
        if setting.draws:
            recorded = Recorded(deque(map(list, setting.draws)))
            self.server.draws = draws = Draws("recorded", recorded, importance, samples)
            parts.append(draws)
        asked = Settings(
            run="run",
            schema="s",
            side=rule.client_side,
            importance=importance,
            samples=samples,
            stop=StopConditions(after=1e6),
            evaluate_every=from_seconds(1e5),
            patient=True,
        )
        state, steps = rule.begin(self.server), ServerSteps([], self.server.w.size)
        self._core = AggregatorCore(asked, state, self.server, steps, parts)
        for client in setting.present:
            self._core.handle(inputs.StatusChanged(0, client, "ready"))
        self._handle(inputs.Started(0, 0.0, 0), 0.0)
        self._end_instant(0.0)

    def receive(self, update: ClientUpdate) -> None:
        self.advance(update.at)
        client = update.client
        residual = update.kind == "residual"
        first = residual and not self._sequences.get(client)
        vector = update.trained if first else update.vector
        assert vector is not None
        self._sequences[client] = self._sequences.get(client, 0) + 1
        sent, uploaded = from_seconds(update.sent), from_seconds(update.uploaded)
        message = UpdateMessage(
            run="run",
            client=client,
            sequence=self._sequences[client],
            dispatch=self._numbers[update.dispatch - 1],
            base_version=update.base_version,
            schema="s",
            kind="model" if first else update.kind,
            samples=update.samples,
            steps=update.steps,
            effective_steps=update.effective_steps,
            loss=0.5,
            downloaded=sent,
            train_start=sent,
            train_end=uploaded,
            sent=uploaded,
            vector=vector,
        )
        at = from_seconds(update.at)
        self._handle(inputs.UpdateArrived(at, client, 16, at, message), update.at)

    def model(self, at: float, client: str | None = None) -> Vector:
        self.advance(at)
        if client is None:
            self._end_instant(at)
            return self.server.w
        if not self._unsent[client]:
            self._end_instant(at)
        sent = self._unsent[client].popleft()
        self._numbers.append(sent.number)
        return sent.model

    def join(self, client: str, at: float) -> None:
        self._status(client, "ready", at)

    def leave(self, client: str, at: float, memory: ArrayLike | None = None) -> None:
        self.advance(at)
        if memory is not None:
            sequence = self._sequences.pop(client, 0)
            vector = np.asarray(memory) if sequence else np.zeros(0)
            now = from_seconds(at)
            message = UpdateMessage(
                run="run",
                client=client,
                sequence=sequence,
                dispatch=0,
                base_version=0,
                schema="s",
                kind=FAREWELL,
                samples=1,
                steps=0,
                effective_steps=0.0,
                loss=float("nan"),
                downloaded=now,
                train_start=now,
                train_end=now,
                sent=now,
                vector=vector,
            )
            self._handle(inputs.UpdateArrived(now, client, 16, now, message), at)
        self._unsent[client].clear()
        self._status(client, "offline", at)

    def _status(self, client: str, state: str, at: float) -> None:
        self.advance(at)
        self._handle(inputs.StatusChanged(from_seconds(at), client, state), at)

    def advance(self, at: float) -> None:
        """Fire the timers that are due before `at`."""
        while self._core.next_timer is not None and self._core.next_timer < from_seconds(at):
            self._end_instant(to_seconds(self._core.next_timer))

    def _end_instant(self, at: float) -> None:
        self._handle(inputs.TimersDue(from_seconds(at)), at)
        self._handle(inputs.InstantOver(from_seconds(at)), at)

    def _handle(self, event: inputs.Input, at: float) -> None:
        done = self._core.handle(event)
        self._core.validate()
        for action in done:
            match action:
                case act.Dispatch(client, version, number):
                    self._sent(Sent(at, client, version, number, self.server.w.copy()))
                case act.BroadcastModel(version, number):
                    for client in self.server.clients:
                        self._sent(Sent(at, client, version, number, self.server.w.copy()))
                case act.Log(events.UpdateApplied() as applied):
                    self._weights.append((applied.client, applied.dispatch, applied.weight))
                case act.Log(events.VersionMade() as made) if made.version > self._made:
                    self.log.append(Made(at, made.version, self.server.w.copy(), self._weights))
                    self._weights = []

    @property
    def _made(self) -> int:
        return max((one.version for one in self.log if isinstance(one, Made)), default=0)

    def _sent(self, sent: Sent) -> None:
        self.log.append(sent)
        self._unsent[sent.client].append(sent)
