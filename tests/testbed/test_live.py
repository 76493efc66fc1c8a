from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from agents import events
from agents.config import Local, Stop
from analysis.load import load
from testbed import live
from testbed.live import Follower, Overview, TerminalView
from testbed.plan import PlannedDevice
from testbed.tally import DeviceTally, Notice, Tally, merged
from tests.analysis.conftest import directory as directory

STARTED = events.RunStarted(0.0, 1.7e9, ("pi-1", "pi-2"), ("pi-3",))


def update(
    client: str, applied: float, staleness: int = 0, training: float = 0.5
) -> events.UpdateApplied:
    return events.UpdateApplied(
        client=client,
        sequence=1,
        kind="delta",
        base_version=0,
        applied_version=staleness + 1,
        staleness=staleness,
        weight=1.0,
        samples=100,
        steps=20,
        loss=1.0,
        bytes=2600,
        dispatched=applied - 2,
        downloaded=applied - 1,
        train_start=applied - 1,
        train_end=applied - 1 + training,
        sent=applied - 0.25,
        arrived=applied,
        applied=applied,
    )


def fleet(count: int, group: str = "pi") -> tuple[PlannedDevice, ...]:
    numbers = range(1, count + 1)
    return tuple(
        PlannedDevice(f"{group}-{k}", group, 0.25, 512 * 2**20, Local(steps=1)) for k in numbers
    )


def tallied(records: Iterable[events.Record]) -> Tally:
    tally = Tally({name: DeviceTally() for name in ("pi-1", "pi-2", "pi-3")})
    for record in records:
        tally.take(record)
    return tally


def shown(records: Iterable[events.Record], *, terminal: bool = False) -> list[str]:
    """What a user sees of `records` that come all at once, line by line."""
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
    with live.view(console, Overview("fedbuff", Stop(after=60.0), fleet(3))) as view:
        for record in records:
            view.record(record)
        view.refresh(now=1000.0)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_follower_reads_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert follower.read() == []  # not there yet
    first, second, third = STARTED, events.Note(1.0, "härter"), events.VersionMade(2.0, 1, 3)
    line = events.to_line(second)
    with path.open("a", encoding="utf-8") as file:
        file.write(events.to_line(first) + line[:9])
        file.flush()
        assert follower.read() == [first]
        assert follower.read() == []
        file.write(line[9:] + '{"event":"from a later version"}\n' + events.to_line(third))
        file.flush()
        assert follower.read() == [second, third]
        file.write("no record\n")
    with pytest.raises(ValueError, match=r"events\.jsonl: "):
        follower.read()


def test_a_tally_counts_per_device() -> None:
    tally = tallied(
        [STARTED, update("pi-1", 2.0, 0), update("pi-1", 4.0, 3), update("pi-2", 5.0, 1, 0.75)]
    )
    assert tally.updates == 3
    assert tally.at == 5.0
    assert tally.devices["pi-1"] == DeviceTally("online", 2, 3, 3, 0.5)
    assert tally.devices["pi-2"] == DeviceTally("online", 1, 1, 1, 0.75)
    assert tally.devices["pi-3"].state == "absent"


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    tally = tallied([STARTED, *(update("pi-1", float(at)) for at in range(1, 6))])
    assert tally.rate(at=5.0) == 1.0
    assert tally.rate(at=13.0) == 0.3  # those of 3, 4 and 5 s
    assert tallied([STARTED]).rate(at=0.0) == 0.0
    resumed = tallied([events.RunStarted(60.0, 1.7e9, ("pi-1",), ()), update("pi-1", 61.0)])
    assert resumed.rate(at=62.0) == 0.5


def test_only_changes_of_presence_are_news() -> None:
    tally = tallied([STARTED])
    news = [
        tally.take(events.ClientStatus(at, "pi-1", state))
        for at, state in enumerate(["ready", "offline", "offline", "joining", "ready"])
    ]
    assert news == [None, Notice(1, "offline", "pi-1"), None, None, Notice(4, "online", "pi-1")]


def test_notices_of_one_kind_share_a_line() -> None:
    gone = [Notice(3.0 + k, "offline", f"pi-{k}") for k in range(8)]
    assert merged([gone[0], Notice(3.5, "note", "hot"), *gone[1:]]) == [
        Notice(3.0, "offline", "pi-0, pi-1, pi-2, pi-3, pi-4, pi-5 and 2 more"),
        Notice(3.5, "note", "hot"),
    ]


def test_without_a_terminal_there_is_a_line_per_evaluation_and_the_reason_of_the_end() -> None:
    lines = shown([
        STARTED,
        events.Evaluated(0.0, 0, 2.302, 0.1),
        update("pi-1", 1.0),
        events.VersionMade(1.0, 1, 1),
        events.Evaluated(0.5, 1, 2.0, 0.2),  # too soon to be worth a line
        update("pi-1", 5.0),  # goes into the next version: told before the evaluation of the first
        events.Evaluated(4.0, 1, 0.512, 0.905),
        events.ClientStatus(5.0, "pi-2", "offline"),  # it leaves because the run ends
        events.Evaluated(4.5, 2, 0.5, 0.91),
        events.RunEnded(5.0, "after", 2, 1),
    ])  # fmt: skip
    assert lines == [
        "     0.0 s  version     0  accuracy 10.0%  loss 2.302  updates     0    0.0/s",
        "     4.0 s  version     1  accuracy 90.5%  loss 0.512  updates     1    0.4/s",
        "     0.0 s  not there at the start: pi-3",
        "     4.5 s  version     2  accuracy 91.0%  loss 0.500  updates     2    0.4/s",
        "     5.0 s  ended: stop.after reached",
    ]


def test_notices_wait_a_second_for_their_like() -> None:
    console = Console(file=io.StringIO(), width=80)
    assert isinstance(console.file, io.StringIO)
    view = live.view(console, Overview("fedbuff", Stop(updates=10), fleet(2)))
    view.record(events.RunStarted(0.0, 1.7e9, ("pi-1", "pi-2"), ()))
    view.record(events.ClientStatus(3.0, "pi-1", "offline"))
    view.refresh(now=1000.0)
    view.record(events.ClientStatus(3.2, "pi-2", "offline"))
    view.refresh(now=1000.9)
    assert console.file.getvalue() == ""
    view.refresh(now=1001.0)
    assert console.file.getvalue().strip() == "3.0 s  offline: pi-1, pi-2"


def test_a_terminal_shows_every_device() -> None:
    updates = update("pi-1", 2.0, 0), update("pi-1", 4.0, 3), update("pi-2", 5.0, 1)
    screen = _screen(fleet(3), [STARTED, *updates, events.Evaluated(4.0, 2, 0.5, 0.915)])
    assert screen[1] == "fedbuff  7.0 of 60 s  version 2  3 updates  0.4/s"
    assert screen[2] == "accuracy 91.5%  loss 0.500"
    assert screen[3:] == [
        "device   cpu  state   updates  share  staleness  mean  training",
        "pi-1    0.25  online        2    67%          3   1.5    0.50 s",
        "pi-2    0.25  online        1    33%          1   1.0    0.50 s",
        "pi-3    0.25  absent        0     0%          –     –         –",
    ]


def test_a_large_fleet_is_shown_by_group_and_fits_the_screen() -> None:
    devices = (*fleet(100), *fleet(60, "a-group-with-quite-a-long-name"))
    started = events.RunStarted(0.0, 1.7e9, tuple(d.name for d in devices), ())
    updates = (update(f"pi-{k}", 5.0, k) for k in range(1, 4))
    screen = _screen(devices, [started, *updates, events.ClientStatus(5.0, "pi-4", "offline")])
    assert screen[4:] == [
        "pi ×100           0.25  99/100 on        3   100%          –   2.0    0.50 s",
        "a-group…name ×60  0.25  60/60 on         0     0%          –     –         –",
    ]


def _screen(devices: tuple[PlannedDevice, ...], records: Iterable[events.Record]) -> list[str]:
    """A terminal of 80 columns and 24 lines, at seven seconds."""
    console = Console(file=io.StringIO(), width=80, height=24)
    view = TerminalView(console, Overview("fedbuff", Stop(after=60.0), devices))
    for record in records:
        view.record(record)
    console.print(view.render(at=7.0))
    assert isinstance(console.file, io.StringIO)
    screen = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert len(screen) < 24
    assert max(map(len, screen)) <= 80
    assert not any("…" in line for line in screen[:4])  # no heading is cut
    return screen


def test_a_terminal_gets_its_cursor_back() -> None:
    output = "\n".join(shown([STARTED, update("pi-1", 2.0)], terminal=True))
    assert "pi-1" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_messages_are_shown_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=80)
    live.view(console, Overview("fedbuff", Stop(after=60.0), fleet(1))).progress("[/bold] " + 100 * "x")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "[/bold] " + 100 * "x" + "\n"


def test_the_summary_says_what_every_device_did_and_the_accuracy(directory: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(live.render_summary(load(directory)))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[1:5] == [
        "device  profile           updates  share  mean staleness  busy  idle",
        "fast    0.5 cpu, 512 MiB        2    67%             0.0   40%   60%",
        "slow    0.1 cpu, 512 MiB        1    33%             2.0   80%   20%",
        "mute    0.1 cpu, 256 MiB        0     0%               –    0%  100%",
    ]
    assert lines[6:] == [
        "fedbuff: accuracy 80.0% (best 85.0%), loss 1.1",
        "3 updates in 3 versions, 10.0 s (stop.after reached)",
    ]
