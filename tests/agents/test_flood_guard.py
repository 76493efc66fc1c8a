"""Limits on what each client may send to the aggregator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agents import events
from agents.aggregator.main import Aggregator
from agents.aggregator.messages import FloodGuard
from agents.device_actions import Restart, to_json
from agents.mqtt.topics import AGGREGATOR, Topics
from agents.mqtt.transport import ReceivedMessage
from agents.wire import messages, payloads
from tests.agents.helpers import aggregator_config, message, stand_still


def test_answers_to_dispatches_are_never_a_flood() -> None:
    guard = FloodGuard()
    for number in range(10_000):
        guard.expect_answer("a")
        assert guard.passes("a", at=number / 10_000, is_answer=True)
    assert not guard.is_flooding("a")


def test_answers_that_were_never_given_do_not_let_a_flood_pass() -> None:
    guard = FloodGuard()
    for _ in range(10_000):
        guard.expect_answer("a")
    passed = sum(guard.passes("a", at=0.0, is_answer=True) for _ in range(2000))
    assert passed == 256 + 100
    assert guard.is_flooding("a")


@pytest.mark.parametrize("rate", [20.0, 1e6])
def test_only_the_client_that_floods_is_blocked(rate: float) -> None:
    guard = FloodGuard()
    passed = tried = 0
    while not guard.is_flooding("flooding"):
        tried += 1
        passed += guard.passes("flooding", at=tried / rate)
    assert passed == pytest.approx(100 + 10 * tried / rate, abs=1)
    assert tried - passed == 1000
    guard.shut_out("flooding")
    assert not guard.is_flooding("flooding")  # once
    assert not guard.passes("flooding", at=1e9)
    assert guard.passes("a", at=tried / rate)


def test_flood_ends_when_messages_become_rare() -> None:
    guard = FloodGuard()
    assert guard.end_of_flood() is None
    guard.shut_out("a")
    for number in range(50):
        guard.passes("a", at=number)
    assert guard.end_of_flood() is None
    for number in range(3):  # a new client of it says that it is there
        guard.passes("a", at=number)
    assert guard.end_of_flood() == 53
    assert guard.end_of_flood() is None


def test_restarted_client_is_admitted_and_may_be_blocked_again() -> None:
    guard = FloodGuard()
    for _ in range(1100):
        guard.passes("a", at=0.0)
    assert guard.is_flooding("a")
    guard.shut_out("a")
    assert guard.readmit("a")
    assert not guard.readmit("a")
    assert not guard.is_flooding("a")
    assert guard.passes("a", at=0.0)


class _Silent:
    """Stand-in for a connection."""

    def __init__(self, *_: object, **__: object) -> None:
        self.subscribed = 1

    def open(self) -> None: ...
    def publish(self, topic: str, payload: bytes) -> None: ...

    publish_status = publish

    def subscribe_again(self) -> None:
        self.subscribed += 1


@pytest.mark.parametrize(
    "payload",
    [
        bytes(100),
        payloads.encode(message("b", 1)),
        payloads.encode(message("a", 1, run="r", sequence=0)),
    ],
    ids=["unreadable", "another's name", "no new update"],
)
def test_aggregator_blocks_a_flooding_client_until_its_restart(
    payload: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flood includes messages that name an open dispatch without answering it."""
    stand_still(monkeypatch)
    monkeypatch.setattr("agents.aggregator.main.Connection", _Silent)
    config = aggregator_config(tmp_path, {"a": 0.5, "b": 0.5})
    aggregator, names = Aggregator(config), Topics("r")

    def look() -> int:
        """How often it has subscribed by then."""
        aggregator._watch(aggregator._now())
        connection = aggregator._connection
        assert isinstance(connection, _Silent)
        return connection.subscribed

    def say(topic: str, message: messages.Message) -> None:
        aggregator._receive(ReceivedMessage(topic, messages.encode(message), 0))

    def present() -> list[str]:
        return list(aggregator._core.ready)

    for name in ("a", "b"):
        say(names.status(name), messages.Status(name, "ready"))
    say(names.control(AGGREGATOR), messages.StartOrder())
    for _ in range(1150):
        aggregator._receive(ReceivedMessage(names.update("a"), payload, 0))
    assert present() == ["b"]
    assert look() == 1  # it still comes
    say(names.status("a"), messages.Status("a", "ready"))
    assert present() == ["b"]
    assert look() == 2
    assert look() == 2
    say(names.control(AGGREGATOR), messages.LogOrder(0.0, "a", "hand", 0.0, to_json(Restart())))
    assert look() == 3  # what it has said meanwhile comes again
    say(names.status("a"), messages.Status("a", "ready"))
    assert present() == ["a", "b"]
    aggregator._durable.close()
    records = list(events.read(tmp_path / "events.jsonl"))
    acted = [record for record in records if isinstance(record, events.Acted)]
    assert [(one.device, one.source, one.details) for one in acted] == [
        ("a", AGGREGATOR, {"action": "crash"}),
        ("a", "hand", {"action": "restart"}),
    ]
    assert sum(isinstance(one, events.UpdateRejected) for one in records) == 100
    (note,) = (one.message for one in records if isinstance(one, events.Note))
    assert re.fullmatch(r"a flood of messages is over: [45]\d of them were refused", note)
