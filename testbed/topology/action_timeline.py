"""The timeline of a run: scenario, heat, churn and availability as steps, each with its time and device.

Pure. What the actions mean is in `agents.device_actions`. The actions about one hold alternate: overlaps
(a pause within a pause, churn of a device that the scenario has crashed) are merged, so that a device is
down, frozen or cut off for as long as there is any cause. A device that is not there gets `SetCpu` and
`SetLink` only; what freezes it or cuts it off when it joins follows at the same time, and earlier
crashes do not matter any more.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, assert_never

from agents.device_actions import (
    BY_NAME,
    Action,
    Crash,
    Disconnect,
    Hold,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetCpu,
    SetLink,
    Switching,
    hold_of,
)
from agents.timing import durations
from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.topology import seeds
from testbed.topology.availability import Availability
from testbed.topology.devices import DeviceGroup
from testbed.topology.fields import Thermal
from testbed.topology.scenario import Churn, Entry, absent, devices_by_name, expand, movements


@dataclass(frozen=True, slots=True)
class Step:
    at: Nanoseconds
    """Device time since the run clock started."""
    device: str
    action: Action


@dataclass(frozen=True, slots=True)
class Heat:
    """A device that loses CPU share by heat."""

    cpu: float
    """Share of a core as the run begins."""
    thermal: Thermal


class _Due(NamedTuple):
    step: Step
    cause: object = None
    """The same for a step that begins something and the one that ends it; None where nothing ends it."""


_ENDED_BY: Mapping[Switching, Switching] = {
    Crash(): Restart(),
    Pause(): Resume(),
    Disconnect(): Reconnect(),
}


def timeline(
    scenario: Sequence[Entry],
    churn: Churn | None,
    groups: Sequence[DeviceGroup],
    seed: int,
    horizon: Nanoseconds | None = None,
    heat: Mapping[str, Heat] = MappingProxyType({}),
) -> Iterator[Step]:
    """All steps in the order of their time, those before `horizon` where it is given. `heat` has the
    devices that lose CPU share by heat.

    At one time: those of the file in its order, then heat's, churn's and availability's, each in the
    order of the devices. Lazy, and without end under churn: its memory grows with the devices and the
    file, not with time. The same arguments give the same steps.
    """
    by_name = devices_by_name(groups)
    ends = _ends(scenario, by_name)
    scripted = _scripted(scenario, by_name)
    streams: list[Iterable[_Due]] = [scripted, _heated(scripted, heat)]
    for device, drawn in _drawn(churn, groups, by_name, seed):
        # Later steps of a device that is away for good would be dropped, one by one, without end.
        streams.append(_before(ends.get(device), drawn))
    merged = heapq.merge(*streams, key=_time)
    return _effective(_before(horizon, merged), absent(scenario, groups))


def _time(due: _Due) -> Nanoseconds:
    return due.step.at


def _before(end: Nanoseconds | None, dues: Iterator[_Due]) -> Iterator[_Due]:
    return dues if end is None else itertools.takewhile(lambda due: due.step.at < end, dues)


def _ends(scenario: Iterable[Entry], by_name: Mapping[str, tuple[str, ...]]) -> dict[str, Nanoseconds]:
    """Since when a device is away, for those that do not come back."""
    last = {device: entries[-1] for device, entries in movements(scenario, by_name).items()}
    return {device: from_seconds(entry.at) for device, entry in last.items() if entry.verb != "join"}


def _scripted(scenario: Iterable[Entry], by_name: Mapping[str, tuple[str, ...]]) -> list[_Due]:
    dues: list[_Due] = []
    for entry in scenario:
        at = from_seconds(entry.at)
        for device in expand(entry.targets, by_name):
            if entry.cpu is not None:
                dues.append(_Due(Step(at, device, SetCpu(entry.cpu))))
            if entry.link is not None:
                dues.append(_Due(Step(at, device, SetLink(entry.link.changes))))
            if entry.duration is not None:
                dues += _span(at, from_seconds(entry.duration), device, BY_NAME[entry.verb])
            elif entry.verb != "set":
                dues.append(_Due(Step(at, device, BY_NAME[entry.verb])))
    return sorted(dues, key=_time)  # stable: the order of the file


def _heated(scripted: Iterable[_Due], heat: Mapping[str, Heat]) -> list[_Due]:
    """What heat leaves of the share that a device has by then; what is set later stands as it is."""
    cpu = {device: one.cpu for device, one in heat.items()}
    at = {device: from_seconds(one.thermal.after) for device, one in heat.items()}
    for step, _ in scripted if heat else ():
        if step.device in heat and step.at <= at[step.device] and isinstance(step.action, SetCpu):
            cpu[step.device] = step.action.cpu
    dues = [
        _Due(Step(at[device], device, SetCpu(cpu[device] * one.thermal.to)))
        for device, one in heat.items()
    ]
    return sorted(dues, key=_time)


def _span(at: Nanoseconds, duration: Nanoseconds, device: str, begin: Switching) -> tuple[_Due, _Due]:
    cause = object()
    return (
        _Due(Step(at, device, begin), cause),
        _Due(Step(at + duration, device, _ENDED_BY[begin]), cause),
    )


def _drawn(
    churn: Churn | None, groups: Sequence[DeviceGroup], by_name: Mapping[str, tuple[str, ...]], seed: int
) -> Iterator[tuple[str, Iterator[_Due]]]:
    """What is drawn for each device: its churn, then its availability."""
    if churn is not None:
        named = by_name if churn.devices is None else churn.devices
        churned = frozenset(expand(named, by_name))
        for device in (device for group in groups for device in group.device_names):
            if device in churned:
                yield device, _churn(churn, seed, device)
    for group in groups:
        if group.availability is not None:
            for device in group.device_names:
                yield device, _availability(group.availability, seed, device)


def _churn(churn: Churn, seed: int, device: str) -> Iterator[_Due]:
    # One generator each, so that to change the downtime leaves the times between crashes alone.
    between = seeds.generator(seed, device, "churn")
    downtime = durations.sampler(churn.downtime.plain(), seeds.generator(seed, device, "downtime"))
    at: Nanoseconds = 0
    while True:
        at += from_seconds(between.exponential(1 / churn.rate))
        down = from_seconds(downtime())
        yield from _span(at, down, device, Crash())
        at += down


def _availability(availability: Availability, seed: int, device: str) -> Iterator[_Due]:
    cause = object()  # one suffices: it is not off twice at a time
    for at, is_on in availability.changes(seed, device):
        yield _Due(Step(at, device, Reconnect() if is_on else Disconnect()), cause)


def _effective(dues: Iterable[_Due], absent: Iterable[str]) -> Iterator[Step]:
    """The steps that make a difference: overlaps merged, and none for a device that is not there."""
    gone = set(absent)
    held: defaultdict[tuple[str, Hold], set[object]] = defaultdict(set)
    for step, cause in dues:
        device, action = step.device, step.action
        match action:
            case SetCpu() | SetLink():
                yield step
            case Join():
                if device in gone:
                    gone.remove(device)
                    yield step
                    for begin in (Pause(), Disconnect()):
                        if held[device, hold_of(begin)]:
                            yield Step(step.at, device, begin)
            case Leave():
                if device not in gone:
                    gone.add(device)
                    held.pop((device, "down"), None)
                    yield step
            case Crash() if cause is None:
                if device not in gone:
                    gone.add(device)
                    if not held.pop((device, "down"), None):
                        yield step
            case Crash() if device in gone:
                pass
            case Crash() | Pause() | Disconnect():
                causes = held[device, hold_of(action)]
                causes.add(cause)
                if len(causes) == 1 and device not in gone:
                    yield step
            case Restart() | Resume() | Reconnect():
                causes = held[device, hold_of(action)]
                if cause in causes:  # else of a crash before the device was gone
                    causes.remove(cause)
                    if not causes and device not in gone:
                        yield step
            case _:
                assert_never(action)
