"""Port: weights by samples, cosine and staleness; stale clients are waited for. Computed by hand."""

from __future__ import annotations

import pytest

from agents.rules.interface import RequestUpdate, Send, Server, SetTimer
from agents.rules.port import Port, PortState
from tests.agents.helpers import make_server, sent, update, weights


def begin(rule: Port, server: Server) -> PortState:
    state = rule.begin(server)
    state.start()
    return state


def test_fresh_updates_are_weighted_by_samples() -> None:
    server = make_server(0.5, 0.5, w=(1.0,))
    state = Port(min_updates=2, server_lr=0.5).begin(server)
    assert state.start() == [Send("a"), Send("b")]
    assert state.update(update("b", 8.0, samples=30)) == []
    assert server.w.tolist() == [1.0]
    done = state.update(update("a", 4.0, samples=10))
    assert server.w.tolist() == [1 + 0.5 * (0.75 * 8 + 0.25 * 4)] == [4.5]
    assert weights(done) == [("b", 0.375), ("a", 0.125)]
    assert done[1:] == [
        Send("a", deferred=True),
        Send("b", deferred=True),
        SetTimer("sent", 0),
    ]


def advance(state: PortState, server: Server, *steps: tuple[float, ...]) -> None:
    """A version per step, made by a and b, which gather nothing and twice the step."""
    for step in steps:
        state.update(update("a", *(0.0 for _ in step), base=server.version))
        state.update(update("b", *(2 * x for x in step), base=server.version))
        state.timer("sent")


@pytest.mark.parametrize(
    ("delta", "factor"),
    [
        # w − w_b = (3, 4), S = 10, τ = 2: μ(1 + cos)/2 + 3·10/12
        ((4.0, -3.0), 0.5 + 2.5),
        ((6.0, 8.0), 1 + 2.5),
        ((-3.0, -4.0), 0 + 2.5),
        ((5.0, 0.0), 0.8 + 2.5),  # cos 3/5
        ((0.0, 0.0), 0.5 + 2.5),  # no direction
    ],
)
def test_stale_update_is_weighted_by_direction_and_staleness(
    delta: tuple[float, float], factor: float
) -> None:
    server = make_server(0.2, 0.3, 0.5, w=(7.0, 7.0))
    state = begin(Port(min_updates=2), server)
    advance(state, server, (3.0, 0.0), (0.0, 4.0))
    assert server.w.tolist() == [10.0, 11.0]
    state.update(update("c", *delta, base=0))
    done = state.update(update("a", 0.0, 0.0, base=2))
    share = factor / (factor + 1 + 3)  # the other is fresh
    assert weights(done) == [("c", pytest.approx(share)), ("a", pytest.approx(1 - share))]
    assert server.w.tolist() == pytest.approx([10 + share * delta[0], 11 + share * delta[1]])


def test_urgent_requests_stale_clients_once_and_waits_for_them() -> None:
    server = make_server(0.2, 0.3, 0.5)
    state = begin(Port(min_updates=2, staleness_bound=1), server)
    advance(state, server, (1.0,), (1.0,))
    assert state.update(update("a", 0.0, base=2)) == []
    assert state.update(update("b", 0.0, base=2)) == [RequestUpdate("c", "interrupt")]  # τ = 2
    server.clients["d"] = 0.1
    state.join("d")
    assert state.update(update("d", 0.0, base=2)) == []  # c has been asked
    done = state.update(update("c", 4.0, base=0))
    assert [client for client, _ in weights(done)] == ["a", "b", "d", "c"]
    assert sent(done) == ["a", "b", "c", "d"]
    assert server.version == 3


def test_clients_within_the_staleness_bound_are_not_waited_for() -> None:
    server = make_server(0.2, 0.3, 0.5)
    state = begin(Port(min_updates=2, staleness_bound=2), server)
    advance(state, server, (1.0,), (1.0,), (1.0,))
    assert server.version == 3


def test_without_urgent_stale_clients_are_waited_for_but_not_requested() -> None:
    server = make_server(0.2, 0.3, 0.5)
    state = begin(Port(min_updates=2, staleness_bound=1, urgent=False), server)
    advance(state, server, (1.0,), (1.0,))
    state.update(update("a", 0.0, base=2))
    assert state.update(update("b", 0.0, base=2)) == []
    assert len(weights(state.update(update("c", 4.0, base=0)))) == 3


def test_a_stale_client_that_leaves_is_not_waited_for() -> None:
    server = make_server(0.2, 0.3, 0.5)
    state = begin(Port(min_updates=2, staleness_bound=1), server)
    advance(state, server, (1.0,), (1.0,))
    state.update(update("a", 0.0, base=2))
    state.update(update("b", 0.0, base=2))
    del server.clients["c"]
    assert sent(state.leave("c")) == ["a", "b"]
    assert server.version == 3
    server.clients["c"] = 0.5
    assert state.join("c") == [Send("c")]
    advance(state, server, (1.0,))
    assert server.version == 4  # it trains from version 3


def test_received_updates_are_aggregated_when_too_few_clients_are_left() -> None:
    server = make_server(0.5, 0.5)
    state = begin(Port(min_updates=2), server)
    state.update(update("a", 3.0))
    del server.clients["b"]
    assert weights(state.leave("b")) == [("a", 1.0)]
    assert server.w.tolist() == [3.0]
    assert weights(state.update(update("a", 1.0, base=1))) == [("a", 1.0)]  # and ever after


def test_models_of_versions_without_clients_are_dropped() -> None:
    server = make_server(0.2, 0.3, 0.5)
    state = begin(Port(min_updates=2, staleness_bound=100), server)
    advance(state, server, *[(1.0,)] * 5)
    assert sorted(state.models) == [0, 1, 2, 3, 4]  # c still trains from 0
    state.update(update("c", 1.0, base=0))
    state.update(update("a", 1.0, base=5))
    assert sorted(state.models) == [5]  # that of b
    advance(state, server, (1.0,))
    assert sorted(state.models) == [6]  # that of c


def test_two_aggregations_in_one_instant() -> None:
    server = make_server(0.25, 0.25, 0.25, 0.25)
    state = begin(Port(min_updates=2), server)
    for client in "abcd":  # all get version 2, at the end of the instant
        state.update(update(client, 1.0, base=0))
    assert state._pool.training == dict.fromkeys("abcd", 2)
    state.timer("sent")
    for version in (2, 3):
        state.update(update("c", 1.0, base=version))
        state.update(update("d", 1.0, base=version))
        state.timer("sent")
    state.update(update("a", -3.0, base=2))  # against the way since: 3·10/12
    done = state.update(update("b", 9.0, base=2))  # along it: 1 + 3·10/12
    assert weights(done) == [("a", pytest.approx(2.5 / 6)), ("b", pytest.approx(3.5 / 6))]


def test_contributors_are_replaced_by_any_idle_clients() -> None:
    server = make_server(0.25, 0.25, 0.25, 0.25)
    state = Port(min_updates=2, concurrency=3).begin(server)
    first, second, third = sent(state.start())
    assert state.update(update(first, 1.0)) == []
    done = state.update(update(second, 1.0))
    assert len(sent(done)) == 2
    assert third not in sent(done)
    del server.clients[third]
    (replacement,) = sent(state.leave(third))
    assert replacement not in sent(done)


def test_returning_client_is_sent_one_model() -> None:
    server = make_server(0.3, 0.3, 0.4)
    state = begin(Port(min_updates=2), server)
    state.update(update("a", 1.0))
    del server.clients["a"]
    state.leave("a")
    server.clients["a"] = 0.3
    assert sent(state.join("a")) == ["a"]
    assert sent(state.update(update("b", 1.0))) == ["b"]
