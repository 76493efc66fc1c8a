"""Trimmed mean and median (Yin et al. 2018): numbers computed by hand, and what always holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from agents.models.vectors import trimmed_mean
from agents.rules import RULES
from agents.rules.asysg import AsySG
from agents.rules.defedavg_niid import DeFedAvgNiid
from agents.rules.fedavg import FedAvg
from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Rule
from agents.rules.parts import RobustSum, Trim, WeightedSum, count_trimmed, make_sum
from tests.agents.helpers import make_server, update, weights

VALUES = (1.0, 2.0, 4.0, 7.0, 1000.0)


@pytest.mark.parametrize(
    ("updates", "trim", "k"),
    [
        *((5, "median", 2), (4, "median", 1), (3, "median", 1), (2, "median", 0), (1, "median", 0)),
        *((5, 0.2, 1), (5, 0.4, 2), (10, 0.3, 3), (100, 0.29, 29), (5, 0.19, 0), (3, 0.49, 1)),
    ],
)
def test_number_trimmed_at_each_end(updates: int, trim: Trim, k: int) -> None:
    assert count_trimmed(updates, trim) == k


@pytest.mark.parametrize(
    ("trim", "moved"),
    [(0.0, 202.8), (0.2, 13 / 3), (0.4, 4.0), ("median", 4.0)],
)
def test_fedbuff_moves_by_the_trimmed_mean(trim: Trim, moved: float) -> None:
    server = make_server(0.5, 0.5)
    state = FedBuff(buffer_size=5, trim=trim).begin(server)
    for value in VALUES[:-1]:
        state.update(update("a", value))
    done = state.update(update("b", VALUES[-1]))
    assert server.w.tolist() == [pytest.approx(moved, rel=1e-12)]
    assert weights(done) == [("a", 0.2)] * 4 + [("b", 0.2)]  # as of the mean
    for value in (1.0, 1.0, 1.0, 1.0, 1.0):  # the next buffer has nothing of this one
        state.update(update("a", value))
    assert server.w.tolist() == [pytest.approx(moved + 1.0, rel=1e-12)]


def test_coordinates_are_trimmed_separately() -> None:
    state = AsySG(gradients=3, trim="median").begin(make_server(0.3, 0.3, 0.4, w=(0.0, 0.0)))
    server = state.server
    for client, gradient in zip("abc", [(1.0, 9.0), (2.0, -5.0), (30.0, 4.0)], strict=True):
        state.update(update(client, *gradient, kind="gradient"))
    assert server.w.tolist() == [-2.0, -4.0]


@pytest.mark.parametrize(
    ("trim", "importance", "values", "moved"),
    [
        (0.25, (0.7, 0.1, 0.1, 0.1), (1.0, 1.0, 1.0, 1.0), 1.0),
        ("median", (0.7, 0.1, 0.1, 0.1), (1.0, 1.0, 1.0, 1.0), 1.0),
        ("median", (0.5, 0.3, 0.2), (1.0, 2.0, 100.0), 2.0),
        (0.25, (0.1, 0.2, 0.3, 0.4), (9.0, -4.0, 1.0, 2.0), (0.3 * 1 + 0.4 * 2) / 0.7),
        (0.25, (0.1, 0.2, 0.3, 0.4), (1.0, 2.0, 900.0, -900.0), (0.1 * 1 + 0.2 * 2) / 0.3),
    ],
)
def test_fedavg_trims_by_value_and_weighs_the_rest_by_importance(
    trim: Trim, importance: tuple[float, ...], values: tuple[float, ...], moved: float
) -> None:
    server = make_server(*importance)
    state = FedAvg(trim=trim).begin(server)
    state.start()
    for client, value in zip("abcd", values, strict=False):
        done = state.update(update(client, value))
    assert server.w.tolist() == [pytest.approx(moved, rel=1e-12)]
    assert [weight for _, weight in weights(done)] == pytest.approx(importance)


def test_stale_updates_are_trimmed_before_they_are_discounted() -> None:
    """τ = 3 halves the first two; of (6, 1, 2, 0) the first and the last are left out, and Σ a = 3."""
    server = make_server(0.5, 0.5)
    server.version = 3
    state = FedBuff(buffer_size=4, trim=0.25, staleness="inverse_sqrt").begin(server)
    for value, base in ((6.0, 0), (1.0, 0), (2.0, 3), (0.0, 3)):
        state.update(update("a", value, base=base))
    mean = (0.5 * 1.0 + 1.0 * 2.0) / 1.5
    assert server.w.tolist() == [pytest.approx(3.0 * mean / 4)]


def test_client_drawn_twice_counts_twice_in_the_trimmed_mean() -> None:
    server = make_server(0.4, 0.3, 0.3)
    state = DeFedAvgNiid(sample=3, trim="median").begin(server)
    state.start()
    state._waiting = {"a": 2, "b": 1}
    state.update(update("a", 1.0))
    state.update(update("b", 50.0))
    assert server.w.tolist() == [1.0]  # of 1, 1 and 50


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("fedbuff", {"buffer_size": 5, "trim": 0.1}, "only 5 updates are aggregated: use at least 0.2"),
        (
            "fedbuff",
            {"buffer_size": 2, "trim": "median"},
            "at least 3 updates per aggregation, but there are 2",
        ),
        ("fedbuff", {"buffer_size": 9, "trim": 0.5}, "expected from 0 to below 0.5, or median"),
        ("fedbuff", {"buffer_size": 9, "trim": -0.1}, "expected from 0 to below 0.5, or median"),
        ("defedavg_iid", {"buffer_size": 2, "trim": 0.4}, "at least 3 updates"),
        ("defedavg_niid", {"sample": 2, "trim": 0.4}, "at least 3 updates"),
        ("asysg", {"gradients": 2, "trim": 0.4}, "at least 3 updates"),
        ("port", {"min_updates": 2, "trim": 0.4}, "at least 3 updates"),
        ("fedavg", {"sample": 3, "trim": 0.2}, "at least 0.34"),
        ("fedfix", {"period": 1.0, "trim": 0.6}, "below 0.5"),
    ],
)
def test_trim_that_removes_nothing_is_refused(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RULES[name](**parameters)


def test_fedavg_of_all_clients_checks_trim_against_the_fleet() -> None:
    rule: Rule = FedAvg(trim=0.1)
    rule.check(10)
    with pytest.raises(ValueError, match=r"only 9 updates are aggregated: use at least 0\.12"):
        rule.check(9)


NUMBERS = st.floats(-1e6, 1e6, width=32)
rows = st.integers(1, 9).flatmap(lambda n: arrays.arrays(np.float32, (n, 3), elements=NUMBERS).map(list))


def drawn_weights(data: st.DataObject, rows: list[Any]) -> list[float]:
    """One for each row, often the same."""
    n = len(rows)
    one = st.sampled_from([0.1, 0.1, 0.25, 0.7, 3.0])
    return data.draw(st.lists(one, min_size=n, max_size=n))


@given(rows=rows, data=st.data())
def test_trimmed_mean_does_not_depend_on_the_order(rows: list[Any], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, (len(rows) - 1) // 2))
    a = drawn_weights(data, rows)
    order = data.draw(st.permutations(range(len(rows))))
    other = trimmed_mean([rows[i] for i in order], k, [a[i] for i in order])
    assert trimmed_mean(rows, k, a).tobytes() == other.tobytes()


@given(rows=rows, data=st.data())
def test_equal_updates_give_the_same_mean_for_any_weights(rows: list[Any], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, (len(rows) - 1) // 2))
    mean = trimmed_mean([rows[0]] * len(rows), k, drawn_weights(data, rows))
    assert mean == pytest.approx(rows[0], rel=1e-6)


@given(rows=rows, weight=st.floats(0.1, 2.0), scale=st.floats(0.1, 2.0))
def test_trim_of_zero_is_the_plain_sum(rows: list[Any], weight: float, scale: float) -> None:
    moved = []
    for kind in (WeightedSum, lambda server: RobustSum(server, 0.0)):
        server = make_server(1.0, w=(0.0, 0.0, 0.0))
        total = kind(server)
        for n, row in enumerate(rows):
            total.add(update("a", *row.tolist()), weight * (n + 1))
        total.apply(scale, sign=-1)
        moved.append(server.w)
    assert moved[0] == pytest.approx(moved[1], rel=1e-9, abs=1e-3)


@given(rows=rows, data=st.data())
def test_k_attackers_cannot_move_the_mean_beyond_the_honest_range(
    rows: list[Any], data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, (len(rows) - 1) // 2))
    forged = arrays.arrays(np.float32, 3, elements=st.floats(-(2.0**63), 2.0**63, width=32))
    attacked = [*rows[k:], *(data.draw(forged) for _ in range(k))]
    a = drawn_weights(data, rows)
    honest, mean = np.array(rows[k:]), trimmed_mean(attacked, k, a)
    slack = 1e-6 * np.abs(honest).max(axis=0)  # of float32's rounding
    assert (honest.min(axis=0) - slack <= mean).all()
    assert (mean <= honest.max(axis=0) + slack).all()


def test_updates_without_weight_move_nothing() -> None:
    """Port gives weight zero to an update in the opposite direction."""
    rows = [np.array([value, value], np.float32) for value in (1.0, 2.0, 3.0)]
    assert trimmed_mean(rows, 1, [1.0, 0.0, 1.0]).tolist() == [0.0, 0.0]
    assert trimmed_mean(rows, 0, [1.0, 0.0, 3.0]).tolist() == [2.5, 2.5]


def test_long_vectors_are_trimmed_like_short_ones() -> None:
    rows = list(np.random.default_rng(0).normal(size=(7, 100_000)).astype(np.float32))
    assert trimmed_mean(rows, 3, [0.5] * 7).tolist() == np.median(rows, axis=0).tolist()
    unequal = trimmed_mean(rows, 3, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert unequal.tolist() == np.median(rows, axis=0).tolist()


def test_plain_sum_holds_no_update() -> None:
    assert type(make_sum(make_server(1.0), 0.0)) is WeightedSum
