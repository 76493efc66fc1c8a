"""Asynchronous FedAvg: w ← w + η_g d_i Δ_i at every arrival. Numbers computed by hand."""

from __future__ import annotations

import pytest

from agents.rules.async_fedavg import AsyncFedAvg
from agents.rules.interface import Send
from tests.agents.helpers import make_server, sent, update, weights

TIMES = (1.0, 2.0, 4.0)
"""Σ 1/τ = 1.75."""


def test_every_update_is_added_and_answered_with_the_new_model() -> None:
    server = make_server(0.25, 0.75, w=(1.0, 2.0))
    state = AsyncFedAvg(server_lr=0.5).begin(server)
    assert sent(state.start()) == ["a", "b"]
    done = state.update(update("b", 4.0, -2.0))
    assert server.w.tolist() == [3.0, 1.0]
    assert weights(done) == [("b", 0.5)]  # whatever its importance and its time
    assert done[1:] == [Send("b")]
    assert server.version == 1


def test_estimated_times_are_running_means_used_once_all_clients_were_seen() -> None:
    server = make_server(0.5, 0.5)
    state = AsyncFedAvg(weights="time_based").begin(server)

    def weight(client: str, round_trip: float) -> float:
        ((_, given),) = weights(state.update(update(client, 0.0, round_trip=round_trip)))
        return float(given)

    assert weight("a", 1.0) == 1.0
    assert weight("a", 3.0) == 1.0  # b has not been seen
    assert weight("b", 8.0) == (1 / 2 + 1 / 8) * 8 * 0.5 == 2.5
    assert weight("a", 8.0) == pytest.approx((1 / 4 + 1 / 8) * 4 * 0.5) == 0.75


def test_round_trip_of_zero_is_no_estimate() -> None:
    server = make_server(1.0)
    state = AsyncFedAvg(weights="time_based").begin(server)
    assert weights(state.update(update("a", 1.0, round_trip=0.0))) == [("a", 1.0)]


def test_round_trip_of_a_nanosecond_is_an_estimate() -> None:
    server = make_server(0.5, 0.5)
    state = AsyncFedAvg(weights="time_based").begin(server)
    state.update(update("a", 1.0, round_trip=1e-9))
    (_, weight), *_ = weights(state.update(update("b", 1.0, round_trip=3e-9)))
    assert weight == pytest.approx((1 / 1 + 1 / 3) * 3 * 0.5)


def test_update_times_include_absent_clients() -> None:
    server = make_server(0.5, 0.25, 0.25)
    del server.clients["b"]
    state = AsyncFedAvg(weights="time_based", update_times=TIMES).begin(server)
    assert sent(state.start()) == ["a", "c"]
    assert weights(state.update(update("c", 1.0))) == [("c", 1.75)]
    state = AsyncFedAvg(weights="time_based").begin(server)
    for client in "acac":  # b has never been seen
        assert weights(state.update(update(client, 1.0, round_trip=2.0))) == [(client, 1.0)]
