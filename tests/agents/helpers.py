"""What the agents' tests share: short ways to write events, and the real cores wired in memory."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from agents import events, wire
from agents.aggregator import actions as act
from agents.aggregator.core import AggregatorCore, Settings
from agents.client.core import Actions as ClientActions
from agents.client.core import ClientCore, Identity, Outcome, SendUpdate, Think, Train, Trained
from agents.config import Local, Stop
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Actions, Aggregated, Rule, Send, Server, Update

NAMES = "abcdefgh"


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


def make_core(rule: Rule, stop: Stop | None = None, **settings: Any) -> tuple[AggregatorCore, Server]:
    """A core for the model (0.0,) in float32 and, unless told otherwise, the clients a and b."""
    defaults: dict[str, Any] = {"importance": {"a": 0.5, "b": 0.5}, "evaluate_every": 1e6}
    chosen = defaults | settings
    rng = np.random.default_rng(0)
    server = Server(np.zeros(1, np.float32), {}, rng, population=chosen["importance"])
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


class Simulation:
    """A real AggregatorCore and real ClientCores; an event heap is the network, the disk and the clock.

    Client i trains f_i(w) = ½(w − c_i)²: φ of the way to its center, in `periods[i]` seconds. Messages
    take no time. One instant: all arrivals in device order, timers, then the deferred replies.
    """

    def __init__(
        self, rule: Rule, centers: Sequence[float], periods: Sequence[float], phi: float, stop: Stop
    ) -> None:
        names = NAMES[: len(centers)]
        importance = dict.fromkeys(names, 1 / len(names))
        self.core, self.server = make_core(rule, stop, importance=importance, evaluate_every=1.0)
        self.clients = {
            n: ClientCore(Identity("run", n, 10, rule.client_side, Local(steps=1)), lambda _: 0.0)
            for n in names
        }
        self._centers = dict(zip(names, centers, strict=True))
        self._periods = dict(zip(names, periods, strict=True))
        self._phi = phi
        self._heap: list[tuple[float, str, wire.ModelMessage]] = []
        self.records: list[events.Record] = []
        self.models: list[float] = [0.0]
        self.finished: str | None = None

    def run(self) -> list[float]:
        """To the end; the model of every version."""
        for name in self.clients:
            self._execute(self.core.status(name, "ready", 0.0), 0.0)
        self._execute(self.core.start(wall_clock=0.0, epoch=0.0), 0.0)
        while self.finished is None:
            times = [time for time, _, _ in self._heap[:1]]
            now = min(times + [t for t in [self.core.next_timer] if t is not None])
            while self._heap and self._heap[0][0] == now:
                _, name, model = heapq.heappop(self._heap)
                self._trained(name, model, now)
            self._execute(self.core.due(now), now)
            self._execute(self.core.end_of_instant(now), now)
        return self.models

    def _trained(self, name: str, model: wire.ModelMessage, now: float) -> None:
        progress = (self._phi * (self._centers[name] - model.vector)).astype(np.float32)
        outcome = Outcome(model.vector + progress, 0.5)
        trained = Trained(lambda: outcome, 1, now - self._periods[name], now)
        self._obey(name, self.clients[name].trained(trained), now)

    def _obey(self, name: str, actions: ClientActions, now: float) -> None:
        for action in actions:
            match action:
                case Train(model):
                    heapq.heappush(self._heap, (now + self._periods[name], name, model))
                case Think(_):
                    self._obey(name, self.clients[name].thought(now), now)
                case SendUpdate(_, message):
                    payload = wire.encode(message())
                    received = wire.decode_update(payload)
                    self._execute(self.core.update(name, received, len(payload), now), now)

    def _execute(self, actions: act.Actions, now: float) -> None:
        for action in actions:
            match action:
                case act.Dispatch(client, version, number):
                    model = wire.ModelMessage("run", version, number, "s", self.server.w.copy())
                    self._obey(client, self.clients[client].model(model, now), now)
                case act.Log(record):
                    self.records.append(record)
                    if isinstance(record, events.VersionMade):
                        self.models.append(float(self.server.w[0]))
                case act.Evaluate(version):
                    self._execute(self.core.evaluated(version, 0.5, 0.5, now), now)
                case act.Finish(reason):
                    self.finished = reason
