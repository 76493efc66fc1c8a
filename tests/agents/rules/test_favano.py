"""FAVANO: every period, w ← (w + Σ ŵ_i)/(s + 1) over s interrupted clients. Numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from agents.rules.favano import Favano
from agents.rules.interface import Actions, Aggregated, Ignored, RequestUpdate, Send, SetPeriodicTimer
from agents.timing.nanoseconds import SECOND
from tests.agents.helpers import make_server, sent, update, weights

ROUNDS = SetPeriodicTimer("round", 2 * SECOND)


def asked(actions: Actions) -> list[str]:
    return [a.client for a in actions if isinstance(a, RequestUpdate) and a.what == "interrupt"]


def test_round_averages_the_server_model_and_the_drawn_models() -> None:
    server = make_server(0.5, 0.5, w=(3.0,))
    state = Favano(period=2.0, sample=2).begin(server)
    assert state.start() == [Send("a"), Send("b"), ROUNDS]
    assert state.timer("round") == [RequestUpdate("a", "interrupt"), RequestUpdate("b", "interrupt")]
    assert state.update(update("b", 9.0, kind="model")) == []
    assert server.w.tolist() == [3.0]
    done = state.update(update("a", 0.0, kind="model"))
    assert (server.w.tolist(), server.version) == ([(3 + 9 + 0) / 3], 1)
    assert weights(done) == [("b", 1 / 3), ("a", 1 / 3)]
    assert done[1:] == [Send("a", deferred=True), Send("b", deferred=True)]


def test_only_drawn_clients_are_requested_and_get_the_new_model() -> None:
    server = make_server(0.25, 0.25, 0.5, seed=0)
    state = Favano(period=2.0, sample=1, server_lr=0.5).begin(server)
    state.start()
    (drawn,) = asked(state.timer("round"))
    other = next(client for client in server.clients if client != drawn)
    ignored, work = state.update(update(other, 9.0, kind="model"))
    assert isinstance(ignored, Ignored)
    assert work == Send(other)
    done = state.update(update(drawn, 8.0, kind="model"))
    assert server.w.tolist() == [0.5 * (0 + 8) / 2] == [2.0]
    assert weights(done) == [(drawn, 0.25)]
    assert sent(done) == [drawn]


def test_clients_are_drawn_uniformly_and_at_most_once_per_round() -> None:
    server = make_server(0.7, 0.2, 0.1)
    state = Favano(period=2.0, sample=2).begin(server)
    drawn = dict.fromkeys("abc", 0)
    for _ in range(1500):
        pair = asked(state.timer("round"))
        assert pair in (["a", "b"], ["a", "c"], ["b", "c"])
        for client in pair:
            drawn[client] += 1
            state.update(update(client, 0.0, kind="model"))
    assert list(drawn.values()) == pytest.approx([1000] * 3, rel=0.05)


def test_rounds_do_not_overlap() -> None:
    server = make_server(0.5, 0.5)
    state = Favano(period=2.0, sample=2).begin(server)
    state.timer("round")
    state.update(update("a", 3.0, kind="model"))
    assert state.timer("round") == []
    assert state.timer("round") == []
    done = state.update(update("b", 3.0, kind="model"))
    assert server.w.tolist() == [2.0]
    assert asked(done) == ["a", "b"]  # the round that is overdue, once
    state.update(update("a", 2.0, kind="model"))
    assert asked(state.update(update("b", 2.0, kind="model"))) == []


def test_round_without_clients_waits_for_the_next_period() -> None:
    server = make_server(1.0)
    state = Favano(period=2.0, sample=1).begin(server)
    state.timer("round")
    del server.clients["a"]
    assert state.leave("a") == [Aggregated(0, ())]  # counts as a round, as those to come do
    assert state.timer("round") == [Aggregated(0, ())]
    server.clients["a"] = 1.0
    state.join("a")
    assert asked(state.timer("round")) == ["a"]
    assert server.version == 0


def test_equal_models_stay_equal_to_the_last_bit() -> None:
    server = make_server(0.5, 0.5)
    server.w = np.array([0.3], np.float32)
    state = Favano(period=2.0, sample=2).begin(server)
    state.timer("round")
    for client in "ab":
        state.update(update(client, float(np.float32(0.3)), kind="model"))
    assert (server.version, server.w.tolist()) == (1, [np.float32(0.3)])
