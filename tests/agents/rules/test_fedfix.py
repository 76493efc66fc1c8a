"""FedFix: every Δt, w ← w + η_g Σ ⌈τ_i/Δt⌉ p_i Δ_i. Numbers computed by hand."""

from __future__ import annotations

import pytest

from agents.rules.fedfix import FedFix
from agents.rules.interface import Aggregated, Send, SetPeriodicTimer
from agents.timing.nanoseconds import SECOND
from tests.agents.helpers import make_server, sent, update, weights

TICKS = SetPeriodicTimer("tick", 2 * SECOND)


def test_tick_applies_received_updates_and_answers_only_their_senders() -> None:
    server = make_server(0.25, 0.25, 0.5, w=(1.0, 2.0))
    state = FedFix(period=2.0, server_lr=0.5).begin(server)
    assert state.start() == [Send("a"), Send("b"), Send("c"), TICKS]
    assert state.update(update("c", 4.0, 0.0)) == []
    assert state.update(update("a", 8.0, -8.0)) == []
    assert server.w.tolist() == [1.0, 2.0]
    done = state.timer("tick")
    assert server.w.tolist() == [1 + 0.25 * 4 + 0.125 * 8, 2 - 0.125 * 8] == [3.0, 1.0]
    assert weights(done) == [("c", 0.25), ("a", 0.125)]
    assert done[1:] == [Send("a", deferred=True), Send("c", deferred=True)]
    assert server.version == 1
    state.update(update("a", 8.0, 0.0, base=1, dispatched=2.0))
    assert sent(state.timer("tick")) == ["a"]
    assert server.w.tolist() == [4.0, 1.0]  # the sum began anew


def test_empty_tick_is_counted_but_makes_no_version() -> None:
    server = make_server(0.5, 0.5, w=(7.0,))
    state = FedFix(period=2.0).begin(server)
    state.start()
    assert state.timer("tick") == [Aggregated(0, ())]
    assert (server.w.tolist(), server.version) == ([7.0], 0)
    state.update(update("b", 1.0))
    assert weights(state.timer("tick")) == [("b", 1.0)]  # 2 ticks · 1/2


def test_ticks_are_counted_from_the_dispatch_to_the_application() -> None:
    server = make_server(0.25, 0.75)
    state = FedFix(period=2.0).begin(server)
    state.start()
    for dispatched in (0.0, 2.001):  # late, by what the tick was
        state.update(update("a", 0.0, base=server.version, dispatched=dispatched))
        assert weights(state.timer("tick")) == [("a", 0.25)]
    state.update(update("b", 0.0))
    state.update(update("a", 0.0, base=2, dispatched=4.0))
    assert weights(state.timer("tick")) == [("b", 2.25), ("a", 0.25)]


def test_resumed_run_continues_the_tick_count() -> None:
    server = make_server(1.0)
    server.began = 9 * SECOND
    state = FedFix(period=2.0).begin(server)
    state.start()
    state.update(update("a", 0.0, dispatched=9.0))
    assert weights(state.timer("tick")) == [("a", 1.0)]


@pytest.mark.parametrize(
    ("period", "time", "ticks"),
    [
        (2.0, 5.0, 3),
        (2.0, 4.0, 2),
        (2.0, 0.01, 1),
        (0.1, 3 * 0.1, 3),  # 3 * 0.1 / 0.1 is 3.0000000000000004
        (0.1, 0.3 + 1e-6, 4),
    ],
)
def test_update_time_is_converted_to_ticks(period: float, time: float, ticks: int) -> None:
    assert FedFix(period).ticks(time) == ticks


def test_joining_client_gets_the_model_at_once_and_its_ticks_start_there() -> None:
    server = make_server(0.5)
    state = FedFix(period=2.0).begin(server)
    state.start()
    for _ in range(3):
        state.timer("tick")
    server.clients["b"] = 0.5
    assert state.join("b") == [Send("b")]
    state.update(update("b", 1.0, dispatched=6.0))  # the tick of 6 s is over
    assert weights(state.timer("tick")) == [("b", 0.5)]


def test_ticks_continue_while_all_clients_are_away() -> None:
    server = make_server(1.0)
    state = FedFix(period=2.0).begin(server)
    state.start()
    state.update(update("a", 4.0))
    server.clients.clear()
    state.leave("a")
    assert weights(state.timer("tick")) == [("a", 1.0)]
    assert state.timer("tick") == [Aggregated(1, ())]
