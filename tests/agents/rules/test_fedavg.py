"""FedAvg: w ← w + η_g Σ p'_i Δ_i, round by round. Numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from agents.rules.fedavg import FedAvg
from agents.rules.interface import Aggregated, Ignored, SetTimer
from agents.timing.nanoseconds import SECOND
from tests.agents.helpers import make_server, sent, update, weights


def test_a_round_waits_for_all_and_adds_their_weighted_mean() -> None:
    server = make_server(0.25, 0.75, w=(1.0, 2.0))
    state = FedAvg().begin(server)
    assert sent(state.start()) == ["a", "b"]
    assert state.update(update("b", 8.0, 0.0)) == []
    assert server.w.tolist() == [1.0, 2.0]
    done = state.update(update("a", 4.0, -4.0))
    assert server.w.tolist() == [1 + 0.25 * 4 + 0.75 * 8, 2 - 0.25 * 4] == [8.0, 1.0]
    assert server.version == 1
    assert weights(done) == [("b", 0.75), ("a", 0.25)]
    assert sent(done) == ["a", "b"]


def test_round_is_sent_at_the_end_of_the_instant() -> None:
    state = FedAvg().begin(make_server(1.0))
    assert all(action.deferred for action in state.start())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rule", "w"),
    [
        (FedAvg(sample=2), 0.5 / 0.7 * 7 + 0.2 / 0.7 * 14),  # = 9
        (FedAvg(sample=2, weights="unbiased"), 0.5 * 3 / 2 * 7 + 0.2 * 3 / 2 * 14),  # = 9.45
    ],
)
def test_clients_are_sampled_without_replacement(rule: FedAvg, w: float) -> None:
    server = make_server(0.5, 0.3, 0.2, seed=9)
    state = rule.begin(server)
    assert sent(state.start()) == ["a", "c"]
    state.update(update("a", 7.0))
    state.update(update("c", 14.0))
    assert server.w.tolist() == pytest.approx([w])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # Drawn: a, a, b. p' is (2·0.25, 0.75) / 1.25.
        (FedAvg(sample=3, replacement=True), [("a", 0.4), ("b", 0.6)]),
        # p_i N/n for each time drawn: 2 · 0.25 · 2/3 and 0.75 · 2/3.
        (FedAvg(sample=3, replacement=True, weights="unbiased"), [("a", 1 / 3), ("b", 0.5)]),
    ],
)
def test_client_sampled_with_replacement_counts_once_per_draw(
    rule: FedAvg, expected: list[tuple[str, float]]
) -> None:
    server = make_server(0.25, 0.75, seed=3)
    state = rule.begin(server)
    assert sent(state.start()) == ["a", "b"]  # once each, however often drawn
    state.update(update("a", 30.0))
    done = state.update(update("b", 20.0))
    assert weights(done) == [(name, pytest.approx(weight)) for name, weight in expected]
    assert server.w.tolist() == pytest.approx([30 * expected[0][1] + 20 * expected[1][1]])


@pytest.mark.parametrize("replacement", [False, True])
def test_unbiased_weights_equal_the_importance_on_average(replacement: bool) -> None:
    server = make_server(0.6, 0.3, 0.1)
    state = FedAvg(sample=2, replacement=replacement, weights="unbiased").begin(server)
    total = dict.fromkeys("abc", 0.0)
    actions = state.start()
    for _ in range(2000):
        for client in sent(actions):
            actions = state.update(update(client, 0.0, base=server.version))
        for client, weight in weights(actions):
            total[client] += weight / 2000
    assert total == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1}, rel=0.1)


def test_round_ends_when_its_last_missing_client_leaves() -> None:
    server = make_server(0.5, 0.5)
    state = FedAvg().begin(server)
    state.start()
    state.update(update("a", 3.0))
    del server.clients["b"]
    assert weights(state.leave("b")) == [("a", 1.0)]
    assert server.w.tolist() == [3.0]


def test_dropped_client_does_not_count_among_the_drawn() -> None:
    """Unbiased: with a left of the drawn (a, c), and 2 of 3 clients present, p_c · 2/1."""
    server = make_server(0.5, 0.3, 0.2, seed=9)
    state = FedAvg(sample=2, weights="unbiased").begin(server)
    assert sent(state.start()) == ["a", "c"]
    del server.clients["a"]
    state.leave("a")
    assert weights(state.update(update("c", 10.0))) == [("c", pytest.approx(0.4))]


def test_client_leaving_after_its_update_counts_in_the_population() -> None:
    """Unbiased: p · 3/2 for both, although c is not present any more."""
    server = make_server(0.5, 0.3, 0.2, seed=9)
    state = FedAvg(sample=2, weights="unbiased").begin(server)
    assert sent(state.start()) == ["a", "c"]
    state.update(update("c", 10.0))
    del server.clients["c"]
    assert state.leave("c") == []
    done = state.update(update("a", 10.0))
    assert weights(done) == [("c", pytest.approx(0.3)), ("a", pytest.approx(0.75))]


def test_round_without_clients_restarts_without_a_new_version() -> None:
    server = make_server(0.5, 0.5)
    state = FedAvg(sample=1).begin(server)
    (drawn,) = sent(state.start())
    del server.clients[drawn]
    (other,) = server.clients
    assert sent(state.leave(drawn)) == [other]
    del server.clients[other]
    assert state.leave(other) == [Aggregated(0, ())]  # counts as a round
    server.clients[drawn] = 0.5
    assert sent(state.join(drawn)) == [drawn]
    assert server.version == 0


def test_round_timeout_aggregates_the_updates_received() -> None:
    server = make_server(0.5, 0.5)
    state = FedAvg(round_timeout=5.0).begin(server)
    assert SetTimer("round", 5 * SECOND) in state.start()
    state.update(update("a", 3.0))
    done = state.timer("round")
    assert weights(done) == [("a", 1.0)]
    assert server.w.tolist() == [3.0]
    assert sent(done) == ["a", "b"]
    assert SetTimer("round", 5 * SECOND) in done
    assert isinstance(state.update(update("b", 9.0))[0], Ignored)  # from version 0: late
    assert server.w.tolist() == [3.0]


def test_round_timeout_without_updates_sends_the_model_again() -> None:
    server = make_server(0.5, 0.5)
    state = FedAvg(round_timeout=5.0).begin(server)
    state.start()
    again = state.timer("round")
    assert sent(again) == ["a", "b"]
    assert SetTimer("round", 5 * SECOND) in again
    assert server.version == 0


def test_a_second_update_in_one_round_is_ignored() -> None:
    server = make_server(0.5, 0.5)
    state = FedAvg().begin(server)
    state.start()
    state.update(update("a", 2.0))
    assert isinstance(state.update(update("a", 2.0))[0], Ignored)
    state.update(update("b", 2.0))
    assert server.w.tolist() == [2.0]


def test_models_and_deltas_are_averaged_together() -> None:
    """The client side asks for models; compressed ones come as deltas. One model alone is copied."""
    server = make_server(0.25, 0.75, w=(1.0, 2.0))
    state = FedAvg(server_lr=0.5).begin(server)
    state.start()
    state.update(update("a", 5.0, -2.0, kind="model"))
    done = state.update(update("b", 8.0, 0.0))
    assert server.w.tolist() == [1 + 0.5 * (0.25 * 4 + 0.75 * 8), 2 - 0.5 * 0.25 * 4] == [4.5, 1.5]
    assert weights(done) == [("a", 0.125), ("b", 0.375)]
    assert FedAvg().client_side.kinds == ("delta", "model")
    assert FedAvg(trim="median").client_side.kinds == ("delta",)
    alone = make_server(1 / 49, w=(1e8, 1.0))
    state = FedAvg().begin(alone)
    state.start()
    state.update(update("a", 0.1, 0.3, kind="model"))
    assert alone.w.tolist() == np.array([0.1, 0.3], alone.w.dtype).tolist()
