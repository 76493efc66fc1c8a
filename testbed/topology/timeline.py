"""What is to be done to which device, and when: scenario, churn and availability made one timeline.

Pure. An executor keeps for each device that is there three switches: up, not frozen, connected. They are
all on when it joins, and none depends on another:

- `Crash` and `Restart` turn "up", `Pause` and `Resume` "not frozen", `Disconnect` and `Reconnect`
  "connected". The actions of one switch alternate: what overlaps (a pause within a pause, churn of a
  device that the scenario has crashed) has been made one, so that a device is down, frozen or cut off
  for as long as anything holds it so.
- A process exists while the device is there and up. One that starts while the device is frozen is frozen
  as soon as it can be; while the device is disconnected no packet passes. A device that is down can be
  frozen, thawed, cut off and connected, and it leaves without a goodbye.
- `Join` starts a device that is not there: from the start, since it left, or since a `Crash` without
  `restart_after`. Until then only `SetCpu` and `SetLink` concern it. What then freezes it or cuts it off
  follows at the same time; what crashed it before does not matter any more.
- `SetCpu` and `SetLink` are of the device and not of its process: they outlive crashes and absence.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agents import durations
from agents.config import Link
from testbed import seeds
from testbed.topology.availability import Availability
from testbed.topology.scenario import (
    Churn,
    Entry,
    Group,
    Verb,
    absent,
    devices_by_name,
    expand,
    movements,
)


@dataclass(frozen=True, slots=True)
class SetCpu:
    share: float
    """Of one host core."""


@dataclass(frozen=True, slots=True)
class SetLink:
    changes: Mapping[str, float | None]
    """Fields of `agents.config.Link` in its units; the others stay as they are."""

    def applied_to(self, link: Link | None) -> Link:
        changes: dict[str, Any] = dict(self.changes)
        return dataclasses.replace(link or Link(), **changes)


@dataclass(frozen=True, slots=True)
class Crash:
    """Kill it at once, without a goodbye."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after a crash."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Freeze it."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Let it go on where it was."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Let no packet pass; its process goes on."""


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Let packets pass again."""


@dataclass(frozen=True, slots=True)
class Leave:
    """It says goodbye, and is gone."""


@dataclass(frozen=True, slots=True)
class Join:
    """It comes, for the first time or again."""


Action = SetCpu | SetLink | Crash | Restart | Pause | Resume | Disconnect | Reconnect | Leave | Join


@dataclass(frozen=True, slots=True)
class Step:
    at: float
    """Seconds of device time since the run clock started."""
    device: str
    action: Action


class _Due(NamedTuple):
    step: Step
    cause: object = None
    """The same for what begins and what ends it; None where nothing does."""


_ACTIONS: dict[Verb, Action] = {
    "crash": Crash(),
    "pause": Pause(),
    "disconnect": Disconnect(),
    "leave": Leave(),
    "join": Join(),
}
_ENDED_BY: dict[Action, Action] = {Crash(): Restart(), Pause(): Resume(), Disconnect(): Reconnect()}
_BEGUN_BY = {end: begin for begin, end in _ENDED_BY.items()}


def describe(action: Action) -> dict[str, Any]:
    """For the event log: `{"action": "crash"}`, `{"action": "set", "link": {"up": 1000000}}` (bit/s)."""
    match action:
        case SetCpu(share):
            return {"action": "set", "cpu": share}
        case SetLink(changes):
            return {"action": "set", "link": dict(changes)}
    return {"action": type(action).__name__.lower()}


def timeline(
    scenario: Sequence[Entry],
    churn: Churn | None,
    groups: Sequence[Group],
    seed: int,
    horizon: float | None = None,
) -> Iterator[Step]:
    """All steps in the order of their time, those before `horizon` (seconds) where it is given.

    At one time: those of the file in its order, then churn's, then availability's, each in the order of
    the devices. Lazy, and without end under churn: its memory grows with the devices and the file, not
    with time. The same arguments give the same steps.
    """
    by_name = devices_by_name(groups)
    ends = _ends(scenario, by_name)
    streams: list[Iterable[_Due]] = [_scripted(scenario, by_name)]
    for device, drawn in _drawn(churn, groups, by_name, seed):
        # Where it is away for good nothing of this would come through, and to look for it have no end.
        streams.append(_before(ends.get(device), drawn))
    merged = heapq.merge(*streams, key=_time)
    return _effective(_before(horizon, merged), absent(scenario, groups))


def _time(due: _Due) -> float:
    return due.step.at


def _before(end: float | None, dues: Iterator[_Due]) -> Iterator[_Due]:
    return dues if end is None else itertools.takewhile(lambda due: due.step.at < end, dues)


def _ends(scenario: Iterable[Entry], by_name: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """From when on a device is away, for those that do not come back."""
    last = {device: entries[-1] for device, entries in movements(scenario, by_name).items()}
    return {device: entry.at for device, entry in last.items() if entry.verb != "join"}


def _scripted(scenario: Iterable[Entry], by_name: Mapping[str, tuple[str, ...]]) -> list[_Due]:
    dues = [
        due
        for entry in scenario
        for device in expand(entry.targets, by_name)
        for due in _of_entry(entry, device)
    ]
    return sorted(dues, key=_time)  # stable: the order of the file


def _of_entry(entry: Entry, device: str) -> Iterator[_Due]:
    if entry.cpu is not None:
        yield _Due(Step(entry.at, device, SetCpu(entry.cpu)))
    if entry.link is not None:
        yield _Due(Step(entry.at, device, SetLink(entry.link.changes)))
    action = _ACTIONS.get(entry.verb)
    if action is None:
        return
    if entry.lasts is None:
        yield _Due(Step(entry.at, device, action))
    else:
        yield from _span(entry.at, entry.lasts, device, action)


def _span(at: float, lasts: float, device: str, begin: Action) -> Iterator[_Due]:
    cause = object()
    yield _Due(Step(at, device, begin), cause)
    yield _Due(Step(at + lasts, device, _ENDED_BY[begin]), cause)


def _drawn(
    churn: Churn | None, groups: Sequence[Group], by_name: Mapping[str, tuple[str, ...]], seed: int
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
    at = 0.0
    while True:
        at += float(between.exponential(1 / churn.rate))
        down = downtime()
        yield from _span(at, down, device, Crash())
        at += down


def _availability(availability: Availability, seed: int, device: str) -> Iterator[_Due]:
    cause = object()  # one will do: it is not off twice at a time
    for at, is_on in availability.changes(seed, device):
        yield _Due(Step(at, device, Reconnect() if is_on else Disconnect()), cause)


def _effective(dues: Iterable[_Due], absent: Iterable[str]) -> Iterator[Step]:
    """The steps that make a difference: overlaps made one, and none for a device that is not there."""
    gone = set(absent)
    held: defaultdict[tuple[str, Action], set[object]] = defaultdict(set)
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
                        if held[device, begin]:
                            yield Step(step.at, device, begin)
            case Leave() | Crash() if cause is None:
                if device not in gone:
                    gone.add(device)
                    down = held.pop((device, Crash()), None)
                    if action == Leave() or not down:
                        yield step
            case _ if action != Crash() or device not in gone:
                causes = held[device, _BEGUN_BY.get(action, action)]
                if _turns(causes, cause, begins=action not in _BEGUN_BY) and device not in gone:
                    yield step


def _turns(causes: set[object], cause: object, *, begins: bool) -> bool:
    """Add `cause`, or take it away; whether with it the device begins, or ceases, to be held."""
    if begins:
        causes.add(cause)
        return len(causes) == 1
    if cause not in causes:  # a crash before the device was gone
        return False
    causes.remove(cause)
    return not causes
