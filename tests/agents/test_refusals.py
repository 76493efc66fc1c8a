"""Processes with a connection that only remembers: aggregator, client and router report invalid messages
and continue; the aggregator answers when its inputs are on the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agents import shards
from agents.aggregator import inputs
from agents.aggregator.main import Aggregator
from agents.client import core
from agents.client.main import ClientProcess
from agents.config import (
    BrokerAccess,
    ClientConfig,
    ClientSetup,
    LocalTraining,
    Named,
    RouterConfig,
)
from agents.device.delayline import Impairment
from agents.device_actions import Disconnect, SetLink
from agents.mqtt.topics import AGGREGATOR, ROUTER, Topics
from agents.mqtt.transport import ReceivedMessage
from agents.router.main import Router
from agents.secure.arithmetic import SecureRun
from agents.secure.party import Party
from agents.tasks.quadratic import Quadratic
from agents.wire import messages, payloads
from tests.agents.helpers import aggregator_config, message, secure_step, stand_still

LOGIN = BrokerAccess("localhost", 1883, "a", "")
NAMES = Topics("r")
TRAINER = SimpleNamespace(fits=False)
"""A trainer that trains nothing."""


@dataclass
class Connection:
    """Remembers what is published."""

    published: list[tuple[str, bytes]] = field(default_factory=list)
    sink: Callable[[ReceivedMessage], None] = print
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, _timeout: float = 0.0) -> None: ...
    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self.published.append((topic, payload))

    publish_status = publish


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    made = Connection()

    def connect(
        _login: BrokerAccess, _topics: list[str], sink: Callable[[ReceivedMessage], None], **options: Any
    ) -> Connection:
        made.sink, made.options = sink, options
        return made

    for part in ("aggregator", "client", "router"):
        monkeypatch.setattr(f"agents.{part}.main.Connection", connect)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return made


@pytest.fixture
def rule() -> Named:
    return Named("fedasync", {})


@pytest.fixture
def aggregator(connection: Connection, tmp_path: Path, rule: Named) -> Iterator[Aggregator]:
    made = Aggregator(aggregator_config(tmp_path, rule=rule))
    yield made
    made._durable.close()


def test_models_are_sent_only_after_their_inputs_are_on_the_disk(
    aggregator: Aggregator, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk is busy, further inputs are handled; they share the next write."""

    def say(topic: str, message: messages.Status | messages.StartOrder) -> None:
        aggregator._receive(ReceivedMessage(topic, messages.encode(message), 0))
        aggregator._handle(inputs.InstantOver(aggregator._now()))
        aggregator._commit()

    say(NAMES.status("a"), messages.Status("a", "ready"))
    say(NAMES.control(AGGREGATOR), messages.StartOrder())
    aggregator._durable.sync()
    aggregator._commit()
    events_file = aggregator._durable._directory / "events.jsonl"
    before = events_file.read_text()
    connection.published.clear()
    is_busy, syncs = threading.Event(), list[int]()

    def sync(file: int) -> None:
        syncs.append(file)
        is_busy.wait(120)

    monkeypatch.setattr(os, "fdatasync", sync)
    for text in ("first", "second"):
        aggregator._note(text)
        aggregator._handle(inputs.Reconnected(aggregator._now(), 0))
        aggregator._commit()
    assert (connection.published, events_file.read_text()) == ([], before)
    is_busy.set()
    for count in (1, 2):
        assert aggregator._writing is not None
        aggregator._writing.result(120)
        aggregator._commit()
        assert len(connection.published) == events_file.read_text().count('"event":"note"') == count
    assert aggregator._writing is None
    assert len(syncs) == 2


@pytest.mark.parametrize("rule", [Named("port", {"min_updates": 1})])
def test_timer_of_the_rule_fires_before_its_instant_ends(
    aggregator: Aggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in virtual time. Rule `port` counts on it: its timer says that the models are sent next. With
    the timer behind further updates, it would take wrong versions for those that clients train from."""

    def packed(topic: str, message: messages.Message) -> ReceivedMessage:
        return ReceivedMessage(topic, messages.encode(message), 0)

    def answer() -> ReceivedMessage:
        at = aggregator._clock.now()
        times = dict.fromkeys(("downloaded", "train_start", "train_end", "sent"), at)
        update = message("a", 1, run="r", schema=aggregator._schema, **times)
        return ReceivedMessage(NAMES.update("a"), payloads.encode(update), at)

    batches = iter(
        (
            lambda: packed(NAMES.status("a"), messages.Status("a", "ready")),
            lambda: packed(NAMES.control(AGGREGATOR), messages.StartOrder()),
            answer,
            messages.StopOrder,
        )
    )
    drain, handle, handled = aggregator._inbox.drain, aggregator._handle, list[str]()

    def one_by_one(timeout: float) -> list[Any]:
        batch = next(batches, None)
        return drain(timeout) if batch is None else [batch()]

    def remembering(event: inputs.Input, payload: bytes | None = None) -> None:
        handled.append(type(event).__name__)
        handle(event, payload)

    monkeypatch.setattr(aggregator._inbox, "drain", one_by_one)
    monkeypatch.setattr(aggregator, "_handle", remembering)
    aggregator._serve()
    first = handled.index("UpdateArrived")
    assert handled[first : first + 3] == ["UpdateArrived", "TimersDue", "InstantOver"]


def test_aggregator_refuses_invalid_messages_and_continues(
    aggregator: Aggregator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_still(monkeypatch)

    def say(topic: str, payload: bytes) -> None:
        aggregator._receive(ReceivedMessage(topic, payload, 0))

    control = NAMES.control(AGGREGATOR)
    for topic, payload in (
        (control, b"[" * 60_000),
        (control, b'{"do": "log", "at": %s}' % (b"9" * 400)),
        (control, b'{"do": "crash", "device": "a"}'),
        (control, b'{"do": "start", "now": true}'),
        (NAMES.status("a"), b"there"),
        (NAMES.request("a"), b"stop"),
    ):
        say(topic, payload)
    assert aggregator._epoch is None
    assert aggregator._refusals.count == 6
    assert capsys.readouterr().err.count("aggregator: refused a message on testbed/r/") == 6
    say(NAMES.status("a"), messages.encode(messages.Status("a", "ready")))
    say(control, messages.encode(messages.StartOrder()))
    say(control, messages.encode(messages.NoteOrder("so it is")))
    say(control, messages.encode(messages.LogOrder(1.0, "a", "hand", 0.5, {"action": "crash"})))
    aggregator._durable.sync()
    lines = (aggregator._durable._directory / "events.jsonl").read_text().splitlines()
    assert '"clients":["a"]' in lines[0]
    assert '"message":"so it is"' in lines[-2]
    assert lines[-1] == (
        '{"event":"action","at":1.0,"device":"a","source":"hand","lateness":0.5,'
        '"details":{"action":"crash"}}'
    )
    assert aggregator._refusals.count == 6
    size = (aggregator._durable._directory / "events.jsonl").stat().st_size
    for _ in range(1000):
        say(NAMES.status("a"), messages.encode(messages.Status("a", "joining")))
        say(NAMES.update("a"), b"[" * 60_000)
    aggregator._durable.sync()
    assert 0 < (aggregator._durable._directory / "events.jsonl").stat().st_size - size < 50_000


def _client(tmp_path: Path, *steps: Named, parameters: int = 1) -> ClientProcess:
    shards.save(Quadratic(((1.0,),)).shards()[0], tmp_path / "shard")
    rule, local = Named("fedbuff", {}), LocalTraining(steps=1)
    return ClientProcess(
        ClientConfig(
            setup=ClientSetup(run="r", client="a", seed=1, rule=rule, local=local, steps=steps),
            broker=LOGIN,
            task=Named("quadratic", {"centers": [[1.0]]}),
            shard=str(tmp_path / "shard"),
            threads=1,
            parameters=parameters,
        )
    )


def test_client_refuses_invalid_messages_and_continues(
    connection: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def while_it_starts(*_: object) -> SimpleNamespace:
        for topic in (NAMES.broadcast, NAMES.model("a"), NAMES.request("a")):
            connection.sink(ReceivedMessage(topic, b"early", 0))
        return TRAINER

    monkeypatch.setattr("agents.client.main._trainer", while_it_starts)
    client = _client(tmp_path)
    assert [payload for _, payload in connection.published] == [b"joining", b"ready"]
    connection.sink(ReceivedMessage(NAMES.broadcast, b"model", 1))
    came = [client._inbox.get(), client._inbox.get()]
    assert client._inbox.empty()
    # Models from before it was ready are not for it, and it would train the oldest first.
    assert [one and one.topic for one in came] == [NAMES.request("a"), NAMES.broadcast]
    asked: list[str] = []

    def ask(what: str) -> Callable[..., core.Actions]:
        def remember(*_: object) -> core.Actions:
            asked.append(what)
            return []

        return remember

    for what in ("pull", "interrupt"):
        monkeypatch.setattr(core.ClientCore, what, ask(what))
    for payload in (b"", b"\xff", b"go", b"pull", b"interrupt", b"ready"):
        assert client._handle(ReceivedMessage(NAMES.request("a"), payload, 0)) == []
    assert asked == ["pull", "interrupt"]
    assert capsys.readouterr().err.count("client a: refused a message on testbed/r/request/a") == 4
    assert not client._stopped.is_set()
    monkeypatch.setattr(client._pace, "end", lambda: 60.0)
    monkeypatch.setattr(core.ClientCore, "interrupt", lambda *_: [core.CutShort()])
    for payload in (b"pull", b"interrupt"):
        client._sink(ReceivedMessage(NAMES.request("a"), payload, 0))
    client._keep_pace()  # the interrupt ends it
    assert asked == ["pull", "interrupt", "pull"]
    client._cut = False
    client._sink(ReceivedMessage(NAMES.request("a"), b"stop", 0))
    assert client._stopped.is_set()
    client._keep_pace()  # as it has to end


def test_client_with_secure_aggregation_bounds_its_payloads(
    connection: Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It limits the payloads it assembles per topic: a model, and a share of one mask. Other messages
    are handled as they arrive, so that none of them waits in memory."""
    monkeypatch.setattr("agents.client.main._trainer", lambda *_: TRAINER)
    secure = SecureRun(
        clients=["a", "b", "c"],
        updates=2,
        weights=1,
        colluding=1,
        needed=3,
        range=1.0,
        bits=16,
        timeout=60.0,
    )
    client = _client(tmp_path, secure_step(secure), parameters=1001)
    # 64 KiB of header and its length; a share is of 501 words, with head and seal.
    assert connection.options["largest"] == {"model": 65_544 + 4 * 1001, "share": 12 + 4 * 501 + 28}
    assert connection.published[1][0] == NAMES.key("a")
    peer = Party("r", "b", secure, 1001)
    peer.add_peer("a", connection.published[1][1])
    connection.sink(ReceivedMessage(NAMES.key("b"), peer.public, 0))
    for dispatch in range(1, 200):
        ((_, share),) = peer.prepare(dispatch)
        connection.sink(ReceivedMessage(NAMES.share("a", "b"), share, 0))
    connection.sink(ReceivedMessage(NAMES.share("a", "c"), b"made up", 0))
    connection.sink(ReceivedMessage(NAMES.key("c"), b"made up", 0))
    assert client._inbox.empty()
    assert isinstance(client._exchange, Party)
    assert {name: len(held) for name, held in client._exchange._held.items()} == {"b": 10}
    refused = capsys.readouterr().err
    assert "share/a/c: share from c: share has 7 bytes, expected 2044" in refused
    assert "key/c: expected a public key of a client of this run" in refused


class Delays:
    """Remembers how queues were changed."""

    def __init__(self, *_: Any) -> None:
        self.changed: list[tuple[int, Impairment]] = []

    def change(self, queue: int, impairment: Impairment) -> None:
        self.changed.append((queue, impairment))


def test_router_refuses_invalid_messages_and_continues(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agents.router.main.DelayServer", Delays)
    monkeypatch.setattr("agents.router.main.iptables", lambda: ["iptables"])
    monkeypatch.setattr("agents.router.main.run", lambda _: "")
    router = Router(
        RouterConfig(
            run="r",
            broker=LOGIN,
            targets={"broker": 1883},
            addresses={"a": "10.0.0.2"},
            links={"a": {"rtt": 0.2}},
            segments=[],
            attached={},
            seed=1,
        )
    )
    for order in (
        messages.DeviceOrder("a", Disconnect()),
        messages.DeviceOrder("b", SetLink({"rtt": 0.1})),
        messages.NoteOrder("no"),
    ):
        router._carry_out(ReceivedMessage(NAMES.control(ROUTER), messages.encode(order), 0))
    router._carry_out(ReceivedMessage(NAMES.control(ROUTER), b"[" * 60_000, 0))
    assert router._refusals.count == 4
    assert capsys.readouterr().err.count("router: refused a message on") == 4
    assert [topic for topic, _ in connection.published] == [NAMES.failure(ROUTER)] * 4
    assert isinstance(router._delays, Delays)
    assert router._delays.changed == []
    router._carry_out(
        ReceivedMessage(
            NAMES.control(ROUTER),
            messages.encode(messages.DeviceOrder("a", SetLink({"jitter": 0.01}))),
            0,
        )
    )
    assert router._delays.changed == [(0, [Impairment(0.1, 0.01)]), (1, [Impairment(0.1, 0.01)])]
    assert len(connection.published) == 4
