"""AsySG-con: at n gradients, w ← w − γ (1/n) Σ g. Numbers computed by hand."""

from __future__ import annotations

import pytest

from agents.rules.asysg import AsySG
from agents.rules.interface import Send
from tests.agents.helpers import make_server, sent, update, weights


@pytest.mark.parametrize(
    ("mean", "w", "weight"), [(True, [1 - 0.25 * 6, 2 + 0.25 * 4], 0.25), (False, [-2.0, 4.0], 0.5)]
)
def test_n_gradients_make_a_step_down(mean: bool, w: list[float], weight: float) -> None:
    server = make_server(0.25, 0.25, 0.5, w=(1.0, 2.0))
    state = AsySG(gradients=2, server_lr=0.5, mean=mean).begin(server)
    assert sent(state.start()) == ["a", "b", "c"]
    assert state.update(update("c", 4.0, 0.0)) == []
    done = state.update(update("a", 2.0, -4.0))
    assert (server.w.tolist(), server.version) == (w, 1)
    assert weights(done) == [("c", weight), ("a", weight)]
    assert done[1:] == [Send("a", deferred=True), Send("c", deferred=True)]  # b computes on
    state.update(update("a", 0.0, 0.0, base=1))
    assert sent(state.update(update("b", 0.0, 0.0))) == ["a", "b"]


def test_step_is_made_when_too_few_clients_are_left_for_n_gradients() -> None:
    server = make_server(0.25, 0.25, 0.5)
    state = AsySG(gradients=3).begin(server)
    state.start()
    state.update(update("a", 3.0))
    state.update(update("b", 6.0))
    del server.clients["c"]
    done = state.leave("c")
    assert weights(done) == [("a", 1 / 2), ("b", 1 / 2)]
    assert server.w.tolist() == [-4.5]
    assert sent(done) == ["a", "b"]


def test_gradient_waits_while_all_clients_are_away() -> None:
    server = make_server(0.5, 0.5)
    state = AsySG(gradients=2).begin(server)
    state.update(update("a", 2.0))
    server.clients.clear()
    assert state.leave("b") == []
    assert state.leave("a") == []
    server.clients["b"] = 0.5
    assert state.join("b") == [Send("b")]
    assert weights(state.update(update("b", 2.0))) == [("a", 0.5), ("b", 0.5)]
