from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agents import events
from agents.config import StopConditions
from analysis.load import load
from analysis.part import Notice
from analysis.tally import Tally, merge_notices
from testbed.watching import live
from testbed.watching.live import LiveView
from testbed.watching.rows import Overview
from tests.analysis.conftest import directory as directory
from tests.analysis.conftest import with_records
from tests.testbed.record_factories import STARTED, fleet, update


def tallied(records: Iterable[events.Record]) -> Tally:
    tally = Overview(rule="fedbuff", stop=StopConditions(after=60.0), devices=fleet(3)).tally()
    for record in records:
        tally.add(record)
    return tally


class Shown:
    """A view without a terminal, and the lines that a user sees."""

    def __init__(self, devices: int = 3, after: float = 60.0, width: int = 80, **more: Any) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, width=width)
        stop = StopConditions(after=after)
        overview = Overview(rule="fedbuff", stop=stop, devices=fleet(devices), **more)
        self.view = LiveView(self.console, overview)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._file.getvalue().splitlines()]


def shown(records: Iterable[events.Record]) -> list[str]:
    """Return the lines that a user sees if `records` arrive all at once."""
    screen = Shown()
    with screen.view as view:
        for record in records:
            view.record(record)
        view.refresh(now=1000.0)
    return screen.lines


def test_tally_counts_per_device() -> None:
    tally = tallied([STARTED, update("pi-1", 2.0, 0), update("pi-1", 4.0, 3), update("pi-2", 5.0, 1)])
    assert tally.updates == 3
    assert tally.at == 5.0
    counts = {d: (t.state, t.updates, t.staleness, t.staleness_sum) for d, t in tally.devices.items()}
    assert counts == {
        "pi-1": ("online", 2, 3, 3),
        "pi-2": ("online", 1, 1, 1),
        "pi-3": ("absent", 0, 0, 0),
    }


def test_devices_of_a_resumed_run_start_as_planned() -> None:
    done: list[dict[str, object]] = [
        {"action": "set", "cpu": 0.1},
        {"action": "pause"},
        {"action": "disconnect"},
    ]
    acted = [events.Acted(1.0, "pi-1", "hand", 0.0, one) for one in done]
    again = dataclasses.replace(STARTED, at=4.0)
    tally = tallied([STARTED, *acted, events.RunEnded(4.0, "interrupted", 0, 0), again])
    assert tally.devices["pi-1"].cpu == tallied([STARTED]).devices["pi-1"].cpu
    assert tally.devices["pi-1"].activity.now(6.0) == "train"


def test_tally_applies_actions_to_devices() -> None:
    def acted(at: float, **details: object) -> events.Acted:
        return events.Acted(at, "pi-1", "hand", 0.0, details)

    tally = tallied([STARTED, acted(1.0, action="set", cpu=0.1), acted(2.0, action="pause")])
    assert tally.devices["pi-1"].cpu == 0.1
    assert tally.devices["pi-1"].activity.now(3.0) == "paused"
    tally.add(acted(3.0, action="resume"))
    assert tally.devices["pi-1"].activity.now(4.0) == "train"
    tally.add(acted(4.0, action="disconnect"))
    assert tally.devices["pi-1"].activity.now(5.0) == "offline"
    tally.add(acted(5.0, action="reconnect"))
    assert tally.devices["pi-1"].activity.now(6.5) == "train"
    tally.add(acted(7.0, action="crash"))
    assert tally.devices["pi-1"].activity.now(8.0) == "offline"
    assert tally.devices["pi-3"].activity.now(8.0) == "offline"  # it never came


def test_telemetry_shows_whether_a_device_trains() -> None:
    tally = tallied([STARTED])
    for at in range(5):
        tally.sample("pi-1", float(at), {"cpu": 0.25 * at})
        tally.sample("pi-2", float(at), {"cpu": 0.1 * at})  # of 0.25
        tally.sample("stranger", float(at), {"cpu": 0.1 * at})
    assert tally.devices["pi-1"].activity.now(4.0) == "train"
    assert tally.devices["pi-2"].activity.now(4.0) == "wait"
    assert tally.devices["pi-2"].usage.share(4.0) == pytest.approx(0.1)


def test_update_rate_covers_the_last_ten_seconds() -> None:
    tally = tallied([STARTED, *(update("pi-1", float(at)) for at in range(1, 6))])
    assert tally.rate(at=5.0) == 1.0
    assert tally.rate(at=13.0) == 0.3  # those of 3, 4 and 5 s
    assert tallied([STARTED]).rate(at=0.0) == 0.0
    resumed = tallied([events.RunStarted(60.0, 1.7e9, ("pi-1",), ()), update("pi-1", 61.0)])
    assert resumed.rate(at=62.0) == 0.5


def test_only_changes_of_presence_are_announced() -> None:
    tally = tallied([STARTED])
    news = [
        tally.add(events.ClientStatus(at, "pi-1", state))
        for at, state in enumerate(["ready", "offline", "offline", "joining", "ready"])
    ]
    assert news == [None, Notice(1, "offline", "pi-1"), None, None, Notice(4, "online", "pi-1")]


def test_notices_of_one_kind_or_with_one_reason_share_a_line() -> None:
    gone = [Notice(3.0 + k, "offline", f"pi-{k}") for k in range(8)]
    assert merge_notices([gone[0], Notice(3.5, "note", "hot"), *gone[1:]]) == [
        Notice(3.0, "offline", "pi-0, pi-1, pi-2, pi-3, pi-4, pi-5 and 2 more"),
        Notice(3.5, "note", "hot"),
    ]
    reasons = [("a", "late"), ("b", "not finite"), ("a", "not finite"), ("b", "not finite")]
    rejected = [Notice(1.0, "update rejected", client, why) for client, why in reasons]
    assert merge_notices(rejected) == [Notice(1.0, "update rejected", "a (late), b, a (not finite)")]


def test_output_without_a_terminal_has_evaluations_and_the_end() -> None:
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
        "     0.0 s  absent at the start: pi-3",
        "     0.0 s  version     0  accuracy 10.0%  loss 2.302  updates     0    0.0/s",
        "     4.0 s  version     1  accuracy 90.5%  loss 0.512  updates     1    0.2/s",
        "     4.5 s  version     2  accuracy 91.0%  loss 0.500  updates     2    0.2/s",
        "     5.0 s  ended: time is up",
    ]


def test_virtual_run_prints_a_line_per_host_second_and_per_tenth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = 1000.0
    monkeypatch.setattr("testbed.watching.live.time.monotonic", lambda: seconds)
    screen = Shown(devices=1, after=100.0, runtime="virtual")
    view = screen.view
    view.record(events.RunStarted(0.0, 1.7e9, ("pi-1",), ()))
    for at in range(35):  # at once
        view.record(events.Evaluated(float(at), at, 2.0, 0.2))
    seconds += 1.0
    view.record(events.Evaluated(35.0, 35, 2.0, 0.2))
    view.record(events.Evaluated(36.0, 36, 2.0, 0.2))
    view.record(events.RunEnded(37.0, "after", 36, 0))
    first = [line.split()[0] for line in screen.lines]
    assert first == ["0.0", "10.0", "20.0", "30.0", "35.0", "36.0", "37.0"]


def test_notices_are_collected_for_a_second() -> None:
    screen = Shown(devices=2)
    view = screen.view
    view.progress("[/bold] " + 100 * "x")
    assert screen.lines == ["[/bold] " + 100 * "x"], "messages are printed without markup"
    view.record(events.RunStarted(0.0, 1.7e9, ("pi-1", "pi-2"), ()))
    view.record(events.ClientStatus(3.0, "pi-1", "offline"))
    view.refresh(now=1000.0)
    view.record(events.ClientStatus(3.2, "pi-2", "offline"))
    view.refresh(now=1000.9)
    assert len(screen.lines) == 1
    view.refresh(now=1001.0)
    assert screen.lines[1].strip() == "3.0 s  offline: pi-1, pi-2"


def test_summary_shows_pauses_and_absence_if_any(directory: Path) -> None:
    run = with_records(
        directory,
        events.Acted(7.5, "slow", "scenario", 0.0, {"action": "pause"}),
        events.RoundUnfinished(10.0, "mute", 0, 0.0, 10.0),
    )
    screen = Shown(width=100)
    screen.console.print(live.render_summary(run))
    lines = screen.lines
    assert lines[1].endswith("staleness busy transfer idle paused")  # nobody was offline
    assert lines[3].endswith("60%      15%   0%    25%")
    assert lines[4].endswith("100%       0%   0%     0%")


def test_summary_shows_each_devices_work_and_the_accuracy(directory: Path) -> None:
    screen = Shown()
    screen.console.print(live.render_summary(load(directory)))
    lines = screen.lines
    assert lines[1:5] == [
        "device profile          updates share staleness busy transfer idle",
        "fast   0.5 cpu, 512 MiB       2   67%       0.0  20%      20%  60%",
        "slow   0.1 cpu, 512 MiB       1   33%       2.0  60%      20%  20%",
        "mute   0.1 cpu, 256 MiB       0    0%         –   0%       0% 100%",
    ]
    assert lines[6:] == [
        "fedbuff: accuracy 80.0% (best 85.0%), loss 1.1",
        "3 updates in 3 versions, 10.0 s (time is up)",
    ]
