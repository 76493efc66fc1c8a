from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from analysis.activity import (
    DOWNLOAD,
    OFFLINE,
    PAUSED,
    STATES,
    TRAIN,
    UNPOWERED,
    UPLOAD,
    WAIT,
    WINDOW,
    Activity,
)
from tests.testbed.record_factories import update

SIGNS = {DOWNLOAD: "d", TRAIN: "t", UPLOAD: "u", WAIT: "w", OFFLINE: "x", PAUSED: "p", UNPOWERED: "e"}


def seconds(activity: Activity, at: float, last: int) -> str:
    """The last seconds before `at`, a letter each; what is inferred in capitals, `-` for nothing."""
    cells = activity.cells(at, WINDOW)[-last - 1 : -1]  # the last is the one that `at` begins
    letters = ["-" if cell is None else SIGNS[cell.state] for cell in cells]
    return "".join(
        letter.upper() if cell is not None and cell.inferred else letter
        for letter, cell in zip(letters, cells, strict=True)
    )


def began(at: float = 0.0) -> Activity:
    activity = Activity()
    activity.begin(at)
    return activity


def cycle(arrived: float, waited: float = 0.0):  # type: ignore[no-untyped-def]
    """An update whose cycle takes four seconds: one of download, two of training, one of upload."""
    return update("pi-1", arrived, training=2.0, upload=1.0, waited=waited)


def test_next_cycle_is_inferred_from_the_last_update() -> None:
    activity = began()
    activity.add_update(cycle(4.0))
    assert seconds(activity, 4.0, 6) == "--dttu"
    assert seconds(activity, 7.0, 9) == "--dttuDTT"
    assert activity.now(8.0) == UPLOAD
    activity.add_update(update("pi-1", 9.0, download=1.0, training=3.0, upload=1.0))
    assert seconds(activity, 9.0, 9) == "dttudtttu"


def test_device_is_shown_training_before_its_first_update() -> None:
    assert seconds(began(), 3.0, 4) == "-TTT"
    assert Activity().now(3.0) == WAIT  # it was never there
    assert seconds(Activity(), 3.0, 4) == "----"


def test_device_waits_if_models_are_sent_with_versions() -> None:
    activity = began()
    activity.add_update(cycle(4.0, waited=2.0))
    activity.add_update(cycle(10.0, waited=2.0))  # dispatched at 6, when the first was applied
    assert seconds(activity, 10.0, 10) == "dttuwwdttu"
    assert seconds(activity, 13.0, 5) == "tuWWD"


def test_device_works_on_if_models_are_sent_at_once() -> None:
    activity = began()
    activity.add_update(cycle(4.0, waited=9.0))
    activity.add_update(cycle(8.0, waited=9.0))  # dispatched at 4, before the first was applied
    assert seconds(activity, 10.0, 10) == "dttudttuDT"


def test_overlapping_times_are_counted_once() -> None:
    activity = began()
    activity.add_update(cycle(4.0))
    activity.add_update(update("pi-1", 6.0, download=3.0, training=1.0, upload=1.0))  # from 1 on
    assert seconds(activity, 6.0, 6) == "dttutu"


def test_state_beyond_the_last_cycle_follows_from_cpu_use() -> None:
    activity = began()
    activity.add_update(cycle(4.0))
    for until, busy in [(9.0, True), (10.0, False), (11.0, True)]:
        activity.used_cpu(until, busy=busy)
    assert seconds(activity, 12.0, 8) == "DTTUTWTT"
    assert activity.now(12.0) == TRAIN
    assert activity.shares(12.0) == {
        DOWNLOAD: 2.0, TRAIN: 7.0, UPLOAD: 2.0, WAIT: 1.0, OFFLINE: 0.0, PAUSED: 0.0, UNPOWERED: 0.0,
    }  # fmt: skip


def test_state_without_telemetry_is_the_longer_of_wait_and_training() -> None:
    activity = began()
    activity.add_update(cycle(4.0))
    activity.add_update(cycle(12.0))  # four seconds idle
    assert seconds(activity, 18.0, 6) == "DTTUWW"


def test_work_continues_after_a_pause() -> None:
    activity = began()
    activity.add_update(cycle(4.0))
    activity.hold("frozen", 6.0)
    assert activity.now(7.0) == PAUSED
    assert seconds(activity, 9.0, 5) == "DTppp"
    activity.release("frozen", 9.0)
    assert seconds(activity, 12.0, 8) == "DTpppTUT"


def test_returning_device_starts_a_new_cycle() -> None:
    activity = began()
    activity.add_update(cycle(4.0))
    activity.hold("down", 6.0)
    activity.hold("down", 6.5)  # its last will
    assert activity.now(8.0) == OFFLINE
    activity.begin(8.0)
    assert seconds(activity, 10.0, 10) == "dttuDTxxDT"
    assert activity.now(10.0) == TRAIN


def test_overlapping_holds_last_until_both_end() -> None:
    activity = began()
    activity.hold("frozen", 1.0)
    activity.hold("cut off", 2.0)
    activity.release("frozen", 3.0)
    assert seconds(activity, 4.0, 4) == "Tpxx"
    activity.release("cut off", 4.0)
    assert seconds(activity, 5.0, 5) == "TpxxT"


def test_cells_cover_whole_seconds_and_do_not_change() -> None:
    activity = began()
    activity.add_update(cycle(4.0))
    before = activity.cells(8.0, 30)
    after = activity.cells(9.9, 30)
    assert before[:-1] == after[:-1]
    assert [cell and cell.state for cell in before[-5:-3]] == [DOWNLOAD, TRAIN]  # a tie, and two to none


Happening = tuple[str, float]


@st.composite
def lives(draw: st.DrawFn) -> list[Happening]:
    """Events of a device, in order."""
    kinds = ["update", "look", "freeze", "thaw", "down", "up"]
    steps = draw(st.lists(st.tuples(st.sampled_from(kinds), st.floats(0.01, 30.0)), max_size=30))
    at, life = 0.0, []
    for kind, after in steps:
        at += after
        life.append((kind, at))
    return life


def lived(life: list[Happening], *, looking: bool) -> tuple[Activity, float]:
    activity, at = began(), 0.0
    for kind, at in life:
        match kind:
            case "update":
                activity.add_update(cycle(at))
            case "look" if looking:
                activity.now(at)
                activity.shares(at)
            case "freeze":
                activity.hold("frozen", at)
            case "thaw":
                activity.release("frozen", at)
            case "down":
                activity.hold("down", at)
            case "up":
                activity.begin(at)
    return activity, at


@given(lives())
@example([("update", at) for at in (1.5, 2.75, 32.25, 61.75)])  # the first: in the minute's first second
def test_reading_the_activity_does_not_change_it(life: list[Happening]) -> None:
    (unseen, at), (seen, _) = (lived(life, looking=looking) for looking in (False, True))
    assert seen.cells(at, WINDOW) == unseen.cells(at, WINDOW)
    shares = seen.shares(at)
    assert set(shares) == set(STATES)
    assert min(shares.values()) >= 0
    assert sum(shares.values()) == pytest.approx(min(at, WINDOW + at % 1))
