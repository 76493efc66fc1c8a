"""Order of messages across a reconnect, and large messages, with a scripted broker."""

from __future__ import annotations

import queue
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from paho.mqtt.enums import MQTTErrorCode

from agents import disturbances
from agents.config import BrokerAccess
from agents.links import packets
from agents.mqtt import chunks, streaming
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage

CONNECT, PUBLISH, PUBACK, SUBSCRIBE = 1, 3, 4, 8
CONNACK, SUBACK = b"\x20\x02\x00\x00", b"\x90\x03\x00\x01\x01"


class Peer:
    """One connection to us, by hand."""

    def __init__(self, listener: socket.socket) -> None:
        self.socket, _ = listener.accept()

    def read(self, kind: int) -> bytes:
        """The next packet, which is of this kind, without its head."""
        assert self._exactly(1)[0] >> 4 == kind
        length, shift = 0, 0
        while (byte := self._exactly(1)[0]) > 127:
            length, shift = length | (byte - 128) << shift, shift + 7
        return self._exactly(length | byte << shift)

    def published(self) -> bytes:
        """Payload of the next packet: topics are one byte long, and identifiers two."""
        return self.read(PUBLISH)[5:]

    def welcome(self) -> None:
        self.read(CONNECT)
        self.socket.sendall(CONNACK)
        self.subscribed()

    def subscribed(self) -> None:
        identifier = self.read(SUBSCRIBE)[:2]
        self.socket.sendall(SUBACK[:2] + identifier + SUBACK[4:])

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            found += self.socket.recv(count - len(found)) or pytest.fail("the connection was closed")
        return bytes(found)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(120)
        yield made


@contextmanager
def connected(
    listener: socket.socket,
    sink: Callable[[ReceivedMessage], None],
    **options: Any,
) -> Iterator[tuple[Connection, Peer]]:
    """A connection that has subscribed, and its peer. It comes back a second after it is lost."""
    port = listener.getsockname()[1]
    broker = BrokerAccess("127.0.0.1", port, "me", "secret")
    with closing(Connection(broker, ["x"], sink, **options)) as connection:
        connection._paho.reconnect_delay_set(1, 1)
        connection._paho.connect_async("127.0.0.1", port)
        connection._paho.loop_start()
        peer = Peer(listener)
        peer.welcome()
        yield connection, peer
        peer.socket.close()


def test_messages_keep_their_order_across_a_reconnect(listener: socket.socket) -> None:
    with connected(listener, lambda _: None) as (connection, first):
        connection.publish("t", b"model")
        assert first.published() == b"model"  # and is never acknowledged
        first.socket.close()
        second = Peer(listener)
        second.read(CONNECT)
        connection.publish("t", b"question")
        time.sleep(0.05)  # for it to overtake
        second.socket.sendall(CONNACK)
        second.subscribed()
        assert [second.published(), second.published()] == [b"model", b"question"]
        second.socket.close()


def test_log_says_why_there_is_no_connection_yet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attempts go on for minutes, and the reason is in no other place meanwhile."""
    monkeypatch.setattr(disturbances, "_TARDY_SECONDS", 0.1)
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ConnectionFailedError, match="Connection refused"):
            Connection(BrokerAccess("127.0.0.1", port, "pi", ""), [], lambda _: None).open(0.5)
    said = f"pi: no connection to the broker at 127.0.0.1:{port} yet: [Errno 111] Connection refused\n"
    assert capsys.readouterr().err == said


def test_closed_connection_leaves_no_socket(listener: socket.socket) -> None:
    """This includes the two sockets that wake paho's loop, which paho would leave to the garbage
    collector."""
    with connected(listener, lambda _: None) as (connection, _):
        waking = [connection._paho._sockpairR, connection._paho._sockpairW]
        assert all(sock is not None and sock.fileno() >= 0 for sock in waking)
    assert [sock.fileno() for sock in waking if sock is not None] == [-1, -1]
    connection.publish("t", b"late")  # as another thread may
    connection.publish_lossy("t", b"late")
    connection.close()


def message(topic: str, payload: bytes, identifier: int) -> bytes:
    """A packet that publishes `payload`, with QoS 1."""
    rest = len(topic).to_bytes(2, "big") + topic.encode() + identifier.to_bytes(2, "big") + payload
    length, left = b"", len(rest)
    while left > 127:
        length, left = length + bytes([left % 128 + 128]), left // 128
    return b"\x32" + length + bytes([left]) + rest


def on_wire(part: bytes) -> bytes:
    return part + part.share if isinstance(part, chunks.Chunk) else part


LARGE = random.Random(0).randbytes(300_000)  # noqa: S311


def test_arrival_time_is_when_the_kernel_received_the_message(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packets, "_LONGEST", 60 * 10**9)  # this host may be busy
    arrived: queue.Queue[ReceivedMessage] = queue.Queue()
    goes_on = threading.Event()

    def sink(message: ReceivedMessage) -> None:
        arrived.put(message)
        goes_on.wait(120)

    with connected(listener, sink) as (_, peer):
        peer.socket.sendall(b"\x30\x04\x00\x01xA")
        first = arrived.get(timeout=120)
        peer.socket.sendall(b"\x30\x04\x00\x01xB")
        time.sleep(0.05)
        released = time.monotonic_ns()
        goes_on.set()
        second = arrived.get(timeout=120)
        assert (first.payload, second.payload) == (b"A", b"B")
        assert first.at < second.at < released


@pytest.mark.parametrize("pieces", ["few", "many"])
def test_large_messages_are_assembled_from_any_pieces_and_acknowledged(
    listener: socket.socket, pieces: str
) -> None:
    """One message, parts, repeated parts, and a topic that is longer than what is looked at; what a
    lost connection has left unfinished is of no matter to the next one."""
    arrived: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()
    update = "testbed/r/update/a"
    head, *shares = map(on_wire, chunks.split(LARGE, 70_000))
    sent = [
        ("model", LARGE[:32_800]),
        *((update, part) for part in (head, *shares[:2], *shares)),
        ("t" * 1500, LARGE[:100_000]),
        ("status", b"ready"),
        ("model", LARGE),
    ]
    expected = [LARGE[:32_800], LARGE, LARGE[:100_000], b"ready", LARGE]
    packets = [message(topic, payload, n) for n, (topic, payload) in enumerate(sent, start=1)]
    with connected(listener, arrived.put, largest={"update": len(LARGE)}) as (_, first):
        first.socket.sendall(packets[-1][:200_000])
        first.socket.close()
        peer = Peer(listener)
        peer.welcome()
        whole, dice = b"".join(packets), random.Random(1)  # noqa: S311
        while whole:
            count = len(whole) if pieces == "few" else dice.choice((1, 2, 30, 5_000, 200_000))
            peer.socket.sendall(whole[:count])
            whole = whole[count:]
        assert [arrived.get(timeout=120).payload for _ in expected] == expected
        for number in range(1, len(packets) + 1):
            assert peer.read(PUBACK) == number.to_bytes(2, "big")
        peer.socket.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wakes by the bytes that are there")
def test_large_message_over_a_slow_link_rarely_wakes_its_reader(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the next, small one are not waited for."""
    woken, read = 0, streaming.StreamingClient._packet_read

    def counting(client: streaming.StreamingClient) -> MQTTErrorCode:
        nonlocal woken
        woken += 1
        return read(client)

    monkeypatch.setattr(streaming.StreamingClient, "_packet_read", counting)
    arrived: queue.SimpleQueue[ReceivedMessage] = queue.SimpleQueue()
    with connected(listener, arrived.put) as (_, peer):
        packet = message("model", LARGE, 1)
        for at in range(0, len(packet), 1_448):
            peer.socket.sendall(packet[at : at + 1_448])
            time.sleep(0.001)
        assert arrived.get(timeout=120).payload == LARGE
        assert woken < len(LARGE) / 1_448 / 4
        peer.socket.sendall(message("status", b"ready", 2))
        assert arrived.get(timeout=120).payload == b"ready"


def test_large_message_is_sent_whole_to_a_slow_broker(
    listener: socket.socket,
) -> None:
    with connected(listener, lambda _: None) as (connection, peer):
        payload = LARGE * 20
        connection.publish("t", payload)
        joiner, whole = chunks.Joiner(lambda _: 2**30), None
        while whole is None:
            whole = joiner.add("t", peer.published())
        assert whole == payload


@pytest.mark.timed
@pytest.mark.parametrize("patient", [True, False])
def test_connection_is_dropped_for_the_will_if_the_goodbye_takes_too_long(
    patient: bool, listener: socket.socket
) -> None:
    """The broker publishes the will when a connection ends without a DISCONNECT. Two messages are in
    flight, each acknowledged half a second after the previous one: over a slow link a part of a model
    takes as long as the keep-alive allows."""
    with connected(listener, lambda _: None, will=("w", b"gone")) as (connection, peer):
        connection.publish("t", b"first")
        connection.publish("t", b"second")
        close = threading.Thread(target=connection.close, args=(0.3,), kwargs={"patient": patient})
        close.start()
        packets = [peer.read(PUBLISH) for _ in range(3)]
        assert packets[-1][5:] == b"gone"
        for packet in packets:
            time.sleep(0.5)
            with suppress(OSError):
                peer.socket.sendall(b"\x40\x02" + packet[3:5])
        close.join(120)
        rest = b""
        with suppress(ConnectionResetError):  # dropped while an acknowledgement was unread
            rest = peer.socket.recv(100)
        assert rest == (b"\xe0\x00" if patient else b"")
