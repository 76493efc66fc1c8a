"""Messages that the aggregator sends: topics, payloads, and one body for all dispatches of a version."""

from __future__ import annotations

import numpy as np

from agents.aggregator import actions as act
from agents.aggregator.messages import PendingMessages
from agents.mqtt.topics import Topics
from agents.rules.interface import RequestUpdate, Server
from agents.wire import messages, payloads

_NAMES = Topics("run")


def _pending_messages(w: np.ndarray) -> PendingMessages:
    server = Server(w, {}, np.random.default_rng(0))
    return PendingMessages(_NAMES, ("a", "b"), "schema", server)


def _models(pending: PendingMessages) -> dict[str, payloads.ModelMessage]:
    found = {}
    for topic, (message,) in pending.waiting:
        found[topic] = payloads.decode_model(bytes(message))
    return found


def test_dispatch_keeps_the_model_as_it_was_when_the_rule_changes_it_in_place() -> None:
    w = np.zeros(3, np.float32)
    pending = _pending_messages(w)
    pending.add_model(act.Dispatch("a", 0, 1))
    w += 1
    pending.add_model(act.Dispatch("b", 1, 2, lr=0.5, acknowledged=7, waiting=(3,), lost=(4, 5)))
    pending.add_model(act.BroadcastModel(1, 3))
    found = _models(pending)
    first, second, third = (
        found[topic] for topic in (_NAMES.model("a"), _NAMES.model("b"), _NAMES.broadcast)
    )
    assert first.vector.tolist() == [0, 0, 0]
    assert second.vector.tolist() == third.vector.tolist() == [1, 1, 1]
    assert (second.version, second.dispatch, second.lr, second.acknowledged) == (1, 2, 0.5, 7)
    assert (second.waiting, second.lost) == ((3,), (4, 5))
    assert (third.dispatch, third.lr, third.acknowledged) == (3, None, 0)


def test_requests_leave_in_order_on_the_client_s_topic() -> None:
    pending = _pending_messages(np.zeros(1, np.float32))
    pending.add(messages.Acknowledgement("a", 4))
    pending.add(RequestUpdate("b", "pull"))
    pending.add(messages.ReportRequest("b", 9))
    pending.add(messages.ReportRequest("a", 0))
    pending.stop("b")
    decoded = [messages.decode(_NAMES, topic, bytes(payload)) for topic, payload in pending.waiting]  # type: ignore[arg-type]
    assert decoded == [
        messages.Acknowledgement("a", 4),
        messages.Request("b", "pull"),
        messages.ReportRequest("b", 9),
        messages.ReportRequest("a", 0),
        messages.Request("b", "stop"),
    ]
