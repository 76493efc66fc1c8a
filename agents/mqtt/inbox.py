"""Messages that wait to be handled, bounded in bytes."""

from __future__ import annotations

import queue
import threading
from typing import Generic, TypeVar

from agents.mqtt.transport import ReceivedMessage

_OVERHEAD = 512
"""Bytes that a message takes beside its payload, at most."""

T = TypeVar("T")
"""What else than messages waits here."""


class Inbox(Generic[T]):
    """A queue between a connection's thread and the one that handles what comes. While it is full,
    nothing is read from the connection: the broker keeps what comes, and limits that too.

    `most`: bytes of messages that may wait before no further one is let in.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: queue.SimpleQueue[ReceivedMessage | T] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting = 0
        """Bytes."""
        self._bounded, self._closed = False, False

    def receive(self, message: ReceivedMessage) -> None:
        """Put `message`, as soon as there is room: the sink of a connection. Before the first `drain`
        there always is: the connection is being opened, and the broker's answer to that comes among the
        messages."""
        with self._room:
            self._room.wait_for(lambda: self._waiting < self._most or not self._bounded)
            self._waiting += _size(message)
        if not self._closed:
            self._queue.put(message)

    def put(self, thing: T) -> None:
        """Put what is no message, at once; a signal handler may do so, too."""
        self._queue.put(thing)

    def drain(self, timeout: float) -> list[ReceivedMessage | T]:
        """All that is there now, and no more than that, however fast more comes; waits up to `timeout`
        seconds for the first."""
        self._bounded = not self._closed
        try:
            taken = [self._queue.get(timeout=timeout)]
        except queue.Empty:
            return []
        taken += [self._queue.get() for _ in range(self._queue.qsize())]
        with self._room:
            self._waiting -= sum(_size(each) for each in taken if isinstance(each, ReceivedMessage))
            self._room.notify()
        return taken

    def close(self) -> None:
        """Take no more messages, so that the connection can end in order."""
        with self._room:
            self._bounded, self._closed = False, True
            self._room.notify()


def _size(message: ReceivedMessage) -> int:
    return _OVERHEAD + len(message.payload)
