"""AREA: u ← u + p_i m_i, x ← x + u, so that x + u = Σ p_i y_i. Numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from agents.rules.area import Area, AreaState
from agents.rules.interface import Aggregated, Ignored, Remark, Send, Server, SetTimer
from tests.agents.helpers import make_server, sent, update, weights


def begin(rule: Area, server: Server) -> AreaState:
    state = rule.begin(server)
    state.start()
    return state


def test_sender_gets_the_model_from_before_its_aggregation() -> None:
    server = make_server(0.5, 0.5, w=(1.0,))
    state = Area(every=2).begin(server)
    assert state.start() == [Send("a"), Send("b")]
    assert state.update(update("a", 3.0, kind="model")) == [Send("a")]
    assert state.u.tolist() == [0.5 * (3 - 1)]
    assert state.update(update("b", 5.0, kind="model")) == [Send("b"), SetTimer("aggregate", 0)]
    assert (server.w.tolist(), server.version) == ([1.0], 0)
    assert weights(state.timer("aggregate")) == [("a", 0.5), ("b", 0.5)]
    assert (server.w.tolist(), state.u.tolist(), server.version) == ([4.0], [0.0], 1)  # (3 + 5)/2
    state.update(update("a", -1.0, kind="residual"))  # from 3 to 2
    assert (server.w + state.u).tolist() == [(2 + 5) / 2]


def test_message_of_the_same_instant_is_answered_with_the_new_model() -> None:
    server = make_server(0.5, 0.5)
    state = begin(Area(every=1), server)
    state.update(update("a", 2.0, kind="model"))
    aggregated, reply, timer = state.update(update("b", 4.0, kind="model"))
    assert isinstance(aggregated, Aggregated)
    assert (server.w.tolist(), reply) == ([1.0], Send("b"))
    assert isinstance(timer, SetTimer)
    state.timer("aggregate")
    assert (server.w.tolist(), state.timer("aggregate")) == ([3.0], [])


def test_steps_too_small_for_float32_add_up() -> None:
    server = make_server(1.0)
    server.w = np.ones(1, np.float32)
    state = begin(Area(every=1), server)
    state.update(update("a", 1.0, kind="model"))
    for _ in range(1000):
        state.update(update("a", 1e-8, kind="residual"))
        state.timer("aggregate")
    assert server.w.tolist() == pytest.approx([1 + 1e-5], abs=6e-8)


def with_remainder(p: tuple[float, ...], absent: str = "") -> tuple[Server, AreaState]:
    """Return a server and its rule after a tick at which float32 kept enough of u out of x to change x
    by one bit at the next one."""
    server = make_server(*p)
    for client in absent:
        del server.clients[client]
    server.w = np.array([0.2], np.float32)
    state = begin(Area(criterion="period", period=1.0), server)
    state.update(update("a", float(np.float32(0.9)), kind="model"))
    assert len(weights(state.timer("aggregate"))) == 1
    assert server.w + state.u != server.w
    return server, state


def test_rounding_remainder_survives_ticks_without_messages() -> None:
    server, state = with_remainder((0.5, 0.5))
    x, remainder = server.w.copy(), state.u.copy()
    assert state.timer("aggregate") == [Aggregated(1, ())]
    assert (server.w.tolist(), state.u.tolist()) == (x.tolist(), remainder.tolist())
    state.update(update("a", 0.0, kind="residual"))
    assert weights(state.timer("aggregate")) == [("a", 0.5)]
    assert (server.w.tolist(), server.version) == ((x + remainder).tolist(), 2)


def test_farewell_that_leaves_the_mean_unchanged_makes_no_version() -> None:
    server, state = with_remainder((0.25, 0.25, 0.5), absent="c")
    server.clients["c"] = 0.5
    state.join("c")
    state.retire("c", None)
    assert state.timer("aggregate") == [Aggregated(1, ())]
    state.retire("b", None)
    assert state.timer("aggregate") == [Aggregated(2, ())]
    assert server.w == pytest.approx([0.9])


def test_rest_of_u_is_applied_at_later_ticks_if_server_lr_is_below_one() -> None:
    """The rest is applied until float32 shows no more of it; the second coordinate never changes."""
    server = make_server(1.0)
    server.w = np.zeros(2, np.float32)
    state = begin(Area(criterion="period", period=1.0, server_lr=0.5), server)
    state.update(update("a", 1.0, 0.0, kind="model"))
    state.timer("aggregate")
    made = [action for _ in range(40) for action in state.timer("aggregate")]
    assert made[:2] == [Aggregated(2, ()), Aggregated(3, ())]
    assert server.w.tolist() == [1.0, 0.0]
    assert 20 < server.version < 30
    assert made[-1] == made[-2] == Aggregated(server.version, ())


def test_farewell_that_changes_one_coordinate_makes_a_version() -> None:
    server = make_server(0.5, 0.5)
    server.w = np.zeros(2, np.float32)
    state = begin(Area(criterion="period", period=1.0), server)
    state.update(update("a", 1.0, 0.0, kind="model"))
    state.timer("aggregate")
    state.retire("b", None)
    assert state.timer("aggregate") == [Aggregated(2, ())]
    assert server.w.tolist() == [1.0, 0.0]


def test_client_that_lost_its_memory_joins_beside_its_old_contribution() -> None:
    """Mean (¼·4 + ¼·0 + ½·0) before; a's 4 stays, and a joins with x = 0 at ¼ of then 1¼."""
    server = make_server(0.25, 0.25, 0.5)
    state = begin(Area(every=10), server)
    state.update(update("a", 4.0, kind="model"))
    lost, remark, send = state.update(update("a", 9.0, kind="model"))
    assert isinstance(lost, Ignored)
    assert "lost its memory" in lost.reason
    assert isinstance(remark, Remark)
    assert "weight 0.25" in remark.text
    assert send == Send("a")
    assert server.w + state.u == pytest.approx(0.25 * 4 / 1.25)
    assert weights(state.update(update("a", 5.0, kind="model"))) == []
    assert server.w + state.u == pytest.approx((0.25 * 4 + 0.25 * 5) / 1.25)
    state.retire("a", np.array([5.0]))
    assert server.w + state.u == pytest.approx(0.25 * 4)  # the lost one is still there


def test_a_residual_without_a_first_message_is_ignored() -> None:
    server = make_server(0.5, 0.5)
    state = begin(Area(every=10), server)
    ignored, _, send = state.update(update("b", 9.0, kind="residual"))
    assert isinstance(ignored, Ignored)
    assert "first message was lost" in ignored.reason
    assert send == Send("b")
    assert server.w + state.u == 0


def test_absent_client_stays_in_the_mean_and_is_noted() -> None:
    server = make_server(0.75, 0.25, w=(1.0,))
    state = begin(Area(every=1), server)
    (never_heard,) = state.leave("b")
    assert isinstance(never_heard, Remark)
    assert "the model it started with stays in the mean with weight 0.25" in never_heard.text
    state.update(update("a", 5.0, kind="model"))
    (left,) = state.leave("a")
    assert isinstance(left, Remark)
    assert "its last model stays in the mean with weight 0.75" in left.text
    assert sent(state.join("a")) == ["a"]
    assert server.w.tolist() == [0.75 * 5 + 0.25 * 1]


def test_joining_client_starts_from_the_model_it_is_sent() -> None:
    """N = 1 with y = 5 and x = 1; b joins: x + u = (5 + 1)/2."""
    server = make_server(0.5, 0.5, w=(1.0,))
    del server.clients["b"]
    state = Area(every=2).begin(server)
    assert state.start() == [Send("a")]
    state.update(update("a", 5.0, kind="model"))
    assert (server.w + state.u).tolist() == [5.0]
    server.clients["b"] = 0.5
    assert state.join("b") == [Send("b")]
    assert (server.w + state.u).tolist() == [3.0]
    assert state.join("b") == [Send("b")]  # back after an outage: a member all the time
    assert (server.w + state.u).tolist() == [3.0]
    state.update(update("b", 2.0, kind="model"))
    assert (server.w + state.u).tolist() == [3.5]


def test_retiring_client_is_removed_from_the_mean() -> None:
    server = make_server(0.5, 0.3, 0.2, w=(1.0,))
    state = begin(Area(every=2), server)
    for name, end in zip("abc", (2.0, 3.0, 7.0), strict=True):
        state.update(update(name, end, kind="model"))
    assert (server.w + state.u).tolist() == pytest.approx([0.5 * 2 + 0.3 * 3 + 0.2 * 7])
    state.retire("b", np.array([3.0]))
    assert state.leave("b") == state.retire("b", None) == []
    assert server.w + state.u == pytest.approx((0.5 * 2 + 0.2 * 7) / 0.7)
    state.update(update("c", -7.0, kind="residual"))  # its weight is 0.2/0.7 now
    assert server.w + state.u == pytest.approx(0.5 * 2 / 0.7)
    state.retire("a", np.array([2.0]))
    assert server.w + state.u == pytest.approx(0.0)
    (remark,) = state.retire("c", np.array([0.0]))
    assert isinstance(remark, Remark)
    assert server.w + state.u == pytest.approx(0.0)


def test_update_from_a_retired_client_is_ignored() -> None:
    server = make_server(0.5, 0.5, w=(1.0,))
    state = begin(Area(every=5), server)
    state.update(update("a", 4.0, kind="model"))
    state.retire("a", np.array([4.0]))
    for kind in ("model", "residual"):
        (ignored,) = state.update(update("a", 9.0, kind=kind))
        assert isinstance(ignored, Ignored)
    assert (server.w + state.u).tolist() == [1.0]
