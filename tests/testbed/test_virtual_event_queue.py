"""Events in virtual time are ordered by time, rank, device, and order of planning."""

from __future__ import annotations

from testbed.virtual.timing import ARRIVAL, DEVICE, LINK, SCENARIO, EventQueue


def _played(queue: EventQueue) -> None:
    """All that is due now."""
    while (callback := queue.pop_due()) is not None:
        callback()


def test_events_of_one_instant_have_a_fixed_order() -> None:
    queue, heard = EventQueue(), list[str]()
    for rank, index, name in [
        (ARRIVAL, 0, "arrival"),
        (DEVICE, 2, "device 2"),
        (DEVICE, 1, "device 1"),
        (DEVICE, 1, "device 1 again"),
        (LINK, 9, "link"),
        (SCENARIO, 9, "scenario"),
    ]:
        queue.plan(5, rank, index, lambda name=name: heard.append(name))  # type: ignore[misc]
    queue.now = 5
    _played(queue)
    assert heard == ["scenario", "link", "device 1", "device 1 again", "device 2", "arrival"]
    assert (SCENARIO, LINK, DEVICE, ARRIVAL) == (0, 1, 2, 3)


def test_later_events_are_not_due() -> None:
    queue, heard = EventQueue(), list[int]()
    assert (queue.now, queue.next, queue.pop_due()) == (0, None, None)
    for time in (8, 3):
        queue.plan(time, SCENARIO, 0, lambda time=time: heard.append(time))  # type: ignore[misc]
    assert queue.next == 3
    assert queue.pop_due() is None
    queue.now = 3
    _played(queue)
    assert (heard, queue.next) == ([3], 8)
    queue.now = 10
    queue.plan(4, SCENARIO, 0, lambda: heard.append(4))  # over: it becomes now, after what was due at 8
    _played(queue)
    assert heard == [3, 8, 4]


def test_cleared_queue_is_empty() -> None:
    queue = EventQueue()
    queue.plan(0, SCENARIO, 0, lambda: None)
    queue.clear()
    assert (queue.next, queue.pop_due()) == (None, None)
