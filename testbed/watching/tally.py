"""Running totals of a run's records. Pure: no clock, no screen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

from agents import events
from agents.device_actions import DeviceState, SetCpu, SetLink, holds
from testbed.errors import name_list
from testbed.watching.activity import Activity
from testbed.watching.usage import Usage

_RATE_WINDOW_SECONDS = 10.0
"""Seconds of device time that the rate of updates is taken over."""
_MIN_BUSY_SHARE = 0.5
"""Of its share: a device that uses as much of it trains. Transfers use little."""
_MAX_NAMED = 6
"""A notice that many devices share names this many of them."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth a line of its own; notices of the same `what` can share one."""

    at: float
    what: str
    detail: str
    why: str = ""


@dataclass(slots=True)
class DeviceTally:
    """Totals of one device."""

    state: str = "absent"
    """`online`, `offline`, or `absent`: not ready when the run clock started."""
    updates: int = 0
    staleness: int = 0
    """Of the last update, in versions."""
    staleness_sum: int = 0
    """Of all updates."""
    planned_cpu: float | None = None
    """Share of a core requested at the start."""
    changed: DeviceState = field(default_factory=DeviceState)
    """State that actions have put it in."""
    activity: Activity = field(default_factory=Activity)
    usage: Usage = field(default_factory=Usage)

    @property
    def cpu(self) -> float | None:
        """Share of a core requested now."""
        return self.planned_cpu if self.changed.cpu is None else self.changed.cpu


@dataclass(slots=True)
class Tally:
    devices: dict[str, DeviceTally]
    """By name, in the order to show them in."""
    started: bool = False
    at: float = 0.0
    """Device time of the newest record, in seconds."""
    version: int = 0
    updates: int = 0
    rejected: int = 0
    evaluation: events.Evaluated | None = None
    """The newest."""
    ended: events.RunEnded | None = None
    _began: float = 0.0
    _applied: deque[float] = field(default_factory=deque)
    _updates_by_version: dict[int, int] = field(default_factory=dict)
    """Updates in each version, from the last one evaluated on."""

    def take(self, record: events.Record) -> Notice | None:
        """Count `record`; returns a notice where it deserves a line of its own."""
        self.at = max(self.at, record.at)
        match record:
            case events.RunStarted():
                return self._start(record)
            case events.ClientStatus():
                return self._change(record)
            case events.UpdateApplied():
                device = self._device(record.client)
                device.updates += 1
                device.staleness = record.staleness
                device.staleness_sum += record.staleness
                device.activity.updated(record)
                self.updates += 1
                self._applied.append(record.applied)
            case events.UpdateRejected(at, client, reason):
                self.rejected += 1
                return Notice(at, "update rejected", client, reason)
            case events.VersionMade():
                self.version = record.version
                self._updates_by_version[record.version] = self.updates
            case events.Evaluated():
                self.evaluation = record
                while (first := next(iter(self._updates_by_version), record.version)) < record.version:
                    del self._updates_by_version[first]
                self.version = max(self.version, record.version)  # the first one, of a resumed run
            case events.Disrupted(at, since, reason):
                return Notice(at, "disrupted", f"{reason} from {since:.1f} s on")
            case events.Note(at, message):
                return Notice(at, "note", message)
            case events.Acted():
                self._act(record)
            case events.RunEnded():
                self.ended = record
        return None

    def sample(self, device: str, at: float, values: Mapping[str, Any]) -> None:
        """Take in a telemetry sample of `device`, at device time `at`, in units of device time."""
        found = self.devices.get(device)
        if found is None:
            return
        found.usage.take(at, values)
        share = found.usage.latest
        if not isnan(share):
            found.activity.used_cpu(at, busy=share >= _MIN_BUSY_SHARE * (found.cpu or 1.0))

    def rate(self, at: float) -> float:
        """Updates applied per second, over the last ten seconds before `at`, or since the start."""
        while self._applied and self._applied[0] < at - _RATE_WINDOW_SECONDS:
            self._applied.popleft()
        later = 0  # an evaluation may be told of when the run has gone on
        for applied in reversed(self._applied):
            if applied <= at:
                break
            later += 1
        since = max(self._began, at - _RATE_WINDOW_SECONDS)
        return (len(self._applied) - later) / (at - since) if at > since else 0.0

    def updates_in(self, version: int) -> int:
        """Number of updates in `version`, the last one evaluated or a later one."""
        return self._updates_by_version.get(version, self.updates if version else 0)

    def _device(self, name: str) -> DeviceTally:
        found = self.devices.get(name)
        if found is None:
            found = self.devices[name] = DeviceTally()
        return found

    def _start(self, record: events.RunStarted) -> Notice | None:
        for device in self.devices.values():  # those of a resumed run begin as they were planned
            device.changed = DeviceState()
            device.activity.release("frozen", record.at)
            device.activity.release("cut off", record.at)
        self.started, self._began = True, record.at  # a resumed run's clock goes on
        self.ended = None
        for client in record.clients:
            device = self._device(client)
            device.state = "online"
            device.activity.begin(record.at)
        for client in record.missing:
            self._device(client).activity.hold("down", record.at)
        missing = ", ".join(record.missing)
        return Notice(record.at, "not there at the start", missing) if missing else None

    def _change(self, record: events.ClientStatus) -> Notice | None:
        state = {"ready": "online", "offline": "offline"}.get(record.state)
        device = self._device(record.client)
        if state is None or state == device.state:
            return None
        device.state = state
        if state == "offline":
            device.activity.hold("down", record.at)
        else:
            device.activity.begin(record.at)
        return Notice(record.at, state, record.client)

    def _act(self, record: events.Acted) -> None:
        device, action = self._device(record.device), record.action
        if action is None:
            return
        device.changed = device.changed.with_action(action)
        if isinstance(action, SetCpu | SetLink):
            return
        for hold, begins in holds(action).items():
            if begins:
                device.activity.hold(hold, record.at)
            elif hold != "down":  # it reports itself when it is ready
                device.activity.release(hold, record.at)


def merged(notices: Iterable[Notice]) -> Sequence[Notice]:
    """One notice for all of the same kind, at the time of the first; in it reasons stand once."""
    kinds: dict[str, list[Notice]] = {}
    for notice in notices:
        kinds.setdefault(notice.what, []).append(notice)
    return [
        Notice(same[0].at, what, name_list(_details(same), _MAX_NAMED)) for what, same in kinds.items()
    ]


def _details(notices: Iterable[Notice]) -> list[str]:
    reasons: dict[str, dict[str, None]] = {}
    for notice in notices:
        reasons.setdefault(notice.why, {})[notice.detail] = None
    plain = list(reasons.pop("", ()))
    return plain + [f"{name_list(list(who), _MAX_NAMED)} ({why})" for why, who in reasons.items()]
