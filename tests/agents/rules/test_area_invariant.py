"""AREA: x + u = Σ p_i y_i after whatever event, with real clients and a real aggregator, in float64.

y_i is where the last training of client i that the aggregator has applied ended; before the first, the x
that it was sent when it joined.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import events
from agents.models.vectors import Vector
from agents.rules.area import Area, AreaState
from tests.agents.fleet import Fleet, random_lives
from tests.agents.lives import Life

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
    *["crash", "forget", "reconnect", "leave", "leave", "tick"],
]
lives = st.lists(
    st.tuples(st.sampled_from(FATES), st.sampled_from(list(IMPORTANCE))), min_size=5, max_size=80
)


class Mean(Life):
    """A fleet, and Σ p_i y_i computed from what its clients remember when they send."""

    def __init__(self, rule: Area) -> None:
        super().__init__(Fleet(rule, IMPORTANCE, lambda name, w: (CENTERS[name] - w) * 0.5, np.float64))
        self.state = cast("AreaState", self.fleet.core.rule)
        self.y = {name: self.fleet.server.w.copy() for name in IMPORTANCE}
        """Memories y_i of the members."""
        self.lost: list[tuple[float, Vector]] = []
        """Importance and y of those that forgot it."""
        self._ends: dict[tuple[str, int], Vector] = {}
        self._read = 0

    def check(self) -> None:
        total, weighted = self._total()
        mean = weighted / total
        assert (self.fleet.server.w + self.state.u).tolist() == pytest.approx(mean.tolist(), abs=1e-11)

    def settle(self) -> None:
        """Restart every process and lose nothing from then on: w approaches Σ p_i c_i, apart from the
        y_i lost before."""
        for name in self.fleet.devices:
            if self.fleet.devices[name].core is None:
                self.start(name)
        for name in self.fleet.devices:
            self.fleet.crash(name)
            self.start(name)
        for _ in range(300):
            for name in self.fleet.alive:
                self.work_off(name)
            self.fleet.end_instant()
            self.check()
            # y_i = (x + c_i)/2 of those that train; what was lost stays as it is.
            halves = sum(IMPORTANCE[name] * CENTERS[name] / 2 for name in IMPORTANCE)
            lost = sum(p * y.item() for p, y in self.lost)
            expected = (halves + lost) / (1 / 2 + sum(p for p, _ in self.lost))
            if abs(self.fleet.server.w.item() - expected) < 1e-8:
                return
        raise AssertionError(f"ends at {self.fleet.server.w.item()}, not at {expected}")

    def _total(self) -> tuple[float, Vector]:
        parts = [(IMPORTANCE[name], y) for name, y in self.y.items()] + self.lost
        return sum(p for p, _ in parts), sum((p * y for p, y in parts), np.zeros(1))

    def start(self, name: str) -> None:
        self.fleet.start(name)
        self.y.setdefault(name, self.fleet.server.w.copy())

    def leave(self, name: str) -> None:
        self.fleet.leave(name)
        if any(note.startswith(f"{name} retired") for note in self._notes()):
            del self.y[name]

    def finish(self, name: str, *, diverged: bool = False) -> None:
        """A client writes its memory to disk before it sends."""
        self.fleet.finish(name, diverged=diverged)
        sent = self.fleet.devices[name].memory["sent"]
        assert sent[0] == self.fleet.devices[name].outbox[-1].sequence
        self._ends[name, sent[0]] = sent[1]

    def arrive(self, name: str) -> None:
        if self.fleet.arrive(name):
            self.y[name] = self._ends[name, self.fleet.arrived[-1].sequence]
        elif any("restarts as a new member" in note for note in self._notes()):
            self.lost.append((IMPORTANCE[name], self.y[name]))
            self.y[name] = self.fleet.server.w.copy()

    def work_off(self, name: str) -> None:
        device = self.fleet.devices[name]
        while device.inbox:
            self.fleet.deliver(name)
        if device.training:
            self.finish(name)
        while device.outbox:
            self.arrive(name)

    def _notes(self) -> list[str]:
        """Records since the last call."""
        new, self._read = self.fleet.records[self._read :], len(self.fleet.records)
        return [record.message for record in new if isinstance(record, events.Note)]


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
def test_any_run_converges_to_the_weighted_mean(rule: Area, life: list[tuple[str, str]]) -> None:
    mean = Mean(rule)
    for what, name in life:
        mean.happens(what, name)
    mean.settle()
