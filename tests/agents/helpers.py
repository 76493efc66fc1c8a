"""What the agents' tests share: short ways to write events, and the real cores wired in memory."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents import events, wire
from agents.aggregator import actions as act
from agents.aggregator.core import AggregatorCore, Settings
from agents.client import core as client_core
from agents.client.core import ClientCore, Identity, Outcome, Trained
from agents.config import Local, Stop
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Actions, Aggregated, Rule, Send, Server, Update
from agents.vectors import Vector

NAMES = "abcdefgh"

_DEVICE, _ARRIVAL = 0, 1
"""What comes first of one time."""


def make_server(*importance: float, w: Sequence[float] = (0.0,), seed: int = 0) -> Server:
    """A server with the model `w` and the clients a, b, … of that importance, all present."""
    clients = dict(zip(NAMES, importance, strict=False))
    return Server(np.array(w), clients, np.random.default_rng(seed), population=dict(clients))


def update(client: str, *vector: float, base: int = 0, **fields: Any) -> Update:
    return Update(client, dispatch=0, base_version=base, vector=np.array(vector), **fields)


def sent(actions: Actions) -> list[str]:
    """To whom `actions` send the model, in order."""
    return [action.client for action in actions if isinstance(action, Send)]


def weights(actions: Actions) -> list[tuple[str, Any]]:
    """Client and weight of every update that `actions` say was aggregated, in order."""
    made = [action for action in actions if isinstance(action, Aggregated)]
    return [(c.client, c.weight) for aggregated in made for c in aggregated.contributions]


def make_core(
    rule: Rule, stop: Stop | None = None, w: Vector | None = None, **settings: Any
) -> tuple[AggregatorCore, Server]:
    """A core for the model `w`, (0.0,) in float32 unless told otherwise, and the clients a and b."""
    defaults: dict[str, Any] = {"importance": {"a": 0.5, "b": 0.5}, "evaluate_every": 1e6}
    chosen = defaults | settings
    rng = np.random.default_rng(0)
    server = Server(
        np.zeros(1, np.float32) if w is None else w, {}, rng, population=chosen["importance"]
    )
    asked = Settings(
        run="run",
        schema="s",
        side=rule.client_side,
        stop=stop or Stop(after=1e6),
        checkpoint_every=1e6,
        **chosen,
    )
    return AggregatorCore(asked, rule.begin(server), server), server


def message(client: str, dispatch: int, value: float = 1.0, **fields: Any) -> wire.UpdateMessage:
    """A first update of `client`, a delta from version 0, that says all is well."""
    plain = wire.UpdateMessage(
        run="run",
        client=client,
        sequence=1,
        dispatch=dispatch,
        base_version=0,
        schema="s",
        kind="delta",
        samples=10,
        steps=2,
        effective_steps=1.0,
        loss=0.5,
        downloaded=100.125,
        train_start=100.25,
        train_end=100.375,
        sent=100.5,
        vector=np.array([value], np.float32),
    )
    return dataclasses.replace(plain, **fields)


def records(actions: act.Actions) -> list[events.Record]:
    return [action.record for action in actions if isinstance(action, act.Log)]


VANILLA = FedBuff(buffer_size=1)
"""Adds every update at once and answers with the new model."""


def started(
    rule: Rule = VANILLA, stop: Stop | None = None, **settings: Any
) -> tuple[AggregatorCore, Server]:
    """A run of the clients a and b, which hold dispatches 1 and 2 of version 0, which is evaluated."""
    aggregator, server = make_core(rule, stop, **settings)
    aggregator.status("b", "ready", 0.0)
    aggregator.status("a", "ready", 0.0)
    aggregator.start(wall_clock=1e9, epoch=100.0)
    aggregator.end_of_instant(0.0)
    aggregator.evaluated(0, 2.3, 0.1, 0.0)
    return aggregator, server


def of(kind: type[act.Action], actions: act.Actions) -> list[Any]:
    """Those of `actions` that are of this kind."""
    return [action for action in actions if isinstance(action, kind)]


@dataclass(slots=True)
class _Device:
    name: str
    index: int
    core: ClientCore
    center: float
    curvature: float
    period: float
    work: _Work | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    """The training that goes on, in seconds of device time."""

    model: wire.ModelMessage
    steps: int
    started: float
    ended: float


class Simulation:
    """A real AggregatorCore and real ClientCores; an event heap is the network, the disk and the clock.

    Client i trains f_i(w) = ½ h_i (w − c_i)² in `periods[i]` seconds, from `joins[i]` on: `steps` steps
    go 1 − (1 − lr h_i)^steps of the way to its center, with `lr` or the step size that the rule assigns.
    Messages take no time. One instant: what ends on the devices, arrivals in device order, timers, then
    the deferred replies. float32 goes over the wire; float64, for more digits, is handed over as it is.
    """

    def __init__(
        self,
        rule: Rule,
        centers: Sequence[float],
        periods: Sequence[float],
        lr: float,
        stop: Stop,
        *,
        steps: int = 1,
        curvatures: Sequence[float] | None = None,
        joins: Sequence[float] | None = None,
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        names = NAMES[: len(centers)]
        importance = dict.fromkeys(names, 1 / len(names))
        self.core, self.server = make_core(
            rule, stop, np.zeros(1, dtype), importance=importance, evaluate_every=1.0
        )
        self._kind = rule.client_side.kind
        self._local = Local(steps=steps, lr=lr)
        self._joins = joins or [0.0] * len(names)
        parts = zip(names, centers, curvatures or [1.0] * len(names), periods, strict=True)
        self._devices: dict[str, _Device] = {}
        for index, (name, center, curvature, period) in enumerate(parts):
            identity = Identity("run", name, 10, rule.client_side, self._local)
            core = ClientCore(identity, lambda _: 0.0)
            self._devices[name] = _Device(name, index, core, center, curvature, period)
        self._heap: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._now = 0.0
        self.records: list[events.Record] = []
        self.models: list[float] = [0.0]
        self.finished: str | None = None

    def run(self) -> list[float]:
        """To the end; the model of every version."""
        for device, at in zip(self._devices.values(), self._joins, strict=True):
            self._at(at, _DEVICE, device, self._joining(device))
        self._pop()
        self._execute(self.core.start(wall_clock=0.0, epoch=0.0))
        self._instant()
        while self.finished is None:
            times = [time for time, *_ in self._heap[:1]]
            timers = [_rounded(t) for t in [self.core.next_timer] if t is not None]
            self._now = min(times + timers)
            self._instant()
        return self.models

    def _joining(self, device: _Device) -> Callable[[], None]:
        return lambda: self._execute(self.core.status(device.name, "ready", self._now))

    def _instant(self) -> None:
        while True:
            self._pop()
            timer = self.core.next_timer
            if timer is not None and _rounded(timer) <= self._now:
                self._execute(self.core.due(max(timer, self._now)))
                continue
            self._execute(self.core.end_of_instant(self._now))
            if not self._heap or self._heap[0][0] > self._now:
                return

    def _pop(self) -> None:
        while self._heap and self._heap[0][0] <= self._now:
            heapq.heappop(self._heap)[-1]()

    def _at(self, time: float, rank: int, device: _Device, happens: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (_rounded(time), rank, device.index, next(self._count), happens))

    # What a client wants

    def _obey(self, device: _Device, actions: client_core.Actions) -> None:
        for action in actions:
            match action:
                case client_core.Train(model):
                    ended = self._now + device.period
                    self._work(device, _Work(model, self._local.count(10), self._now, ended))
                case client_core.Think(_):
                    self._obey(device, device.core.thought(self._now))
                case client_core.CutShort():
                    self._cut_short(device)
                case client_core.SendUpdate(_, message):
                    self._upload(device, message())

    def _work(self, device: _Device, work: _Work) -> None:
        device.work = work

        def ends() -> None:
            if device.work is work:  # else it was cut short
                outcome = Outcome(self._end(device, work), 0.5)
                trained = Trained(lambda: outcome, work.steps, work.started, work.ended)
                self._obey(device, device.core.trained(trained))

        self._at(work.ended, _DEVICE, device, ends)

    def _end(self, device: _Device, work: _Work) -> Vector:
        """Where local training ends; for a gradient rule the gradient."""
        start, rest = work.model.vector, device.center - work.model.vector
        if self._kind == "gradient":
            return -device.curvature * rest
        lr = self._local.lr if work.model.lr is None else work.model.lr
        share = 1 - (1 - lr * device.curvature) ** work.steps
        return (start + share * rest).astype(start.dtype)

    def _cut_short(self, device: _Device) -> None:
        """The step that goes on is done to its end."""
        work = device.work
        assert work is not None
        step = device.period / work.steps
        steps = math.ceil(_rounded((self._now - work.started) / step))
        self._work(device, _Work(work.model, steps, work.started, work.started + steps * step))

    def _upload(self, device: _Device, message: wire.UpdateMessage) -> None:
        if message.vector.dtype == np.float32:
            message = wire.decode_update(wire.encode(message))

        def arrives() -> None:
            self._execute(self.core.update(device.name, message, 4, self._now))

        self._at(self._now, _ARRIVAL, device, arrives)

    # What the aggregator wants

    def _execute(self, actions: act.Actions) -> None:
        for action in actions:
            match action:
                case act.Dispatch(name, version, number, lr, acknowledged):
                    self._send(self._devices[name], version, number, lr, acknowledged)
                case act.Broadcast(version, number):
                    for name in self.server.clients:
                        self._send(self._devices[name], version, number)
                case act.Request(name, what):
                    device = self._devices[name]
                    answer = device.core.pull if what == "pull" else device.core.interrupt
                    self._obey(device, answer(self._now))
                case act.Log(record):
                    self.records.append(record)
                    if isinstance(record, events.VersionMade) and record.version == len(self.models):
                        self.models.append(float(self.server.w[0]))
                case act.Evaluate(version):
                    self._execute(self.core.evaluated(version, 0.5, 0.5, self._now))
                case act.Finish(reason):
                    self.finished = reason

    def _send(
        self, device: _Device, version: int, number: int, lr: float | None = None, acknowledged: int = 0
    ) -> None:
        w = self.server.w.copy()
        model = wire.ModelMessage("run", version, number, "s", w, lr, acknowledged)
        self._obey(device, device.core.model(model, self._now))


def _rounded(time: float) -> float:
    """Whole nanoseconds, so that sums of equal periods meet."""
    return round(time, 9)
