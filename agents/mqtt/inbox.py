"""Queue of received messages, with a limit in bytes."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from typing import Generic, TypeVar

from agents.mqtt.transport import ReceivedMessage

_OVERHEAD = 512
"""Maximum memory of a message beside its payload, in bytes."""

T = TypeVar("T")
"""Items in the queue that are not messages."""


def take(waiting: queue.SimpleQueue[T], timeout: float | None) -> T:
    """Wait up to `timeout` seconds; None for any time. Raises queue.Empty.

    Up to Python 3.12, `SimpleQueue.get` may wait for ever: if nobody waited when the last item was put,
    and the thread loses its core at the begin of the call for longer than the timeout. Processes that
    are throttled or stopped lose theirs all the time. A failed `get_nowait` prevents this.
    """
    with suppress(queue.Empty):
        return waiting.get_nowait()
    return waiting.get(timeout=timeout)


class Inbox(Generic[T]):
    """Between a connection's thread and the thread that handles messages. While the queue is full
    (`most` bytes), nothing is read from the connection: messages wait at the broker, which also limits
    their number."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._queue: queue.SimpleQueue[ReceivedMessage | T] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting = 0
        """Bytes of the waiting messages."""
        self._bounded, self._closed = False, False

    def receive(self, message: ReceivedMessage) -> None:
        """Sink of a connection: wait while the queue is full, but not before the first `drain`, when the
        connection is still being opened, and the broker's answer may come after other messages."""
        with self._room:
            self._room.wait_for(lambda: self._waiting < self._most or not self._bounded)
            self._waiting += _size(message)
        if not self._closed:
            self._queue.put(message)

    def put(self, thing: T) -> None:
        """Add an item that is not a message, without waiting. May be called from a signal handler."""
        self._queue.put(thing)

    def drain(self, timeout: float) -> list[ReceivedMessage | T]:
        """All items; wait up to `timeout` seconds for one. Those that arrive during the call may stay in
        the queue."""
        self._bounded = not self._closed
        try:
            taken = [take(self._queue, timeout)]
        except queue.Empty:
            return []
        taken += [self._queue.get() for _ in range(self._queue.qsize())]
        with self._room:
            self._waiting -= sum(_size(each) for each in taken if isinstance(each, ReceivedMessage))
            self._room.notify()
        return taken

    def close(self) -> None:
        """Discard further messages, so that the connection can be closed properly."""
        with self._room:
            self._bounded, self._closed = False, True
            self._room.notify()


def _size(message: ReceivedMessage) -> int:
    return _OVERHEAD + len(message.payload)
