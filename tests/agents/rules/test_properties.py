"""What holds for every rule, whatever happens: random lives of a fleet, through the real core."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import events
from agents.aggregator import actions as act
from agents.config import Stop
from agents.rules import RULES
from agents.rules.fedasync import FedAsync
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule
from tests.agents.helpers import Simulation, make_core, message, records

CONFIGURATIONS: list[Rule] = [
    FedAvg(),
    FedAvg(sample=2),
    FedAvg(sample=3, replacement=True, weights="unbiased"),
    FedAvg(sample=2, round_timeout=2.5),
    FedAsync(),
    FedAsync(staleness="hinge"),
    FedBuff(buffer_size=2),
    FedBuff(buffer_size=3, staleness="inverse_sqrt", concurrency=2),
    FedBuff(buffer_size=4, reply="after_aggregation"),
    FedBuff(buffer_size=2, concurrency=3, replace="block"),
]

CLIENTS = "abcd"

every_rule = pytest.mark.parametrize("rule", CONFIGURATIONS, ids=repr)
lives = st.lists(st.tuples(st.sampled_from(["finish"] * 4 + ["flip", "nan", "tick"]), st.integers(0, 3)))
"""What happens, one instant each, and to which client."""


def test_every_rule_is_tested_here() -> None:
    assert {type(rule) for rule in CONFIGURATIONS} == set(RULES.values())


class Fleet:
    """Four clients around a real core; `progress` is what local training makes of a model."""

    def __init__(self, rule: Rule, progress: Callable[[np.ndarray], np.ndarray]) -> None:
        importance = dict.fromkeys(CLIENTS, 0.25)
        self.core, self.server = make_core(rule, importance=importance)
        self.server.w[:] = 0.3
        self.records: list[events.Record] = []
        self.held: dict[str, list[tuple[act.Dispatch, np.ndarray]]] = {c: [] for c in CLIENTS}
        self._kind = rule.kind
        self._progress = progress
        self._sequence = dict.fromkeys(CLIENTS, 0)
        for client in CLIENTS:
            self.core.status(client, "ready", 0.0)
        self.now = 0.0
        self._execute(self.core.start(0.0, 0.0))
        self._end_instant()

    def happens(self, what: str, client: str) -> None:
        """One instant, one second after the last."""
        self.now += 1.0
        if what == "flip":
            if client in self.server.clients:
                self._say(client, "offline")
            else:
                self._say(client, "joining")
                self._say(client, "ready")
        elif what != "tick" and self.held[client]:
            self._finish(client, diverged=what == "nan")
        self._end_instant()

    def training(self) -> list[str]:
        return [c for c in self.server.clients if self.held[c]]

    def _finish(self, client: str, *, diverged: bool) -> None:
        dispatch, model = self.held[client].pop(0)
        self._sequence[client] += 1
        made = self._progress(model) if self._kind == "delta" else model + self._progress(model)
        answer = message(
            client,
            dispatch.number,
            sequence=self._sequence[client],
            base_version=dispatch.version,
            kind=self._kind,
            vector=made * np.float32("nan") if diverged else made,
        )
        self._execute(self.core.update(client, answer, 4, self.now))

    def _say(self, client: str, state: str) -> None:
        if state == "joining":
            self._sequence[client] = 0
        if state != "ready":
            self.held[client].clear()
        self._execute(self.core.status(client, state, self.now))

    def _end_instant(self) -> None:
        self._execute(self.core.due(self.now))
        self._execute(self.core.end_of_instant(self.now))

    def _execute(self, actions: act.Actions) -> None:
        self.records += records(actions)
        for action in actions:
            if isinstance(action, act.Dispatch):
                self.held[action.client].append((action, self.server.w.copy()))


def live(rule: Rule, life: list[tuple[str, int]], progress: Callable[[np.ndarray], np.ndarray]) -> Fleet:
    fleet = Fleet(rule, progress)
    for what, index in life:
        present = list(fleet.server.clients)
        if what == "flip" and present == [CLIENTS[index]]:
            continue  # the last one stays, or the run would end
        fleet.happens(what, CLIENTS[index])
        assert fleet.training(), "somebody is present and nobody trains: the run is stuck"
    return fleet


@every_rule
@given(life=lives)
@settings(max_examples=40)
def test_a_run_never_gets_stuck_and_its_books_are_right(rule: Rule, life: list[tuple[str, int]]) -> None:
    fleet = live(rule, life, lambda w: 1 - w)
    updates = [r for r in fleet.records if isinstance(r, events.UpdateApplied)]
    versions = [r for r in fleet.records if isinstance(r, events.VersionMade)]
    assert all(0 < update.weight <= 1 for update in updates)
    assert all(update.staleness >= 0 for update in updates)
    assert [v.version for v in versions] == list(range(1, fleet.server.version + 1))
    assert sum(v.updates for v in versions) == len(updates)
    assert np.isfinite(fleet.server.w).all()


@every_rule
@given(life=lives)
@settings(max_examples=15)
def test_zero_updates_leave_the_model_as_it_is(rule: Rule, life: list[tuple[str, int]]) -> None:
    fleet = live(rule, life, np.zeros_like)
    assert fleet.server.w.tolist() == np.array([0.3], np.float32).tolist()


@every_rule
@given(life=lives)
@settings(max_examples=15)
def test_equal_inputs_give_equal_bits(rule: Rule, life: list[tuple[str, int]]) -> None:
    one, two = (live(rule, life, lambda w: np.cos(w)) for _ in range(2))
    assert one.server.w.tobytes() == two.server.w.tobytes()
    assert one.records == two.records


@pytest.mark.parametrize(
    "rule",
    [FedAvg(), FedBuff(buffer_size=1), FedBuff(buffer_size=1, reply="after_aggregation")],
    ids=repr,
)
def test_one_client_alone_does_plain_local_sgd(rule: Rule) -> None:
    """With one step of 40 % of the way to 3: w_k = 3 (1 − 0.6^k)."""
    models = Simulation(rule, [3.0], [1.0], 0.4, Stop(updates=8)).run()
    assert models == pytest.approx([3 * (1 - 0.6**k) for k in range(9)], abs=1e-6)


@every_rule
def test_strays_change_nothing_but_a_counter(rule: Rule) -> None:
    fleet = Fleet(rule, np.ones_like)
    client = fleet.training()[0]
    (dispatch, _) = fleet.held[client][0]
    fleet.happens("finish", client)
    gone = next(c for c in CLIENTS if c != client)
    fleet.happens("flip", gone)
    before = fleet.server.w.copy(), fleet.server.version, fleet.core.next_timer
    for sender, number, reason in [
        (client, dispatch.number, "duplicate"),
        (gone, dispatch.number, "not present"),
        ("stranger", dispatch.number, "not present"),
    ]:
        stray = message(sender, number, kind=rule.kind)
        (record,) = records(fleet.core.update(sender, stray, 4, fleet.now))
        assert isinstance(record, events.UpdateRejected)
        assert (record.client, reason in record.reason) == (sender, True)
    assert fleet.core.end_of_instant(fleet.now) == []
    assert (fleet.server.w.copy(), fleet.server.version, fleet.core.next_timer) == before
