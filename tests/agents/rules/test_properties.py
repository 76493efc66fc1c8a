"""Properties of every rule under any events: random lives of a fleet, through the real cores."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import events
from agents.aggregator import actions as act
from agents.models.vectors import Vector
from agents.rules import RULES
from agents.rules.area import Area
from agents.rules.as_fedavg import AsFedAvg
from agents.rules.async_fedavg import AsyncFedAvg
from agents.rules.asysg import AsySG
from agents.rules.defedavg_iid import DeFedAvgIid
from agents.rules.defedavg_niid import DeFedAvgNiid
from agents.rules.favano import Favano
from agents.rules.fedasync import FedAsync
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.fedfa import FedFa
from agents.rules.fedfix import FedFix
from agents.rules.interface import RequestUpdate, Rule
from agents.rules.port import Port
from analysis.client_story import story
from tests.agents.fleet import Fleet, random_lives
from tests.agents.helpers import records
from tests.agents.lives import Life

INSTANCES: dict[str, list[Rule]] = {
    "area": [
        Area(every=1),
        Area(every=3, lr=0.1, server_lr=0.5),
        Area(criterion="period", period=2.5, step="harmonic", c=1.0, d=2.0),
        Area(criterion="random", rate=1.0, tuned=True),
    ],
    "as_fedavg": [AsFedAvg(every=1), AsFedAvg(every=3)],
    "async_fedavg": [
        AsyncFedAvg(),
        AsyncFedAvg(weights="time_based"),
        AsyncFedAvg(weights="time_based", update_times=(1.0, 2.0, 3.0, 4.0)),
    ],
    "asysg": [AsySG(gradients=1), AsySG(gradients=3, mean=False), AsySG(gradients=3, trim="median")],
    "defedavg_iid": [
        *(DeFedAvgIid(buffer_size=1), DeFedAvgIid(buffer_size=3)),
        DeFedAvgIid(buffer_size=3, trim="median"),
    ],
    "defedavg_niid": [
        *(DeFedAvgNiid(sample=2), DeFedAvgNiid(sample=3, send_buffer="hold")),
        DeFedAvgNiid(sample=4, trim=0.25),
    ],
    "favano": [Favano(period=2.5, sample=2), Favano(period=1.0, sample=3, debias="deterministic")],
    "fedasync": [FedAsync(), FedAsync(staleness="hinge")],
    "fedavg": [
        FedAvg(),
        FedAvg(sample=2),
        FedAvg(sample=3, replacement=True, weights="unbiased"),
        FedAvg(sample=2, round_timeout=2.5),
        FedAvg(trim="median"),
    ],
    "fedbuff": [
        FedBuff(buffer_size=2),
        FedBuff(buffer_size=3, staleness="inverse_sqrt", concurrency=2),
        FedBuff(buffer_size=4, reply="after_aggregation"),
        FedBuff(buffer_size=2, concurrency=3, replace="block"),
        FedBuff(buffer_size=3, staleness="inverse_sqrt", trim="median"),
    ],
    "fedfa": [FedFa(window_size=3), FedFa(window_size=3, variant="delta", server_lr=0.3)],
    "fedfix": [
        FedFix(period=2.5),
        FedFix(period=3.0, update_times=(1.0, 2.0, 3.0, 4.0)),
        FedFix(period=2.5, trim=0.4),
    ],
    "port": [
        Port(min_updates=2),
        Port(min_updates=2, staleness_bound=1),
        Port(min_updates=2, staleness_bound=1, urgent=False),
        Port(min_updates=2, staleness_bound=2, concurrency=3),
        Port(min_updates=3, staleness_bound=2, trim="median"),
    ],
}
"""Parameters of every rule that differ in what is sent to whom, and when."""

IMPORTANCE = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}

every_rule = pytest.mark.parametrize(
    "rule", [rule for rules in INSTANCES.values() for rule in rules], ids=repr
)

MOVES = ["deliver", "finish", "arrive", "work"] * 3 + [
    *["diverge", "crash", "reconnect", "tick", "connect anew", "lose all", "start anew"]
]

Steps = list[tuple[str, str]]
lives = st.lists(
    st.tuples(st.sampled_from(MOVES), st.sampled_from(list(IMPORTANCE))), min_size=5, max_size=60
)
"""Events of a life, one per instant, with their client."""


def test_every_rule_is_tested_here() -> None:
    assert INSTANCES.keys() == RULES.keys()
    for name, rules in INSTANCES.items():
        assert {type(rule) for rule in rules} == {RULES[name]}
        for rule in rules:
            rule.check(len(IMPORTANCE))


def live(rule: Rule, life: Steps, progress: Callable[[Vector], Vector]) -> Fleet:
    fleet = Fleet(rule, IMPORTANCE, lambda _, w: progress(w))
    for what, name in life:
        Life(fleet).happens(what, name)
        at_work = any(fleet.devices[present].busy for present in fleet.server.clients)
        assert at_work or fleet.core.rule_waits, "nobody is at work, and the rule waits for no timer"
    return fleet


def settle(fleet: Fleet) -> None:
    """Check that without further events new versions are made and every update is applied."""
    owed, version = set(fleet.accepted), fleet.server.version
    for _ in range(1000):
        fleet.work(1)
        if owed <= set(applied(fleet)) and fleet.server.version >= version + 3:
            return
    told = [f"{name}:\n" + "\n".join(map(str, story(fleet.records, name))) for name in IMPORTANCE]
    raise AssertionError("\n".join(["the run is stuck", *told]))


def applied(fleet: Fleet) -> list[tuple[str, int, float]]:
    """The updates in the log as in `Fleet.accepted`, in order."""
    updates = [r for r in fleet.records if isinstance(r, events.UpdateApplied)]
    return [(u.client, u.sequence, u.sent) for u in updates]


def strays(actions: act.Actions) -> list[str]:
    """Return the reasons of rejection if `actions` hold nothing else; a request may be repeated."""
    logs = [action for action in actions if not isinstance(action, RequestUpdate)]
    assert len(records(logs)) == len(logs)
    return [record.reason for record in records(logs) if isinstance(record, events.UpdateRejected)]


@every_rule
@given(life=lives)
@settings(random_lives, max_examples=30)
def test_run_never_stalls_and_its_records_are_consistent(rule: Rule, life: Steps) -> None:
    fleet = live(rule, life, lambda w: (1 - w) / 4)
    settle(fleet)
    listed = applied(fleet)
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(fleet.accepted)
    updates = [r for r in fleet.records if isinstance(r, events.UpdateApplied)]
    assert all(update.weight > 0 and update.staleness >= 0 for update in updates)
    versions = [r for r in fleet.records if isinstance(r, events.VersionMade)]
    made = [v.version for v in versions]
    assert sorted(set(made) - {0}) == list(range(1, fleet.server.version + 1))
    assert made == sorted(made)
    assert sum(v.updates for v in versions) == len(updates)
    assert np.isfinite(fleet.server.w).all()


BUFFERED: list[tuple[Rule, int]] = [
    (FedBuff(buffer_size=3), 3),
    (FedBuff(buffer_size=4, reply="after_aggregation"), 4),
    (FedBuff(buffer_size=2, concurrency=2, replace="block"), 2),
    (AsFedAvg(every=3), 3),
    (AsySG(gradients=4), 4),
    (DeFedAvgIid(buffer_size=4), 4),
    (Port(min_updates=4), 4),
    (Port(min_updates=2, staleness_bound=1, concurrency=2), 2),
]
"""Rules with a buffer, and the number of updates that fill it."""


PARTS = {"rejected": ["deliver", "diverge", "arrive"]}
LOSSES = ["work"] * 4 + ["rejected"] * 2 + ["deliver", "finish", "arrive", "lose all", "start anew"]
losing_lives = st.lists(
    st.tuples(st.sampled_from(LOSSES), st.sampled_from(list(IMPORTANCE))), min_size=30, max_size=60
)
"""Lives in which updates are rejected and lost, and no client leaves for longer."""


@pytest.mark.parametrize(("rule", "full"), BUFFERED, ids=repr)
@given(life=losing_lives)
@settings(random_lives, max_examples=60)
def test_lost_work_neither_flushes_a_buffer_nor_counts(rule: Rule, full: int, life: Steps) -> None:
    steps = [(part, name) for what, name in life for part in PARTS.get(what, [what])]
    fleet = live(rule, steps, lambda w: (1 - w) / 4)
    settle(fleet)
    made = [one for one in fleet.records if isinstance(one, events.VersionMade) and one.version]
    assert [one.updates for one in made if one.updates < full] == []
    rejected = {
        (record.client, record.dispatch)
        for record in fleet.records
        if isinstance(record, events.UpdateRejected) and "diverged" in record.reason
    }
    used = [
        (record.client, record.dispatch)
        for record in fleet.records
        if isinstance(record, events.UpdateApplied)
    ]
    assert len(used) == len(set(used))
    assert not rejected & set(used)


@every_rule
@given(life=lives)
@settings(random_lives, max_examples=15)
def test_zero_updates_leave_the_model_unchanged(rule: Rule, life: Steps) -> None:
    fleet = live(rule, life, np.zeros_like)
    fleet.work(3)
    assert set(fleet.models) <= {np.array([0.3], np.float32).tobytes()}


@every_rule
@given(life=lives)
@settings(random_lives, max_examples=15)
def test_equal_inputs_give_equal_actions_and_equal_bits(rule: Rule, life: Steps) -> None:
    one, two = (live(rule, life, np.cos) for _ in range(2))
    assert one.log == two.log
    assert one.models == two.models


def digest() -> str:
    """Return the digest of a long life with every rule."""
    dice = random.Random(0)  # noqa: S311
    life = [(dice.choice(MOVES), dice.choice("abcd")) for _ in range(200)]
    fleets = [live(rule, life, np.cos) for rules in INSTANCES.values() for rule in rules]
    return hashlib.sha256(repr([(fleet.log, fleet.models) for fleet in fleets]).encode()).hexdigest()


def test_actions_do_not_depend_on_set_order() -> None:
    """The order of a set differs in every process, because Python's string hashes do."""
    command = [sys.executable, "-c", f"from {__name__} import digest; print(digest())"]
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest()


@every_rule
def test_stray_messages_only_raise_a_counter(rule: Rule) -> None:
    fleet = Fleet(rule, IMPORTANCE, lambda _, w: 1 - w)
    fleet.work(6)
    last = fleet.arrived[-1]
    gone = next(name for name in IMPORTANCE if name != last.client)
    fleet.crash(gone)
    fleet.end_instant()
    before = fleet.server.w.copy(), fleet.server.version, fleet.core.next_timer
    for sender in (last.client, gone, "stranger"):
        is_known = (sender, last.dispatch) in fleet.core.acknowledged  # perhaps another's broadcast
        found = strays(fleet.core.update(sender, last, 4, fleet.now))
        assert found == ([] if is_known else ["its client is not present"])
        assert is_known or sender != last.client
    assert fleet.core.end_of_instant(fleet.now) == []
    assert (fleet.server.w, fleet.server.version, fleet.core.next_timer) == before


@every_rule
@given(life=lives)
@settings(random_lives, max_examples=15)
def test_duplicate_message_changes_nothing(rule: Rule, life: Steps) -> None:
    fleet = Fleet(rule, IMPORTANCE, lambda _, w: np.cos(w))
    for what, name in life:
        Life(fleet).happens(what, name)
        for message in fleet.arrived[-3:]:
            before = fleet.server.w.tobytes(), fleet.server.version
            assert fleet.hand_in(message) == []
            assert fleet.core.acknowledged[-1] == (message.client, message.dispatch)
            assert (fleet.server.w.tobytes(), fleet.server.version) == before
