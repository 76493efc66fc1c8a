"""AREA: x + u = Σ p_i y_i after whatever event, with real clients and a real aggregator, in float64.

y_i is where the last training of client i that the aggregator has applied ended; x_0 before the first.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.client.uploads import Memory
from agents.rules.area import Area, AreaState
from agents.vectors import Vector
from tests.agents.fleet import Fleet, random_lives

IMPORTANCE = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}
CENTERS = {"a": 1.0, "b": -2.0, "c": 5.0, "d": 30.0}

criteria = pytest.mark.parametrize(
    "rule",
    [
        Area(every=1),
        Area(every=3, server_lr=0.8),
        Area(criterion="period", period=1.5),
        Area(criterion="random", rate=1.0),
    ],
    ids=["every 1", "every 3", "period", "random"],
)

FATES = [
    *["deliver", "finish", "arrive", "work"] * 3,
    *["diverge", "twice", "lose model", "lose update", "reorder models", "reorder updates"],
    *["crash", "forget", "reconnect", "retire", "tick"],
]
lives = st.lists(
    st.tuples(st.sampled_from(FATES), st.sampled_from(list(IMPORTANCE))), min_size=5, max_size=80
)


class Mean:
    """A fleet, and Σ p_i y_i as told by what its clients remember when they send."""

    def __init__(self, rule: Area) -> None:
        self.fleet = Fleet(rule, IMPORTANCE, lambda name, w: (CENTERS[name] - w) * 0.5, np.float64)
        self.state = cast("AreaState", self.fleet.core._rule)
        self.importance = dict(IMPORTANCE)
        self.y = {name: self.fleet.server.w.copy() for name in IMPORTANCE}
        self.forgetful: set[str] = set()
        """Clients whose disk was lost: the rule leaves them out, with their y_i as it was."""
        self._ends: dict[tuple[str, int], Vector] = {}

    def happens(self, what: str, name: str) -> None:
        """One instant. What cannot happen does not."""
        fleet, device = self.fleet, self.fleet.devices[name]
        alone = list(fleet.server.clients) == [name]  # the last one stays, or the run would end
        match what:
            case "deliver" if device.inbox and device.core:
                fleet.deliver(name)
            case "finish" | "diverge" if device.training:
                self._finish(name, diverged=what == "diverge")
            case "arrive" | "twice" if device.outbox:
                self._arrive(name, twice=what == "twice")
            case "work" if device.core:
                self._work_off(name)
            case "lose model" if device.inbox:
                device.inbox.popleft()
            case "lose update" if device.outbox:
                device.outbox.popleft()
            case "reorder models":
                device.inbox.reverse()
            case "reorder updates":
                device.outbox.reverse()
            case "forget" if device.core is None:
                device.memory = Memory()
                self.forgetful.add(name)
            case "crash" if device.core is None:
                fleet.start(name)
            case "crash" if not alone:
                fleet.crash(name)
            case "reconnect" if device.core and not alone:
                fleet.reconnect(name)
            case "retire" if len(self.importance) > 1 and not (alone or self.forgetful):
                self._retire(name)
        fleet.end_instant()

    def check(self) -> None:
        mean = sum((p * self.y[name] for name, p in self.importance.items()), np.zeros(1))
        assert (self.fleet.server.w + self.state.u).tolist() == pytest.approx(mean.tolist(), abs=1e-12)

    def settle(self) -> None:
        """Every process starts anew, and from then on nothing is lost: w gets to Σ p_i c_i."""
        for name, device in self.fleet.devices.items():
            if device.core is None:
                self.fleet.start(name)
        for name in self.importance:
            self.fleet.crash(name)
            self.fleet.start(name)
        expected = sum(p * CENTERS[name] for name, p in self.importance.items())
        for _ in range(150):
            for name in self.fleet.alive:
                self._work_off(name)
            self.fleet.end_instant()
            self.check()
            if abs(self.fleet.server.w.item() - expected) < 1e-8:
                return
        raise AssertionError(f"ends at {self.fleet.server.w.item()}, not at {expected}")

    def _finish(self, name: str, *, diverged: bool = False) -> None:
        """What it sends is told by a memory that it has put on the disk first."""
        self.fleet.finish(name, diverged=diverged)
        sent = self.fleet.devices[name].memory.sent
        assert sent is not None
        assert sent[0] == self.fleet.devices[name].outbox[-1].sequence
        self._ends[name, sent[0]] = sent[1]

    def _arrive(self, name: str, *, twice: bool = False) -> None:
        if twice:
            self.fleet.devices[name].outbox.append(self.fleet.devices[name].outbox[0])
        if self.fleet.arrive(name):
            self.y[name] = self._ends[name, self.fleet.arrived[-1].sequence]

    def _work_off(self, name: str) -> None:
        device = self.fleet.devices[name]
        while device.inbox:
            self.fleet.deliver(name)
        if device.training:
            self._finish(name)
        while device.outbox:
            self._arrive(name)

    def _retire(self, name: str) -> None:
        if name not in self.importance:
            return
        self.state.retire(name, self.y[name])
        left = 1 - self.importance.pop(name)
        self.importance = {other: p / left for other, p in self.importance.items()}
        self.fleet.crash(name)


@criteria
@given(life=lives)
@settings(random_lives, max_examples=60)
def test_the_mean_holds_after_every_event(rule: Area, life: list[tuple[str, str]]) -> None:
    mean = Mean(rule)
    for what, name in life:
        mean.happens(what, name)
        mean.check()


@criteria
@given(life=lives)
@settings(random_lives, max_examples=10)
def test_whatever_has_been_the_run_leads_to_the_weighted_mean(
    rule: Area, life: list[tuple[str, str]]
) -> None:
    mean = Mean(rule)
    for what, name in life:
        if what != "forget":
            mean.happens(what, name)
    mean.settle()
