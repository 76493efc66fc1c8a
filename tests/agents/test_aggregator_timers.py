"""The aggregator's timers: each comes once, when it is due, and several in a fixed order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.aggregator.progress import Timer, Timers

_BOOKS: list[Timer] = ["evaluate", "checkpoint", "after"]
_OTHERS: list[Timer] = [
    ("rule", "a"),
    ("rule", "b"),
    ("report", "a"),
    ("part", "shares", 1),
    "waiting",
    "give up",
]
_SET = st.dictionaries(st.sampled_from(_BOOKS + _OTHERS), st.integers(0, 9))


def timers_of(due: dict[Timer, int]) -> Timers:
    timers = Timers()
    for timer, at in due.items():
        timers.set(timer, at)
    return timers


def popped(timers: Timers, now: int) -> list[tuple[Timer, int]]:
    """All that are due by `now`."""
    found = []
    while (one := timers.pop(now)) is not None:
        found.append(one)
    return found


@given(_SET, st.integers(0, 9))
def test_due_timers_fire_once_earliest_first(due: dict[Timer, int], now: int) -> None:
    timers = timers_of(due)
    assert timers.next == min(due.values(), default=None)
    came = popped(timers, now)
    assert dict(came) == {timer: at for timer, at in due.items() if at <= now}
    assert len(dict(came)) == len(came)
    assert [at for _, at in came] == sorted(at for _, at in came)
    assert timers.next == min((at for at in due.values() if at > now), default=None)


@given(st.permutations(_BOOKS + _OTHERS))
def test_rule_timers_fire_before_evaluation_checkpoint_and_end(order: list[Timer]) -> None:
    came = [timer for timer, _ in popped(timers_of(dict.fromkeys(order, 5)), 5)]
    assert came == [timer for timer in order if timer in _OTHERS] + _BOOKS


@given(_SET, st.sampled_from(_BOOKS + _OTHERS))
def test_setting_a_timer_again_moves_it_and_cancelling_keeps_the_others(
    due: dict[Timer, int], timer: Timer
) -> None:
    moved, cancelled = timers_of(due), timers_of(due)
    moved.set(timer, 20)
    cancelled.cancel(timer)
    others = {other: at for other, at in due.items() if other != timer}
    assert dict(popped(moved, 19)) == dict(popped(cancelled, 19)) == others
    assert popped(moved, 20) == [(timer, 20)]
    assert popped(cancelled, 20) == []


@given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 40))
@pytest.mark.parametrize("timer", [("rule", "a"), "evaluate"])
def test_periodic_timer_fires_at_multiples_of_its_period(
    timer: Timer, period: int, set_at: int, end: int
) -> None:
    timers = Timers()
    timers.set_periodic(timer, period, set_at)
    came = [at for now in range(set_at, end) for _, at in popped(timers, now)]
    assert came == [at for at in range(set_at + 1, end) if at % period == 0]


def test_overdue_rule_ticks_all_fire_and_overdue_checkpoints_once() -> None:
    timers = Timers()
    timers.set_periodic(("rule", "a"), 10, 0)
    timers.set_periodic("checkpoint", 10, 0)
    assert popped(timers, 35) == [
        (("rule", "a"), 10),
        ("checkpoint", 10),
        (("rule", "a"), 20),
        (("rule", "a"), 30),
    ]
    assert popped(timers, 40) == [(("rule", "a"), 40), ("checkpoint", 40)]


@given(_SET)
def test_rule_timers_are_known(due: dict[Timer, int]) -> None:
    assert timers_of(due).any_of_rule == (("rule", "a") in due or ("rule", "b") in due)
