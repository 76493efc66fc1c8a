"""DeFedAvg for IID data: the first n clients, w ← w + (η_g/n) Σ Δ_i. Numbers computed by hand."""

from __future__ import annotations

import numpy as np

from agents.rules.defedavg_iid import DeFedAvgIid
from agents.rules.interface import Broadcast, Send, Update
from tests.agents.helpers import make_server, update, weights


def test_first_n_updates_make_a_version_sent_to_all() -> None:
    server = make_server(0.2, 0.3, 0.5, w=(1.0,))
    state = DeFedAvgIid(buffer_size=2, server_lr=0.5).begin(server)
    assert state.start() == [Broadcast()]
    assert state.update(update("c", 4.0)) == []
    aggregated, broadcast = state.update(update("a", 8.0))
    assert server.w.tolist() == [1 + 0.5 * (4 + 8) / 2] == [4.0]
    assert weights([aggregated]) == [("c", 0.25), ("a", 0.25)]
    assert broadcast == Broadcast()
    state.update(update("b", 4.0, base=0))  # however stale
    state.update(update("a", 0.0, base=1))
    assert server.w.tolist() == [5.0]


def test_second_update_of_a_client_waits_for_the_next_round() -> None:
    server = make_server(0.25, 0.25, 0.5)
    state = DeFedAvgIid(buffer_size=2).begin(server)
    state.start()
    state.update(update("a", 2.0))
    vector = np.array([10.0])
    assert state.update(Update(client="a", dispatch=7, base_version=0, vector=vector)) == []
    vector[:] = 99.0  # whoever handed it in may use it again
    assert weights(state.update(update("b", 4.0))) == [("a", 0.5), ("b", 0.5)]
    assert server.w.tolist() == [3.0]
    (aggregated, _) = state.update(update("c", 6.0))
    assert weights([aggregated]) == [("a", 0.5), ("c", 0.5)]
    assert server.w.tolist() == [3 + (10 + 6) / 2]


def test_waiting_updates_may_make_several_versions_at_once() -> None:
    server = make_server(0.5, 0.5)
    state = DeFedAvgIid(buffer_size=2).begin(server)
    state.start()
    for value in (1.0, 2.0, 3.0):
        state.update(update("a", value))
    done = state.update(update("b", 5.0))
    assert weights(done) == [("a", 0.5), ("b", 0.5)]
    assert (server.w.tolist(), server.version) == ([3.0], 1)
    del server.clients["b"]
    done = state.leave("b")  # a's second and third, as nobody else is left
    assert weights(done) == [("a", 1.0), ("a", 1.0)]
    assert (server.w.tolist(), server.version) == ([3.0 + 2 + 3], 3)


def test_round_ends_with_the_updates_received_when_too_few_clients_are_left() -> None:
    server = make_server(0.25, 0.25, 0.5)
    state = DeFedAvgIid(buffer_size=3).begin(server)
    state.start()
    state.update(update("a", 3.0))
    del server.clients["c"]
    assert state.leave("c") == []
    assert weights(state.update(update("b", 5.0))) == [("a", 0.5), ("b", 0.5)]
    assert server.w.tolist() == [4.0]
    server.clients["c"] = 0.5
    assert state.join("c") == [Send("c")]
    state.update(update("a", 3.0, base=1))
    assert state.update(update("b", 3.0, base=1)) == []  # c is waited for again
