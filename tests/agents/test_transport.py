"""The order of messages over a reconnect, at a broker that does what it is told."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from agents.config import Broker
from agents.transport import Connection

CONNECT, PUBLISH, SUBSCRIBE = 1, 3, 8
CONNACK, SUBACK = b"\x20\x02\x00\x00", b"\x90\x03\x00\x01\x01"


class Peer:
    """One connection to us, by hand: packets are shorter than 128 bytes."""

    def __init__(self, listener: socket.socket) -> None:
        self.socket, _ = listener.accept()

    def read(self, kind: int) -> bytes:
        """The next packet, which is of this kind, without its head."""
        head = self._exactly(2)
        assert head[0] >> 4 == kind
        return self._exactly(head[1])

    def published(self) -> bytes:
        """Payload of the next packet: topics are one byte long, and identifiers two."""
        return self.read(PUBLISH)[5:]

    def subscribed(self) -> None:
        identifier = self.read(SUBSCRIBE)[:2]
        self.socket.sendall(SUBACK[:2] + identifier + SUBACK[4:])

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            found += self.socket.recv(count - len(found)) or pytest.fail("the connection was closed")
        return found


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(10)
        yield made


def test_what_is_published_during_a_reconnect_does_not_overtake_what_is_older(
    listener: socket.socket,
) -> None:
    connection = Connection(
        Broker("127.0.0.1", listener.getsockname()[1], "me", "secret"), ["x"], lambda _: None
    )
    paho = connection._paho
    paho.reconnect_delay_set(1, 1)
    with closing(connection):
        paho.connect_async("127.0.0.1", listener.getsockname()[1])
        paho.loop_start()
        first = Peer(listener)
        first.read(CONNECT)
        first.socket.sendall(CONNACK)
        first.subscribed()
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
