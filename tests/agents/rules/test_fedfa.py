"""FedFa: a sliding window of the last K updates, applied at every arrival. Computed by hand."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from agents.rules.fedfa import FedFa
from agents.rules.interface import Send
from tests.agents.helpers import make_server, sent, update, weights


def test_param_is_the_mean_of_the_last_models() -> None:
    server = make_server(0.5, 0.5, w=(9.0, 9.0))
    state = FedFa(window_size=2).begin(server)
    assert sent(state.start()) == ["a", "b"]
    assert state.update(update("a", 1.0, 0.0)) == [Send("a")]  # the window is not full
    assert (server.w.tolist(), server.version) == ([9.0, 9.0], 0)
    state.update(update("b", 3.0, 4.0))
    assert (server.w.tolist(), server.version) == ([2.0, 2.0], 1)
    state.update(update("a", 5.0, 0.0))
    assert (server.w.tolist(), server.version) == ([4.0, 2.0], 2)


def test_every_update_is_recorded_once_with_its_weight() -> None:
    server = make_server(0.5, 0.5)
    state = FedFa(window_size=4, variant="delta", server_lr=0.5).begin(server)
    for client in "aba":
        assert weights(state.update(update(client, 1.0))) == []
    share = 0.5 / 4
    assert weights(state.update(update("b", 1.0))) == [(c, share) for c in "abab"]
    done = state.update(update("a", 1.0))
    assert weights(done) == [("a", share)]
    assert done[1:] == [Send("a")]


@pytest.mark.parametrize("variant", ["param", "delta"])
def test_running_sum_equals_the_sum_of_the_window(variant: Literal["param", "delta"]) -> None:
    """Vectors of very different size leave no trace once they are out of the window."""
    server = make_server(1.0, w=(0.0, 0.0))
    state = FedFa(window_size=3, variant=variant).begin(server)
    vectors = np.random.default_rng(0).normal(size=(20, 2)) * 10.0 ** np.arange(20, 0, -1)[:, None]
    expected = np.zeros(2)
    for n, vector in enumerate(vectors):
        state.update(update("a", *vector))
        if n >= 2:
            mean = vectors[n - 2 : n + 1].mean(0)
            expected = mean if variant == "param" else expected + mean
    np.testing.assert_allclose(server.w, expected, rtol=1e-12)


def test_window_holds_copies_of_the_updates() -> None:
    server = make_server(1.0)
    state = FedFa(window_size=2).begin(server)
    first = update("a", 1.0)
    state.update(first)
    first.vector[:] = 100.0
    state.update(update("a", 3.0))
    assert server.w.tolist() == [2.0]


def test_equal_models_in_float32_are_a_fixed_point() -> None:
    server = make_server(1.0)
    server.w = np.array([0.1], np.float32)
    state = FedFa(window_size=3).begin(server)
    for _ in range(7):
        state.update(update("a", float(np.float32(0.1))))
    assert server.w.tolist() == np.array([0.1], np.float32).tolist()


def test_client_side_follows_the_variant() -> None:
    param, delta = FedFa(2), FedFa(2, variant="delta")
    assert (param.client_side.kind, param.takes_fednova) == ("model", False)
    assert (delta.client_side.kind, delta.takes_fednova) == ("delta", True)
