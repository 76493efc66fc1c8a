"""Messages waiting to be handled are bounded in bytes, and no sender waits for ever."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from agents.mqtt.transport import Inbox, ReceivedMessage, take

LARGE = ReceivedMessage("update/d-1", bytes(1000), 0)


def test_messages_of_a_flooding_sender_wait_for_the_others() -> None:
    inbox: Inbox[str] = Inbox(10_000)
    assert inbox.drain(0.0) == []
    sent: list[int] = []

    def flood() -> None:
        for number in range(100):
            inbox.receive(LARGE)
            sent.append(number)

    with ThreadPoolExecutor() as pool:
        flooding = pool.submit(flood)
        most = 0
        while not flooding.done():
            inbox.put("a timer")  # is not kept waiting
            taken = inbox.drain(1.0)
            most = max(most, taken.count(LARGE))
    assert sent == list(range(100))
    assert 1 <= most <= 8  # the last of them found almost 10,000 bytes waiting


def test_messages_during_connection_setup_do_not_delay_the_reply() -> None:
    inbox: Inbox[str] = Inbox(10_000)
    for _ in range(100):
        inbox.receive(LARGE)
    assert inbox.drain(0.0) == [LARGE] * 100
    for _ in range(7):
        inbox.receive(LARGE)
    assert inbox.drain(0.0) == [LARGE] * 7


def test_connection_waiting_for_space_can_be_closed() -> None:
    inbox: Inbox[str] = Inbox(1)
    inbox.drain(0.0)
    inbox.receive(LARGE)
    waiting = threading.Thread(target=inbox.receive, args=(LARGE,))
    waiting.start()
    inbox.close()
    waiting.join(120)
    assert not waiting.is_alive()
    assert inbox.drain(0.0) == [LARGE]


def test_nobody_waits_for_longer_than_the_timeout() -> None:
    """With `get(timeout=...)` of Python 3.12 one of 13,000 calls, on average, would never end."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait_often() -> None:
        for number in range(30_000):
            waiting.put(number)
            assert take(waiting, None) == number
            with pytest.raises(queue.Empty) if number % 10_000 == 0 else suppress(queue.Empty):
                take(waiting, 1e-9)

    thread = threading.Thread(target=wait_often, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
