"""Devices that must be ready again after a restart, or ready after a join. The module checks whether
these devices are ready in time."""

from __future__ import annotations

from collections.abc import Iterator

from agents import events
from agents.device_actions import Crash, Join, Leave, PowerOff, PowerOn, Restart


class AwaitedDevices:
    """Deadlines come from the records of a run. All times are in seconds and must come from the same
    clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._present: set[str] = set()
        self._down: set[str] = set()
        """Devices that a crash or a leave has ended."""
        self._unpowered: set[str] = set()
        self._deadlines: dict[str, float] = {}

    def record(self, record: events.Record, now: float) -> None:
        match record:
            case events.RunStarted():
                self._present |= set(record.clients)
            case events.ClientStatus(client=device, state="ready"):
                self._present.add(device)
                self._deadlines.pop(device, None)
            case events.ClientStatus():
                self._present.discard(record.client)
            case events.Acted():
                self._record_action(record, now)

    def _record_action(self, record: events.Acted, now: float) -> None:
        device = record.device
        match record.action:
            case Crash() | Leave():
                self._down.add(device)
            case Restart() | Join():
                self._down.discard(device)
            case PowerOff():
                self._unpowered.add(device)
            case PowerOn():
                self._unpowered.discard(device)
            case _:
                return
        if device in self._down or device in self._unpowered:
            self._present.discard(device)
            self._deadlines.pop(device, None)
        elif device not in self._present:
            self._deadlines[device] = now + self._timeout_s

    def overdue(self, now: float) -> Iterator[str]:
        """Yield sentences. No device is reported twice."""
        late = [device for device, deadline in self._deadlines.items() if deadline <= now]
        for device in late:
            del self._deadlines[device]
            yield f"{device} did not come back within {self._timeout_s:g} s of its start"
