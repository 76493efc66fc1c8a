"""The scenario's steps, users' commands, and the devices that must be ready again.

Each action is recorded in the run's events. The record has the lateness of the action: the seconds from
the due time to the time at which the action was done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agents import events
from agents.device_actions import (
    Action,
    Crash,
    DeviceState,
    Join,
    Leave,
    PowerOff,
    PowerOn,
    Restart,
    SetBackground,
    SetCpu,
    Switching,
    from_json,
    holds,
    to_json,
)
from agents.mqtt.topics import AGGREGATOR
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import AddressedOrder, LogOrder, Source
from testbed.errors import BadInputError
from testbed.plan.planned_devices import action_steps
from testbed.run.inputs import Act
from testbed.run.part import ControlledRun, ControllerPart
from testbed.topology.scenario import Step


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

    def problems(self) -> Iterator[str]:
        if awaited := self._present & self._deadlines.keys():
            yield f"{sorted(awaited)} are present, and awaited"


def parse_command(command: Mapping[str, Any]) -> tuple[str, Action]:
    """The command is the action's JSON form with the key `device`. Raises BadInputError."""
    action = from_json({key: value for key, value in command.items() if key != "device"})
    if action is None:
        name = command.get("action")
        raise BadInputError(
            f"the controller has no action {name!r}: use the version of testbed that started the run"
        )
    return str(command.get("device")), action


def remaining_effects(steps: Iterable[Step]) -> list[tuple[str, Action]]:
    """Smallest list of actions that brings each device from the initial state to the state after
    `steps`."""
    states: dict[str, DeviceState] = {}
    joined = set()
    for step in steps:
        if isinstance(step.action, Join):
            joined.add(step.device)
        states[step.device] = states.pop(step.device, DeviceState()).with_action(step.action)
    return [
        (device, action)
        for device, state in states.items()
        for action in state.actions()
        if device in joined or not _only_ends(action)
    ]


def _only_ends(action: Action) -> bool:
    """Ends have no effect on a device that was present at the start and is still in its initial
    state."""
    return isinstance(action, Switching) and not any(holds(action).values())


class ScenarioPlayer(ControllerPart):
    """`features`: parts that carry out some of the actions. `steps`: the scenario's, in the order of
    time."""

    def __init__(
        self, run: ControlledRun, features: Sequence[ControllerPart], steps: Iterator[Step] | None = None
    ) -> None:
        super().__init__(run)
        self._features = features
        self._steps = action_steps(run.spec.topology, run.plan) if steps is None else steps
        self._next = next(self._steps, None)
        self._shares = {device.name: device.cpu or 0.0 for device in run.plan.devices}
        """Current CPU share of each device, in cores."""
        self._returning = AwaitedDevices(run.spec.topology.start.timeout)

    def start(self, begin: float, at: float) -> None:
        """Steps before `begin`, at which a resumed run continues, are not repeated, but their remaining
        effects are carried out again."""
        for device, action in remaining_effects(self._until(from_seconds(begin))):
            self._play(device, action, begin, at)

    def _until(self, begin: Nanoseconds) -> Iterator[Step]:
        while (step := self._next) is not None and step.at < begin:
            yield step
            self._next = next(self._steps, None)

    @property
    def next_due(self) -> float:
        """Seconds on the monotonic clock; infinity if no step is left."""
        return math.inf if self._next is None else self._run.host_time(to_seconds(self._next.at))

    def record(self, record: events.Record, at: float) -> None:
        self._returning.record(record, at)
        if isinstance(record, events.Acted) and isinstance(action := record.action, SetCpu):
            self._shares[record.device] = action.cpu

    def tick(self, at: float) -> None:
        if self._run.is_over or not self._run.has_started:
            return
        while (step := self._next) is not None and at >= self.next_due:
            self._next = next(self._steps, None)
            self._play(step.device, step.action, to_seconds(step.at), at)
        for failure in self._returning.overdue(at):
            self._run.record_failure(failure)

    def execute(self, command: Mapping[str, Any], at: float) -> None:
        """Carry out a user's command. Raises BadInputError."""
        device, action = parse_command(command)
        run, plan = self._run, self._run.plan
        if run.is_over:
            raise BadInputError(f"{run.spec.directory.run} is over except for its last evaluation.")
        if device not in run.devices and device not in plan.segments:
            raise BadInputError(f"{run.spec.directory.run} has no device {device}.")
        if isinstance(action, SetCpu) and device in run.devices:
            shares = (self._shares | {device: action.cpu}).values()
            why = plan.too_little(action.cpu) or plan.too_much(shares)
            if why is not None:
                raise BadInputError(f"{device} cannot have {action.cpu:g} cpu: {why}.")
        self._do(device, action, None, at)

    def _play(self, device: str, action: Action, due: float, at: float) -> None:
        """If the device's state does not allow the step, report that. The run continues."""
        try:
            self._do(device, action, due, at)
        except BadInputError as error:
            self._run.record_failure(str(error))

    def _do(self, device: str, action: Action, due: float | None, at: float) -> None:
        source: Source = "hand" if due is None else "scenario"
        for part in self._features:
            if (orders := part.carry_out(device, action)) is not None:
                self._run.orders += orders
                self._log(device, action, source, due, self._run.device_time(at))
                return
        if isinstance(action, SetBackground):
            raise BadInputError(
                f"{device} is a device, and only segments have background traffic: name a segment"
            )
        self._run.do(Act(device, action, source, due))

    def done(self, act: Act, orders: Iterable[AddressedOrder], at: float) -> None:
        self._run.orders += orders
        if act.source is not None:
            done = self._run.device_time(at) if act.at is None else act.at
            self._log(act.device, act.action, act.source, act.due, done)

    def _log(self, device: str, action: Action, source: Source, due: float | None, at: float) -> None:
        """Have the action recorded. `due`, `at`: device times in seconds."""
        lateness = 0.0 if due is None else at - due
        self._run.order(AGGREGATOR, LogOrder(at, device, source, lateness, to_json(action)))

    def problems(self) -> Iterator[str]:
        return self._returning.problems()
