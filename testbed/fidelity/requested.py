"""Resources requested for each device of a run, by plan and events."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agents import events
from agents.config import AccessLink
from agents.device_actions import (
    DeviceState,
    PowerOff,
    PowerOn,
    SetCpu,
    SetLink,
    Switching,
    holds,
)
from testbed.fidelity.figures import Interval, Requested, RequestedCpu, RequestedLimits, RequestedLink
from testbed.fidelity.validity import StepDone, TrainingSpan
from testbed.plan import PlannedDevice
from testbed.plan.agent_configs import RunSpec
from testbed.plan.machines import PlannedNode
from testbed.plan.planned_devices import weight_alone


def devices(spec: RunSpec, records: Iterable[events.Record]) -> list[Requested]:
    """In device order: emulated devices, and real ones with limits."""
    cgroups, absent = spec.plan.traits.cgroups, spec.plan.absent
    found = {
        device.name: _DeviceRequests(
            planned=device.as_shaped,
            cgroups=cgroups,
            alone=bool(spec.plan.nodes),
            away=device.name in absent,
            own_rtt=_own_rtt(spec, device) if device.shape is not None else 0.0,
        )
        for device in spec.plan.devices
        if device.host is None or device.shape is not None
    }
    for record in records:
        if isinstance(record, events.Acted) and record.device in found:
            found[record.device].on_action(record)
        elif isinstance(record, events.ClientStatus) and record.client in found:
            found[record.client].on_status(record)
        elif isinstance(record, events.RunStarted) and record.at > 0:  # resumed
            for name, device in found.items():
                device.on_resume(record.at, ready=name in record.clients)
    return [device.result(spec.plan.node_of(name)) for name, device in found.items()]


def _own_rtt(spec: RunSpec, device: PlannedDevice) -> float:
    """Round trip of a real device before its link was shaped, in seconds; 0 if unknown."""
    figures = spec.directory.read_manifest().get("real", {}).get(device.name, {})
    return figures.get("rtt") or 0.0


def steps(records: Iterable[events.Record]) -> list[StepDone]:
    return [
        StepDone(
            f"{record.details['action']} of {record.device}", record.at - record.lateness, record.at
        )
        for record in records
        if isinstance(record, events.Acted) and record.source == "scenario"
    ]


def trainings(
    requested: Iterable[Requested], records: Iterable[events.Record]
) -> dict[str, list[TrainingSpan]]:
    """By device, for updates that were applied."""
    by_device = {one.device: one for one in requested}
    found: dict[str, list[TrainingSpan]] = {name: [] for name in by_device}
    for record in records:
        if isinstance(record, events.UpdateApplied) and record.client in by_device:
            pace = _pace(by_device[record.client], record)
            found[record.client].append(TrainingSpan(record.train_start, record.train_end, pace))
    return found


def _pace(device: Requested, update: events.UpdateApplied) -> float | None:
    begin, end = update.train_start, update.train_end
    share = [one.share for one in device.cpu if one.at <= begin][-1:]
    changed = any(begin < one.at < end for one in device.cpu)
    away = any(since < end and begin < until for since, until in device.away)
    if share and share[0] is not None and update.steps > 0 and not changed and not away and end > begin:
        return (end - begin) * share[0] / update.steps
    return None


@dataclass(slots=True, kw_only=True)
class _DeviceRequests:
    planned: PlannedDevice
    cgroups: bool
    """True if a control group limits the device."""
    alone: bool
    """True if the container is outside the run's control groups, as on a Swarm."""
    away: bool
    """True if the device is absent at the start."""
    own_rtt: float
    """Round trip in seconds of the device's own network, to which its link adds; 0 if emulated."""
    _cpu: list[RequestedCpu] = field(default_factory=list)
    _link: list[RequestedLink] = field(default_factory=list)
    _state: DeviceState = field(default_factory=DeviceState)
    """State of the device after all actions since the run began or was resumed."""
    _current_link: AccessLink = field(default_factory=AccessLink)
    _absent_since: dict[str, float] = field(default_factory=dict)
    """Reason for an absence -> device time in seconds."""
    _away: list[Interval] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._request_cpu(0.0)
        if not self.planned.is_direct:
            self._request_link(0.0)
        if self.away:
            self._begin_absence("down", 0.0)

    def on_action(self, record: events.Acted) -> None:
        action = record.action
        if action is None:
            return
        self._state = self._state.with_action(action)
        if isinstance(action, SetCpu):
            self._request_cpu(record.at)
        elif isinstance(action, SetLink):
            self._request_link(record.at)
        elif isinstance(action, PowerOff):  # a device that returns reports when it is ready
            self._begin_absence("down", record.at - record.lateness)
        elif isinstance(action, Switching) and not isinstance(action, PowerOn):
            for hold, begins in holds(action).items():
                if begins and hold != "cut off":  # a device without network continues computing
                    self._begin_absence(hold, record.at - record.lateness)
                elif not begins and hold != "down":  # a restarted client reports when it is ready
                    self._end_absence(hold, record.at)

    def on_resume(self, at: float, *, ready: bool) -> None:
        """The device has its planned settings again. A device that is not ready counts as absent."""
        self._state = DeviceState()
        self._request_cpu(at)
        if self._link:
            self._request_link(at)
        self._end_absence("frozen", at)
        if ready:
            self._end_absence("down", at)
        else:
            self._begin_absence("down", at)

    def on_status(self, record: events.ClientStatus) -> None:
        if record.state == "offline":
            self._begin_absence("down", record.at)
        elif record.state == "ready":
            self._end_absence("down", record.at)

    def result(self, node: PlannedNode | None) -> Requested:
        """Absences that have not ended last until the end of the run."""
        for what in list(self._absent_since):
            self._end_absence(what, math.inf)
        return Requested(
            self.planned.name,
            self.planned.group,
            tuple(self._cpu),
            tuple(self._link),
            tuple(sorted(self._away)),
            None if node is None else node.name,
        )

    def _request_cpu(self, at: float) -> None:
        if self.planned.shape is not None:
            self._cpu.append(self._real_cpu(at))
            return
        share = self.planned.cpu or 0.0 if self._state.cpu is None else self._state.cpu
        planned = replace(self.planned, cpu=share)
        if not self.cgroups:
            self._cpu.append(RequestedCpu(share, at=at))
            return
        limits = RequestedLimits(
            quota=planned.quota,
            period=planned.period,
            shares=weight_alone(planned.weight) if self.alone else planned.weight,
            cpus=planned.cores,
            memory=planned.memory,
        )
        self._cpu.append(RequestedCpu(share, planned.period / 1e6 / planned.dilation, at, limits))

    def _real_cpu(self, at: float) -> RequestedCpu:
        """A real device's control group has the CPU quota alone."""
        planned = self.planned
        if planned.cpu is None:
            return RequestedCpu(None, at=at)
        limits = RequestedLimits(quota=planned.quota, period=planned.period)
        return RequestedCpu(planned.cpu, planned.period / 1e6, at, limits)

    def _request_link(self, at: float) -> None:
        link = (self.planned.link or AccessLink()).with_changes(self._state.link)
        if self._link and link == self._current_link:
            return  # the link did not change, as at the first step of a trace
        self._current_link = link
        way = link.delayed_by(self.planned.path)
        delay = (self.own_rtt + way.rtt) / 2
        self._link.append(RequestedLink(way.up, way.down, delay, way.jitter, way.loss, at))

    def _begin_absence(self, what: str, at: float) -> None:
        self._absent_since.setdefault(what, at)

    def _end_absence(self, what: str, at: float) -> None:
        if what in self._absent_since:
            self._away.append((self._absent_since.pop(what), at))
