"""What each device of a run was asked to be, from the plan and from what the events say was changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agents import events
from agents.config import Link
from agents.device_actions import DeviceState, SetCpu, SetLink, holds
from testbed.fidelity.figures import Asked, AskedCpu, AskedLink, Interval
from testbed.fidelity.validity import StepDone
from testbed.plan import PlannedDevice
from testbed.plan.agent_configs import RunSpec


def asked(spec: RunSpec, records: Iterable[events.Record]) -> list[Asked]:
    """In device order."""
    cgroups, absent = spec.plan.traits.cgroups, spec.absent
    found = {
        device.name: _Device(planned=device, cgroups=cgroups, away=device.name in absent)
        for device in spec.plan.devices
    }
    for record in records:
        if isinstance(record, events.Acted):
            found[record.device].act(record)
        elif isinstance(record, events.ClientStatus):
            found[record.client].say(record)
        elif isinstance(record, events.RunStarted) and record.at > 0:  # resumed
            for device in found.values():
                device.begin_again(record.at)
    return [device.result() for device in found.values()]


def steps(records: Iterable[events.Record]) -> list[StepDone]:
    """What the scenario did, and when it was due."""
    return [
        StepDone(
            f"{record.details['action']} of {record.device}", record.at - record.lateness, record.at
        )
        for record in records
        if isinstance(record, events.Acted) and record.source == "scenario"
    ]


def in_device_time(sample: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    """A sample of the host, as the devices would have taken it."""
    told = {**sample, "at": sample["at"] / dilation}
    if "probe" in sample:
        factors = {
            "up": dilation,
            "down": dilation,
            "rtt": 1 / dilation,
            "jitter": 1 / dilation,
            "loss": 1.0,
        }
        told["probe"] = {name: value * factors[name] for name, value in sample["probe"].items()}
    return told


@dataclass(slots=True, kw_only=True)
class _Device:
    planned: PlannedDevice
    cgroups: bool
    away: bool
    """Not there from the start."""
    _cpu: list[AskedCpu] = field(default_factory=list)
    _link: list[AskedLink] = field(default_factory=list)
    _made: DeviceState = field(default_factory=DeviceState)
    """What actions have made of it since the run, or what has been resumed of it, began."""
    _now: Link = field(default_factory=Link)
    _held: dict[str, float] = field(default_factory=dict)
    """What keeps it from computing, and since when."""
    _away: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ask_cpu(0.0)
        if not self.planned.direct:
            self._ask_link(0.0)
        if self.away:
            self._hold("down", 0.0)

    def act(self, record: events.Acted) -> None:
        action = record.action
        if action is None:
            return
        self._made = self._made.after(action)
        match action:
            case SetCpu():
                self._ask_cpu(record.at)
            case SetLink():
                self._ask_link(record.at)
            case _:
                for hold, begins in holds(action).items():
                    if begins and hold != "cut off":  # which leaves it computing
                        self._hold(hold, record.at - record.lateness)
                    elif not begins and hold != "down":  # it says itself when it is ready
                        self._let_go(hold, record.at)

    def begin_again(self, at: float) -> None:
        """It is as it was planned, whatever was changed before."""
        self._made = DeviceState()
        self._ask_cpu(at)
        if self._link:
            self._ask_link(at)
        self._let_go("frozen", at)

    def say(self, record: events.ClientStatus) -> None:
        if record.state == "offline":
            self._hold("down", record.at)
        elif record.state == "ready":
            self._let_go("down", record.at)

    def result(self) -> Asked:
        for what in list(self._held):
            self._let_go(what, math.inf)
        device = self.planned
        return Asked(
            device.name, device.group, tuple(self._cpu), tuple(self._link), tuple(sorted(self._away))
        )

    def _ask_cpu(self, at: float) -> None:
        share = self.planned.cpu or 0.0 if self._made.cpu is None else self._made.cpu
        planned = replace(self.planned, cpu=share)
        period = planned.period / 1e6 / planned.dilation if self.cgroups else None
        self._cpu.append(AskedCpu(share, period, at))

    def _ask_link(self, at: float) -> None:
        link = (self.planned.link or Link()).changed(self._made.link)
        if self._link and link == self._now:
            return  # as a trace begins
        self._now = link
        way = link.behind(self.planned.access)
        self._link.append(AskedLink(way.up, way.down, way.rtt / 2, way.jitter, way.loss, at))

    def _hold(self, what: str, at: float) -> None:
        self._held.setdefault(what, at)

    def _let_go(self, what: str, at: float) -> None:
        if what in self._held:
            self._away.append((self._held.pop(what), at))
