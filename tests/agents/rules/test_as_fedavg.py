"""AS-FedAvg: at every Δ-th arrival, w ← the mean of the Δ models. Numbers computed by hand."""

from __future__ import annotations

import numpy as np

from agents.rules.as_fedavg import AsFedAvg
from agents.rules.interface import Send, SetTimer
from tests.agents.helpers import make_server, sent, update, weights

NOW = SetTimer("aggregate", 0)


def test_version_is_made_after_the_last_contributor_is_answered() -> None:
    server = make_server(0.25, 0.75, w=(9.0, 9.0))
    state = AsFedAvg(every=2).begin(server)
    assert sent(state.start()) == ["a", "b"]
    assert state.update(update("b", 1.0, 0.0)) == [Send("b")]
    assert state.update(update("a", 3.0, -8.0)) == [Send("a"), NOW]
    assert (server.w.tolist(), server.version) == ([9.0, 9.0], 0)  # this is what a is sent
    done = state.timer("aggregate")
    assert (server.w.tolist(), server.version) == ([2.0, -4.0], 1)
    assert weights(done) == [("b", 0.5), ("a", 0.5)]
    assert state.timer("aggregate") == []


def test_arrival_of_the_same_instant_is_handled_after_the_aggregation() -> None:
    server = make_server(0.25, 0.25, 0.5)
    state = AsFedAvg(every=2).begin(server)
    state.update(update("a", 1.0))
    state.update(update("b", 3.0))
    aggregated, *rest = state.update(update("c", 7.0))
    assert weights([aggregated]) == [("a", 0.5), ("b", 0.5)]
    assert rest == [Send("c")]
    assert server.w.tolist() == [2.0]
    assert state.timer("aggregate") == []  # nothing is left to do, c counts for the next
    assert state.update(update("a", 1.0)) == [Send("a"), NOW]
    assert weights(state.timer("aggregate")) == [("c", 0.5), ("a", 0.5)]
    assert server.w.tolist() == [4.0]


def test_equal_models_in_float32_are_a_fixed_point() -> None:
    server = make_server(1.0)
    server.w = np.array([0.1], np.float32)
    state = AsFedAvg(every=3).begin(server)
    for _ in range(3):
        state.update(update("a", float(np.float32(0.1))))
    state.timer("aggregate")
    assert server.w.tolist() == np.array([0.1], np.float32).tolist()
