"""Updates that wait to be applied, and the records of their outcome."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agents import events
from agents.aggregator.dispatches import Arrivals, Dispatched
from agents.aggregator.inputs import UpdateArrived
from agents.models.vectors import NONE, Buffers
from agents.rules.interface import Contribution
from agents.timing.nanoseconds import SECOND, from_seconds
from tests.agents.helpers import message


def arrivals(*keys: tuple[str, int], buffers: tuple[Buffers, ...] = ()) -> Arrivals:
    """Updates of version 3, sent at 0.0625 s and received at 1 s of a run that began at 100 s."""
    found = Arrivals()
    for place, (client, dispatch) in enumerate(keys):
        update = message(client, dispatch, base_version=3, buffers=buffers[place] if buffers else NONE)
        event = UpdateArrived(SECOND, client, 1000, SECOND, update)
        found.add(event, Dispatched(3, from_seconds(0.0625)), epoch=100 * SECOND, parameters=1, facts={})
    return found


def test_record_of_an_applied_update_is_in_run_seconds() -> None:
    waiting = arrivals(("a", 1), ("b", 2))
    record = waiting.apply(Contribution("a", 1, base_version=3, weight=0.5), 6, 2 * SECOND).record
    assert record == events.UpdateApplied(
        client="a",
        sequence=1,
        kind="delta",
        base_version=3,
        samples=10,
        steps=2,
        loss=0.5,
        bytes=1000,
        bytes_before=1000.0,
        dispatched=0.0625,
        downloaded=0.125,
        train_start=0.25,
        train_end=0.375,
        sent=0.5,
        arrived=1.0,
        dispatch=1,
        masking=0.0,
        outside=0,
        applied_version=6,
        staleness=2,
        weight=0.5,
        applied=2.0,
    )
    assert [*waiting] == [("b", 2)]


def test_round_of_an_update_that_is_not_applied_is_unfinished() -> None:
    waiting = arrivals(("a", 1), ("b", 2), ("a", 3))
    expected = events.RoundUnfinished(
        at=2.0, client="b", base_version=3, dispatched=0.0625, until=1.0, dispatch=2
    )
    assert waiting.drop("b", 2, 2 * SECOND).record == expected
    others = [replace(expected, client="a", dispatch=number, at=3.0) for number in (1, 3)]
    assert [log.record for log in waiting.unapplied_records(3 * SECOND)] == others


def test_updates_wait_in_order_of_arrival() -> None:
    waiting = arrivals(("a", 1), ("b", 2), ("a", 3))
    assert (len(waiting), [*waiting]) == (3, [("a", 1), ("b", 2), ("a", 3)])
    assert (waiting.dispatches_of("a"), waiting.dispatches_of("c")) == ((1, 3), ())


def test_buffers_average_applied_updates_and_integers_come_from_the_last() -> None:
    made = tuple(
        Buffers(np.array([value], np.float32), np.array([value], np.int64)) for value in (1, 4, 7)
    )
    waiting = arrivals(("a", 1), ("b", 2), ("c", 3), buffers=made)
    used = [Contribution("b", 2, 3, weight=1.0), Contribution("a", 1, 3, weight=2.0)]
    found = waiting.averaged_buffers(made[2], used, shares=False)
    assert found.floats.tolist() == pytest.approx([2.0])
    assert found.integers.tolist() == [4]
    assert len(waiting) == 3
