"""Devices that are restarted and do not come back."""

from __future__ import annotations

from agents import events
from agents.device_actions import (
    Action,
    Crash,
    Join,
    Leave,
    Pause,
    PowerOff,
    PowerOn,
    Restart,
    to_json,
)
from testbed.run.scenario_player import AwaitedDevices


def acted(device: str, action: Action) -> events.Acted:
    return events.Acted(1.0, device, "scenario", 0.0, to_json(action))


def returning(*records: events.Record) -> AwaitedDevices:
    found = AwaitedDevices(timeout_s=10.0)
    for record in [events.RunStarted(0.0, 0.0, ("pi", "nano"), ("late",)), *records]:
        found.record(record, 100.0)
    return found


def test_device_that_does_not_return_is_reported_once() -> None:
    found = returning(acted("pi", Crash()), acted("pi", Restart()), acted("late", Join()))
    assert list(found.overdue(109.0)) == []
    assert list(found.overdue(110.0)) == [
        "pi did not come back within 10 s of its start",
        "late did not come back within 10 s of its start",
    ]
    assert list(found.overdue(200.0)) == []


def test_device_that_returns_is_not_reported() -> None:
    offline, ready = events.ClientStatus(2.0, "pi", "offline"), events.ClientStatus(3.0, "pi", "ready")
    found = returning(acted("pi", Crash()), acted("pi", Restart()), offline, ready)
    assert list(found.overdue(200.0)) == []
    found = returning(offline, acted("pi", Restart()))
    assert list(found.overdue(200.0)) != []


def test_present_or_ended_device_is_not_awaited() -> None:
    assert list(returning(acted("pi", Join()), acted("pi", Restart())).overdue(200.0)) == []
    again = returning(acted("pi", Crash()), acted("pi", Restart()), acted("pi", Pause()))
    assert list(again.overdue(200.0)) != []
    gone = returning(acted("pi", Leave()), acted("pi", Join()), acted("pi", Leave()))
    assert list(gone.overdue(200.0)) == []


def test_device_without_power_is_awaited_from_its_return() -> None:
    off = [acted("pi", Crash()), acted("pi", PowerOff()), acted("pi", Restart())]
    assert list(returning(*off).overdue(200.0)) == []
    assert list(returning(*off, acted("pi", PowerOn())).overdue(200.0)) != []
    crashed = [acted("pi", PowerOff()), acted("pi", Crash()), acted("pi", PowerOn())]
    assert list(returning(*crashed).overdue(200.0)) == []
