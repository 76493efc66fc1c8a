"""A device's work in virtual time, and what keeps it from working, in whole nanoseconds."""

from __future__ import annotations

from fractions import Fraction

import pytest

from testbed.virtual.device import OngoingTraining, release
from testbed.virtual.timing import EventQueue
from tests.testbed.devices import Steps, device, play


def _work(steps: int = 4, *, since: int = 100, computed: int = 110, floor: int = 0) -> OngoingTraining:
    return OngoingTraining(training=Steps(steps), started=7, since=since, computed=computed, floor=floor)


@pytest.mark.parametrize(
    ("at", "done"),
    [
        (100, 0),
        (101, Fraction(4, 10)),
        (105, 2),
        (109, Fraction(36, 10)),
        (110, 4),
        (111, 4),
    ],
)
def test_steps_are_spread_evenly_over_the_training(at: int, done: Fraction) -> None:
    assert _work().progress(at) == done


def test_work_without_duration_is_done_at_once() -> None:
    assert _work(computed=100).progress(100) == 4


def test_minimum_duration_applies_if_it_ends_later() -> None:
    assert _work(computed=110, floor=120).end_time == 120
    assert _work(computed=110, floor=105).end_time == 110
    assert _work(computed=110, floor=120).progress(105) == 1


def test_slower_cpu_prolongs_the_remaining_work() -> None:
    work = _work()
    slower = work.slowed_down(104, 2.5)  # 6 ns are left to compute: they take 15
    assert slower == OngoingTraining(
        training=work.training, started=7, since=104, done=Fraction(16, 10), computed=119, floor=0
    )
    assert slower.progress(104) == Fraction(16, 10)
    assert slower.progress(109) == Fraction(24, 10)  # a third of the 2.4 steps that were left
    assert slower.slowed_down(109, 0.1).computed == 110


def test_slower_cpu_does_not_prolong_the_minimum_duration() -> None:
    assert _work(computed=104, floor=110).slowed_down(102, 3).end_time == 110  # computed at 108
    assert _work(computed=104, floor=110).slowed_down(102, 5).end_time == 112
    computed = _work(computed=104, floor=110).slowed_down(106, 5)
    assert (computed.computed, computed.floor, computed.done) == (106, 110, Fraction(24, 10))


@pytest.mark.parametrize(
    ("at", "steps", "ended"),
    [
        (100, 0, 100),
        (101, 1, 104),  # 3⅓ ns, rounded up
        (103, 1, 104),
        (104, 2, 107),
        (106, 2, 107),
        (108, 3, 110),
        (110, 3, 110),
    ],
)
def test_interrupted_training_finishes_its_current_step(at: int, steps: int, ended: int) -> None:
    work = _work(3)
    cut = work.cut_short(at)
    assert work.training.steps == steps
    assert cut == OngoingTraining(
        training=work.training, started=7, since=100, computed=ended, floor=ended
    )


def test_interrupt_after_a_change_of_speed() -> None:
    """One of 4 steps is done by 110 and the other three would be by 140; the running step ends at
    120."""
    work = _work(computed=140).slowed_down(110, 1)
    assert work.done == 1
    cut = work.cut_short(111)
    assert cut.done == 1
    assert (cut.training.steps, cut.since, cut.end_time) == (2, 110, 120)
    assert work.slowed_down(110, 1).cut_short(110).end_time == 110


def test_other_work_before_the_first_step_delays_all_steps() -> None:
    """The device prepares until 100 and does 10 ns of other work at 90: its steps begin at 100."""
    delayed = _work(steps=4).delayed(90, 10)
    assert (delayed.since, delayed.computed) == (100, 120)
    assert [delayed.progress(at) for at in (100, 110)] == [0, 2]


def test_other_work_during_the_training_delays_the_remaining_steps() -> None:
    """At 105 two of 4 steps are done; the other two and 10 ns of other work take until 120. A training
    that is computed at 104 and waits for its minimum duration does other work at 110 at once."""
    delayed = _work(steps=4).delayed(105, 10)
    assert (delayed.since, delayed.computed) == (105, 120)
    assert delayed.progress(105) == 2
    assert _work(computed=104, floor=130).delayed(110, 10).computed == 120


def test_training_cut_to_zero_steps_ends_at_once() -> None:
    work = _work().cut_short(100)
    assert work.progress(100) == 0
    assert work.cut_short(100).end_time == 100


def test_paused_time_is_not_running_time() -> None:
    one = device(EventQueue())
    assert (one.last_awake(5), one.running_time(5)) == (5, 5)
    one.freeze(10)
    assert (one.last_awake(17), one.running_time(17)) == (10, 10)
    one.thaw(20)
    assert (one.last_awake(23), one.running_time(23)) == (23, 13)
    one.freeze(30)
    one.thaw(35)
    assert one.lost_to_pauses == 15
    assert one.running_time(40) == 25


def test_messages_received_in_a_pause_are_handled_in_order_afterwards() -> None:
    queue, heard = EventQueue(), list[str]()
    one = device(queue)

    def first() -> None:
        heard.append(f"first, frozen at {one.frozen_at}")
        one.held_by_pause.append(lambda: heard.append("again"))

    one.freeze(10)
    one.held_by_pause += [first, lambda: heard.append("second")]
    one.thaw(20)
    assert heard == ["first, frozen at None", "second"]
    release(one.held_by_pause)
    assert heard[2:] == ["again"]
    assert one.held_by_pause == []


def test_queued_messages_pass_first_after_an_outage() -> None:
    queue, heard = EventQueue(), list[str]()
    one = device(queue)
    one.plug(connected=False)
    assert one.is_cut_off
    one.line.upload(1, lambda at: heard.append(f"sent, there at {at}"))
    one.held_by_network.append(lambda: heard.append(f"kept, cut off: {one.is_cut_off}"))
    assert heard == []
    one.plug(connected=True)
    play(queue)
    assert heard == ["kept, cut off: False", "sent, there at 1"]


def test_end_of_a_device_drops_its_messages_in_flight() -> None:
    queue, heard = EventQueue(), list[int]()
    one = device(queue)
    one.line.upload(1, heard.append)
    one.end()
    assert not one.alive
    assert one.line.up._messages == []
