"""Messages that the aggregator sends: topics, payloads, and one body for all dispatches of a version."""

from __future__ import annotations

import numpy as np

from agents.aggregator import actions as act
from agents.aggregator.outbox import Outbox
from agents.mqtt import chunks
from agents.mqtt.topics import Topics
from agents.rules.interface import Request, Server
from agents.wire import messages, payloads

_NAMES = Topics("run")


def _outbox(w: np.ndarray) -> Outbox:
    server = Server(w, {}, np.random.default_rng(0))
    return Outbox(_NAMES, ("a", "b"), "schema", server)


def _models(outbox: Outbox) -> dict[str, payloads.ModelMessage]:
    found = {}
    for topic, (message,) in outbox.waiting:
        found[topic] = payloads.decode_model(bytes(message))
    return found


def test_dispatch_keeps_the_model_as_it_was_when_the_rule_changes_it_in_place() -> None:
    w = np.zeros(3, np.float32)
    outbox = _outbox(w)
    outbox.add_model(act.Dispatch("a", 0, 1))
    w += 1
    outbox.add_model(act.Dispatch("b", 1, 2, lr=0.5, acknowledged=7, waiting=(3,), lost=(4, 5)))
    outbox.add_model(act.Broadcast(1, 3))
    found = _models(outbox)
    first, second, third = (
        found[topic] for topic in (_NAMES.model("a"), _NAMES.model("b"), _NAMES.broadcast)
    )
    assert first.vector.tolist() == [0, 0, 0]
    assert second.vector.tolist() == third.vector.tolist() == [1, 1, 1]
    assert (second.version, second.dispatch, second.lr, second.acknowledged) == (1, 2, 0.5, 7)
    assert (second.waiting, second.lost) == ((3,), (4, 5))
    assert (third.dispatch, third.lr, third.acknowledged) == (3, None, 0)


def test_dispatches_of_a_version_share_the_body_of_a_large_model() -> None:
    outbox = _outbox(np.zeros(chunks.CHUNK_BYTES, np.float32))
    for number, client in enumerate("ab", start=1):
        outbox.add_model(act.Dispatch(client, 0, number))
    (_, first), (_, second) = outbox.waiting
    assert first[0] != second[0]
    assert all(one is other for one, other in zip(first[1:], second[1:], strict=True))


def test_requests_leave_in_order_on_the_client_s_topic() -> None:
    outbox = _outbox(np.zeros(1, np.float32))
    outbox.add(act.Acknowledge("a", 4))
    outbox.add(Request("b", "pull"))
    outbox.add(act.AskForReport("b", 9))
    outbox.add(act.AskForUnacknowledged("a"))
    outbox.stop("b")
    decoded = [messages.decode(_NAMES, topic, bytes(payload)) for topic, payload in outbox.waiting]  # type: ignore[arg-type]
    assert decoded == [
        messages.Acknowledgement("a", 4),
        messages.Request("b", "pull"),
        messages.ReportRequest("b", 9),
        messages.ReportRequest("a", 0),
        messages.Request("b", "stop"),
    ]
