"""The timeline of a run: scenario, heat, churn and availability as steps with a time and a device.

The module uses no clock and no I/O. `agents.device_actions` defines the actions.

Overlapping causes are merged, such as a pause within a pause, or churn of a device that the scenario has
crashed. A device is down, paused or disconnected as long as at least one cause lasts. The actions that
begin and end this state alternate.

Until it joins, an absent device gets only actions that last over absence, such as `SetCpu` and
`SetLink`. If the device joins during a pause or disconnection, the pause or disconnection begins at the
same time. The earlier crashes of a device that joins no longer count.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, assert_never

from agents import random_generators
from agents.device_actions import (
    BY_NAME,
    Action,
    Crash,
    Disconnect,
    Hold,
    Join,
    Leave,
    Pause,
    PowerOff,
    PowerOn,
    Reconnect,
    Restart,
    Resume,
    SetBackground,
    SetCpu,
    SetLink,
    Switching,
    hold_of,
)
from agents.energy.messages import Charge, SetBattery, Unplug
from agents.fields import FeatureAction
from agents.timing import durations
from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.topology.devices import DeviceGroup
from testbed.topology.fields import Thermal
from testbed.topology.links import Availability
from testbed.topology.scenario import (
    Churn,
    ScenarioEntry,
    absent_at_start,
    devices_by_group,
    expand,
    movements,
)


@dataclass(frozen=True, slots=True)
class Step:
    at: Nanoseconds
    """Device time, counted from the start of the run clock."""
    device: str
    action: Action


@dataclass(frozen=True, slots=True)
class Heat:
    cpu: float
    """At the start of the run; 1 is one host core."""
    thermal: Thermal


class _CausedStep(NamedTuple):
    step: Step
    cause: object = None
    """Object that identifies a span, such as the time from a crash to the restart. The steps that begin
    and end the span have the same object. None if the step belongs to no span."""


_ENDED_BY: Mapping[Switching, Switching] = {
    Crash(): Restart(),
    Pause(): Resume(),
    Disconnect(): Reconnect(),
}


def timeline(
    scenario: Sequence[ScenarioEntry],
    churn: Churn | None,
    groups: Sequence[DeviceGroup],
    seed: int,
    horizon: Nanoseconds | None = None,
    heat: Mapping[str, Heat] = MappingProxyType({}),
) -> Iterator[Step]:
    """Yield all steps in the order of time.

    `horizon`: yield only the steps before this time. `heat`: by device.

    Steps of the same time are sorted: first scenario entries in the order of the file, then heat, the
    groups' own actions, churn and availability, each in device order. The iterator is lazy, and endless
    under churn. The iterator's memory grows with the number of devices and the size of the file, not
    with time. The same arguments give the same steps.
    """
    by_group = devices_by_group(groups)
    ends = _ends(scenario, by_group)
    scripted = _scenario_steps(scenario, by_group)
    streams: list[Iterable[_CausedStep]] = [scripted, _heat_steps(scripted, heat)]
    streams += [
        _listed_steps(group.actions, device)
        for group in groups
        if group.actions
        for device in group.device_names
    ]
    for device, drawn in _random_steps(churn, groups, by_group, seed):
        # No random steps after a device has left for good: dropping them one by one would never end.
        streams.append(_before(ends.get(device), drawn))
    merged = heapq.merge(*streams, key=_time)
    return _effective_steps(_before(horizon, merged), absent_at_start(scenario, groups))


def _time(due: _CausedStep) -> Nanoseconds:
    return due.step.at


def _before(end: Nanoseconds | None, dues: Iterator[_CausedStep]) -> Iterator[_CausedStep]:
    return dues if end is None else itertools.takewhile(lambda due: due.step.at < end, dues)


def _ends(
    scenario: Iterable[ScenarioEntry], by_group: Mapping[str, tuple[str, ...]]
) -> dict[str, Nanoseconds]:
    """Map each device that leaves or crashes for good to the time of that action."""
    last = {device: entries[-1] for device, entries in movements(scenario, by_group).items()}
    return {device: from_seconds(entry.at) for device, entry in last.items() if entry.verb != "join"}


def _scenario_steps(
    scenario: Iterable[ScenarioEntry], by_group: Mapping[str, tuple[str, ...]]
) -> list[_CausedStep]:
    dues: list[_CausedStep] = []
    for entry in scenario:
        at = from_seconds(entry.at)
        for device in expand(entry.targets, by_group):
            if entry.cpu is not None:
                dues.append(_CausedStep(Step(at, device, SetCpu(entry.cpu))))
            if entry.link is not None:
                dues.append(_CausedStep(Step(at, device, SetLink(entry.link.changes))))
            if entry.background is not None:
                dues.append(_CausedStep(Step(at, device, SetBackground(entry.background))))
            if entry.battery is not None:
                dues.append(_CausedStep(Step(at, device, SetBattery(entry.battery))))
            if entry.verb == "charge":
                dues.append(_CausedStep(Step(at, device, Charge(entry.watts))))
            elif entry.verb == "unplug":
                dues.append(_CausedStep(Step(at, device, Unplug())))
            elif entry.duration is not None:
                dues += _span(at, from_seconds(entry.duration), device, BY_NAME[entry.verb])
            elif entry.verb != "set":
                dues.append(_CausedStep(Step(at, device, BY_NAME[entry.verb])))
    return sorted(dues, key=_time)  # stable: keeps the order of the file


def _heat_steps(scripted: Iterable[_CausedStep], heat: Mapping[str, Heat]) -> list[_CausedStep]:
    """Return one `SetCpu` per device in `heat`, at the time `thermal.after` of the device. The new CPU
    share is the device's share at that time, multiplied by `thermal.to`. If the scenario sets the share
    later, the new share is not multiplied."""
    cpu = {device: one.cpu for device, one in heat.items()}
    at = {device: from_seconds(one.thermal.after) for device, one in heat.items()}
    for step, _ in scripted if heat else ():
        if step.device in heat and step.at <= at[step.device] and isinstance(step.action, SetCpu):
            cpu[step.device] = step.action.cpu
    dues = [
        _CausedStep(Step(at[device], device, SetCpu(cpu[device] * one.thermal.to)))
        for device, one in heat.items()
    ]
    return sorted(dues, key=_time)


def _span(
    at: Nanoseconds, duration: Nanoseconds, device: str, begin: Switching
) -> tuple[_CausedStep, _CausedStep]:
    cause = object()
    return (
        _CausedStep(Step(at, device, begin), cause),
        _CausedStep(Step(at + duration, device, _ENDED_BY[begin]), cause),
    )


def _listed_steps(actions: Sequence[tuple[float, str]], device: str) -> list[_CausedStep]:
    """A crash that no restart follows is for good, as in the scenario."""
    cause = object()
    moves = [name for _, name in actions if name in ("crash", "restart", "leave", "join")]
    restarted = iter([*moves, ""][1:])  # what follows each move
    dues = []
    for at, name in actions:
        lasts = name in ("leave", "join") or (name == "crash" and next(restarted) != "restart")
        if name in ("restart", "leave", "join"):
            next(restarted)
        dues.append(_CausedStep(Step(from_seconds(at), device, BY_NAME[name]), None if lasts else cause))
    return dues


def _random_steps(
    churn: Churn | None,
    groups: Sequence[DeviceGroup],
    by_group: Mapping[str, tuple[str, ...]],
    seed: int,
) -> Iterator[tuple[str, Iterator[_CausedStep]]]:
    """The churn of all devices comes first, and then the availability of all devices."""
    if churn is not None:
        named = by_group if churn.devices is None else churn.devices
        churned = frozenset(expand(named, by_group))
        for device in (device for group in groups for device in group.device_names):
            if device in churned:
                yield device, _churn_steps(churn, seed, device)
    for group in groups:
        if group.availability is not None:
            for device in group.device_names:
                yield device, _availability_steps(group.availability, seed, device)


def _churn_steps(churn: Churn, seed: int, device: str) -> Iterator[_CausedStep]:
    # Two generators, so that another downtime does not change the times between crashes.
    between = random_generators.generator(seed, device, "churn")
    downtime = durations.sampler(
        churn.downtime.plain(), random_generators.generator(seed, device, "downtime")
    )
    at: Nanoseconds = 0
    while True:
        at += from_seconds(between.exponential(1 / churn.rate))
        down = from_seconds(downtime())
        yield from _span(at, down, device, Crash())
        at += down


def _availability_steps(availability: Availability, seed: int, device: str) -> Iterator[_CausedStep]:
    cause = object()  # one for all: a device is not off twice at the same time
    for at, is_on in availability.changes(seed, device):
        yield _CausedStep(Step(at, device, Reconnect() if is_on else Disconnect()), cause)


def _effective_steps(dues: Iterable[_CausedStep], absent: Iterable[str]) -> Iterator[Step]:
    gone = set(absent)
    held: defaultdict[tuple[str, Hold], set[object]] = defaultdict(set)
    for step, cause in dues:
        device, action = step.device, step.action
        match action:
            case SetCpu() | SetLink() | SetBackground() | FeatureAction():
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
                if cause in causes:  # else its crash was forgotten when the device left
                    causes.remove(cause)
                    if not causes and device not in gone:
                        yield step
            case PowerOff() | PowerOn():
                raise ValueError(f"{action} cannot be planned: it follows from the battery")
            case _:
                assert_never(action)
