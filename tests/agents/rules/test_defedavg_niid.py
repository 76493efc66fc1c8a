"""DeFedAvg for non-IID data: n draws with replacement, w ← w + (η_g/n) Σ m_i Δ_i. Computed by hand."""

from __future__ import annotations

import pytest

from agents.rules.defedavg_niid import DeFedAvgNiid
from agents.rules.interface import Actions, Aggregated, Broadcast, Ignored, RequestUpdate, Send
from tests.agents.helpers import make_server, update, weights


def pulled(actions: Actions) -> list[str]:
    return [a.client for a in actions if isinstance(a, RequestUpdate) and a.what == "pull"]


def test_client_counts_once_per_draw() -> None:
    server = make_server(0.5, 0.5, w=(1.0,), seed=0)
    state = DeFedAvgNiid(sample=4, server_lr=0.5).begin(server)
    # Drawn with seed 0: b, b, b, a.
    assert state.start() == [Broadcast(), RequestUpdate("a", "pull"), RequestUpdate("b", "pull")]
    assert state.update(update("b", 8.0)) == []
    assert server.w.tolist() == [1.0]
    aggregated, broadcast, *requests = state.update(update("a", 16.0))
    assert server.w.tolist() == [1 + 0.5 * (3 * 8 + 16) / 4] == [6.0]
    assert weights([aggregated]) == [("b", 0.375), ("a", 0.125)]
    assert broadcast == Broadcast()
    assert pulled(requests)  # the next round has begun


def test_clients_count_equally_on_average() -> None:
    server = make_server(0.7, 0.2, 0.1, seed=1)
    state = DeFedAvgNiid(sample=2).begin(server)
    drawn = pulled(state.start())
    total = dict.fromkeys("abc", 0.0)
    for _ in range(3000):
        done: Actions = []
        for client in drawn:
            done = state.update(update(client, 0.0))
        for client, weight in weights(done):
            total[client] += weight
        drawn = pulled(done)
    assert list(total.values()) == pytest.approx([1000] * 3, rel=0.05)


def test_update_that_was_not_requested_is_ignored_and_answered() -> None:
    server = make_server(0.5, 0.5, seed=0)
    state = DeFedAvgNiid(sample=1).begin(server)
    assert pulled(state.start()) == ["b"]
    ignored, work = state.update(update("a", 3.0))
    assert isinstance(ignored, Ignored)
    assert work == Send("a")
    assert server.w.tolist() == [0.0]


def test_round_without_clients_is_drawn_again() -> None:
    server = make_server(0.5, 0.5, seed=0)
    state = DeFedAvgNiid(sample=1).begin(server)
    assert pulled(state.start()) == ["b"]
    del server.clients["b"]
    assert state.leave("b") == [Aggregated(0, ()), RequestUpdate("a", "pull")]  # counts as a round
    del server.clients["a"]
    assert state.leave("a") == [Aggregated(0, ())]
    server.clients["b"] = 0.5
    assert state.join("b") == [Send("b"), RequestUpdate("b", "pull")]
    server.clients["a"] = 0.5
    assert state.join("a") == [Send("a")]  # drawn from the next round on
    assert state.leave("a") == []
    assert server.version == 0
