"""FedBuff: at K deltas, w ← w + (η_g/K) Σ s(τ_i) Δ_i. Numbers computed by hand."""

from __future__ import annotations

import pytest

from agents.rules.fedbuff import FedBuff
from agents.rules.interface import Send
from tests.agents.helpers import make_server, sent, update, weights


def test_k_deltas_make_a_version() -> None:
    server = make_server(0.5, 0.5, w=(1.0, 1.0))
    state = FedBuff(buffer_size=2, server_lr=0.5).begin(server)
    assert sent(state.start()) == ["a", "b"]
    first = state.update(update("b", 4.0, 0.0))
    assert first == [Send("b")]  # the current model, at once
    assert (server.w.tolist(), server.version) == ([1.0, 1.0], 0)
    second = state.update(update("b", 4.0, 8.0))  # one client may fill several places
    assert (server.w.tolist(), server.version) == ([1 + 0.25 * 8, 1 + 0.25 * 8], 1)
    assert weights(second) == [("b", 0.25), ("b", 0.25)]
    assert sent(second) == ["b"]
    state.update(update("a", 4.0, 0.0))
    state.update(update("a", 4.0, 0.0))
    assert server.w.tolist() == [5.0, 3.0]  # the buffer began anew


def test_inverse_sqrt_discounts_by_the_staleness_at_arrival() -> None:
    server = make_server(0.5, 0.5)
    server.version = 3
    state = FedBuff(buffer_size=2, staleness="inverse_sqrt").begin(server)
    state.update(update("a", 8.0, base=0))  # 1/√(1+3) = 1/2
    done = state.update(update("b", 2.0, base=3))
    assert server.w.tolist() == [(0.5 * 8 + 2) / 2] == [3.0]
    assert weights(done) == [("a", 0.25), ("b", 0.5)]
    assert FedBuff(staleness="inverse_sqrt").discount(1) == pytest.approx(0.70710678)
    assert FedBuff().discount(100) == 1.0


def test_uploader_is_replaced_by_an_idle_client() -> None:
    server = make_server(0.25, 0.25, 0.25, 0.25, seed=1)
    state = FedBuff(buffer_size=100, concurrency=2).begin(server)
    training = sent(state.start())
    assert len(training) == 2
    drawn = dict.fromkeys("abcd", 0)
    for _ in range(3000):
        uploader = training.pop(0)
        (replacement,) = sent(state.update(update(uploader, 0.0)))
        assert replacement not in training
        training.append(replacement)
        drawn[replacement] += 1
    assert list(drawn.values()) == pytest.approx([750] * 4, rel=0.1)


def test_block_replaces_k_at_a_time_after_the_aggregation() -> None:
    server = make_server(0.25, 0.25, 0.25, 0.25)
    state = FedBuff(buffer_size=2, concurrency=3, replace="block").begin(server)
    first, second, third = sent(state.start())
    assert state.update(update(first, 1.0)) == []
    done = state.update(update(second, 1.0))
    assert len(sent(done)) == 2
    assert third not in sent(done)
    assert all(action.deferred for action in done if isinstance(action, Send))


def test_departed_client_frees_its_slot() -> None:
    server = make_server(0.5, 0.5)
    state = FedBuff(concurrency=1).begin(server)
    (training,) = sent(state.start())
    del server.clients[training]
    assert sent(state.leave(training)) == list(server.clients)


def test_buffer_is_aggregated_when_too_few_clients_are_left_to_fill_it() -> None:
    server = make_server(0.25, 0.25, 0.5)
    state = FedBuff(buffer_size=3, reply="after_aggregation").begin(server)
    state.start()
    state.update(update("a", 3.0))
    state.update(update("b", 3.0))
    del server.clients["c"]
    done = state.leave("c")
    assert weights(done) == [("a", 1 / 2), ("b", 1 / 2)]  # a whole step, not 2/3 of one for ever
    assert server.w.tolist() == [3.0]
    assert sent(done) == ["a", "b"]
    state.update(update("b", 3.0, base=1))
    done = state.update(update("a", 3.0, base=1))  # and ever after
    assert server.version == 2
    assert sent(done) == ["a", "b"]
