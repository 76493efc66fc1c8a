"""Running totals of a run's records. The module uses neither the clock nor the screen."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from math import isnan, nan
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from agents import events
from agents.device_actions import DeviceState, Switching, holds
from agents.texts import name_list
from analysis.activity import MIN_BUSY_SHARE, Activity
from analysis.features import PARTS
from analysis.part import Facts, FeatureTally, Notice, known_number

T = TypeVar("T")

_WINDOW_SECONDS = 5.0
"""Window for rates, which fluctuate too much over shorter ones."""
_MAX_AGE_SECONDS = 3.0
"""If the newest sample is older, the present figures are unknown."""


class _TimedFigures(NamedTuple):
    at: float
    """Device time in seconds."""
    cpu: float
    """CPU seconds since the start of the device."""
    sent: float
    """Bytes since the start of the device; NaN if they are not counted."""
    received: float
    """Bytes since the start of the device; NaN if they are not counted."""
    memory: float
    """Bytes in use; NaN if unknown."""


@dataclass(slots=True)
class DeviceUsage:
    """The latest samples of a device, and the figures computed from them."""

    totals: Counter[str] = field(default_factory=Counter)
    """CPU seconds `cpu` and bytes `sent` and `received`. They go on where a device restarts, which
    counts from 0 again. What is not counted is left out."""
    latest: float = nan
    """Share of a core used between the last two samples; NaN if there are fewer than two samples."""
    _counters: dict[str, float] = field(default_factory=dict)
    """Last known value of each counter."""
    _samples: deque[_TimedFigures] = field(default_factory=deque)

    def add(self, at: float, values: Mapping[str, Any]) -> None:
        """Add a sample (`agents.device.control_group`). Devices may send anything: one without valid
        CPU time is ignored."""
        figures = (known_number(values.get(name)) for name in ("cpu", "sent", "received", "memory"))
        sample = _TimedFigures(at, *figures)
        last = self._samples[-1] if self._samples else None
        if not sample.cpu >= 0 or (last is not None and at <= last.at):
            return
        before_cpu = self.totals["cpu"]
        for name in ("cpu", "sent", "received"):
            if (now := getattr(sample, name)) >= 0:
                before = self._counters.get(name, 0.0)
                self.totals[name] += now - before if now >= before else now
                self._counters[name] = now
        if last is not None:
            self.latest = (self.totals["cpu"] - before_cpu) / (at - last.at)
        if last is not None and (
            sample.cpu < last.cpu or sample.sent < last.sent or sample.received < last.received
        ):
            self._samples.clear()  # the device was restarted
        self._samples.append(sample)
        while self._samples[0].at < at - _WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def last_memory(self) -> float:
        """Memory in use at the last sample, in bytes; NaN if unknown."""
        return self._samples[-1].memory if self._samples else nan

    def share(self, at: float) -> float:
        """Share of a core over the last seconds before `at`; NaN if unknown."""
        return self._rate("cpu", at)

    def memory(self, at: float) -> float:
        """Bytes at `at`; NaN if unknown."""
        fresh = bool(self._samples) and self._samples[-1].at >= at - _MAX_AGE_SECONDS
        return self.last_memory if fresh else nan

    def up(self, at: float) -> float:
        """bit/s over the last seconds before `at`; NaN if unknown."""
        return 8 * self._rate("sent", at)

    def down(self, at: float) -> float:
        """bit/s over the last seconds before `at`; NaN if unknown."""
        return 8 * self._rate("received", at)

    def _rate(self, counter: Literal["cpu", "sent", "received"], at: float) -> float:
        """Growth per second between the first and the last kept sample; NaN if there are fewer than two,
        or if the last is too old."""
        if len(self._samples) < 2 or self._samples[-1].at < at - _MAX_AGE_SECONDS:
            return nan
        first, last = self._samples[0], self._samples[-1]
        grown: float = getattr(last, counter) - getattr(first, counter)
        return grown / (last.at - first.at)


_RATE_WINDOW_SECONDS = 10.0
"""Seconds of device time."""
_MAX_NAMED = 6
"""Maximum number of devices named in a notice."""
_MAX_REASONS = 1000
"""Maximum number of pairs of client and reason in `Tally.rejections`: reasons may quote texts from
devices."""


@dataclass(slots=True)
class _Details:
    changed: DeviceState = field(default_factory=DeviceState)
    activity: Activity = field(default_factory=Activity)
    usage: DeviceUsage = field(default_factory=DeviceUsage)
    parts: dict[type[Any], Any] = field(default_factory=dict)


@dataclass(slots=True)
class DeviceTally:
    """Most devices of a very large fleet only wait, so their details are made when they are first
    needed."""

    state: str = "absent"
    """`online`, `offline` or `absent`: not ready when the run clock started."""
    updates: int = 0
    staleness: int = 0
    """Versions, of the last update."""
    staleness_sum: int = 0
    """Sum of the staleness of all updates, in versions."""
    bytes: int = 0
    """Payload of all updates."""
    importance: float = math.nan
    """Weight p_i in the objective; NaN before the data are partitioned."""
    planned_cpu: float | None = None
    """Share of a core at the start; None if there is no limit."""
    _since: float | None = None
    """Device time since which it is present; None if it is not, or if it has details."""
    _details: _Details | None = None

    @property
    def has_details(self) -> bool:
        return self._details is not None

    @property
    def _known(self) -> _Details:
        if self._details is None:
            self._details = _Details()
            if self._since is not None:
                self._details.activity.begin(self._since)
        return self._details

    @property
    def activity(self) -> Activity:
        return self._known.activity

    @property
    def usage(self) -> DeviceUsage:
        return self._known.usage

    def part(self, kind: type[T]) -> T:
        """State of a feature; of one that has not changed yet, a new one."""
        parts: dict[type[T], T] = self._known.parts
        return parts[kind] if kind in parts else parts.setdefault(kind, kind())

    @property
    def changed(self) -> DeviceState:
        return self._known.changed

    @changed.setter
    def changed(self, state: DeviceState) -> None:
        self._known.changed = state

    @property
    def cpu(self) -> float | None:
        """Present share of a core; None if there is no limit."""
        changed = None if self._details is None else self._details.changed.cpu
        return self.planned_cpu if changed is None else changed

    def begin(self, at: float) -> None:
        self.state = "online"
        if self._details is None and self._since is None:
            self._since = at
        else:
            self.activity.begin(at)


@dataclass(slots=True)
class Tally:
    devices: dict[str, DeviceTally]
    """Totals of the devices by name, in display order."""
    facts: InitVar[Facts] = MappingProxyType({})
    """Content of the manifest; empty if it is not known."""
    started: bool = False
    at: float = 0.0
    """Device time of the newest record, in seconds."""
    version: int = 0
    updates: int = 0
    bytes: int = 0
    """Payload of all applied updates."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of applied updates by staleness in versions."""
    staleness_sum: int = 0
    rejected: int = 0
    rejections: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of rejected updates by client and reason; the reason of further ones is `other`."""
    evaluation: events.Evaluated | None = None
    ended: events.RunEnded | None = None
    doubtful: list[events.Note | events.Disrupted | events.WrongSum] = field(default_factory=list)
    """Notes, and records that make the run invalid."""
    _began: float = 0.0
    """Device time of the latest start of the run clock, in seconds."""
    _applied: deque[float] = field(default_factory=deque)
    """Device times of recent updates, in seconds."""
    _updates_by_version: dict[int, int] = field(default_factory=dict)
    """Updates applied up to each version, from the last evaluated one on."""
    parts: tuple[FeatureTally, ...] = field(init=False)
    """State of the features."""
    _takers: dict[type[events.Record], list[FeatureTally]] = field(init=False)
    """Parts by kind of record that they receive."""

    def __post_init__(self, facts: Facts) -> None:
        self.parts = tuple(part.tally(facts) for part in PARTS if part.tally is not None)
        self._takers = {}
        for part in self.parts:
            for kind in part.takes:
                self._takers.setdefault(kind, []).append(part)

    def add(self, record: events.Record) -> Notice | None:
        """None if the user need not see the record."""
        notice = self._count(record)
        for part in self._takers.get(type(record), ()):
            notice = part.add(record, self) or notice
        return notice

    def _count(self, record: events.Record) -> Notice | None:
        self.at = max(self.at, record.at)
        if isinstance(record, events.Note | events.Disrupted | events.WrongSum):
            self.doubtful.append(record)
        match record:
            case events.RunStarted():
                return self._start(record)
            case events.ClientStatus():
                return self._change(record)
            case events.UpdateApplied():
                device = self.device(record.client)
                device.updates += 1
                device.staleness = record.staleness
                device.staleness_sum += record.staleness
                device.bytes += record.bytes
                device.activity.add_update(record)
                self.updates += 1
                self.bytes += record.bytes
                self.staleness[record.staleness] += 1
                self.staleness_sum += record.staleness
                self._applied.append(record.applied)
            case events.UpdateRejected(at, client, reason):
                self.rejected += 1
                known = (client, reason) in self.rejections or len(self.rejections) < _MAX_REASONS
                self.rejections[client, reason if known else "other"] += 1
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
        """`at`: device time. Samples of use of unknown devices are ignored."""
        tally = self.devices.get(device)
        for part in self.parts:
            if part.key and part.key in values:
                part.sample(tally, at, values)
                return
        if tally is None:
            return
        tally.usage.add(at, values)
        share = tally.usage.latest
        if not isnan(share):
            tally.activity.used_cpu(at, busy=share >= MIN_BUSY_SHARE * (tally.cpu or 1.0))

    def rate(self, at: float) -> float:
        """Updates per second, over the ten seconds before `at`, or since the run clock started."""
        while self._applied and self._applied[0] < at - _RATE_WINDOW_SECONDS:
            self._applied.popleft()
        later = 0  # an evaluation may be recorded after later updates
        for applied in reversed(self._applied):
            if applied <= at:
                break
            later += 1
        since = max(self._began, at - _RATE_WINDOW_SECONDS)
        return (len(self._applied) - later) / (at - since) if at > since else 0.0

    def updates_in(self, version: int) -> int:
        """Updates applied up to `version`, which is the last evaluated one or later."""
        return self._updates_by_version.get(version, self.updates if version else 0)

    def device(self, name: str) -> DeviceTally:
        found = self.devices.get(name)
        if found is None:
            found = self.devices[name] = DeviceTally()
        return found

    def _start(self, record: events.RunStarted) -> Notice | None:
        changed = (device for device in self.devices.values() if device.has_details)
        for device in changed:  # also in a resumed run, devices start as planned
            device.changed = DeviceState()
            device.activity.release("frozen", record.at)
            device.activity.release("cut off", record.at)
            device.activity.release("unpowered", record.at)
        self.started, self._began = True, record.at  # above 0 in a resumed run, whose clock continues
        self.ended = None
        for client in record.clients:
            self.device(client).begin(record.at)
        for client in record.missing:
            self.device(client).state = "absent"
            self.device(client).activity.hold("down", record.at)
        missing = ", ".join(record.missing)
        return Notice(record.at, "absent at the start", missing) if missing else None

    def _change(self, record: events.ClientStatus) -> Notice | None:
        state = {"ready": "online", "offline": "offline"}.get(record.state)
        device = self.device(record.client)
        if state is None or state == device.state:
            return None
        if state == "offline":
            device.state = state
            device.activity.hold("down", record.at)
        else:
            device.begin(record.at)
        return Notice(record.at, state, record.client)

    def _act(self, record: events.Acted) -> None:
        """The name may also be that of something else in the network."""
        device, action = self.devices.get(record.device), record.action
        if device is None or action is None:
            return
        device.changed = device.changed.with_action(action)
        if not isinstance(action, Switching):
            return
        for hold, begins in holds(action).items():
            if begins:
                device.activity.hold(hold, record.at)
            elif hold != "down":  # the device itself reports when it is ready
                device.activity.release(hold, record.at)


def merge_notices(notices: Iterable[Notice]) -> Sequence[Notice]:
    """One per kind, with the time of its first notice, and each reason once."""
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
