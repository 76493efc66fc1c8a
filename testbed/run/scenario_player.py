"""Scenario player: carries out the scenario's steps and users' commands, and knows which devices must be
ready again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from agents import events
from agents.device_actions import (
    Action,
    Crash,
    DeviceAction,
    DeviceState,
    Join,
    Leave,
    PowerOff,
    PowerOn,
    Restart,
    SegmentAction,
    SetBackground,
    SetLink,
    Switching,
    from_json,
    holds,
    to_json,
)
from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import AddressedOrder, DeviceOrder, LogOrder, Source
from testbed.errors import BadInputError
from testbed.plan.planned_devices import to_host_time
from testbed.topology.action_timeline import Step


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


# Scenario player: carries out the scenario's steps on a run's devices, and users' commands during a run.
#
# Each action is recorded in the run's events. The record has the lateness of the action: the seconds
# from the due time to the time at which the action was done.


class Actuator(Protocol):
    def act(self, device: str, action: DeviceAction) -> list[AddressedOrder]:
        """Carry out the runtime's part of `action`. Return the orders for the processes that do the
        rest.

        An action without effect, such as a pause of a paused device, is no error. A user may order any
        action. Raises HostError, or BadInputError if this run cannot carry out the action.
        """


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


def segment_orders(segment: str, action: Action, dilation: float) -> list[AddressedOrder]:
    """Raises BadInputError if the action applies to devices only."""
    if not isinstance(action, SegmentAction):
        raise BadInputError(
            f"{segment} is a segment: only its link and its background traffic change, and it can be "
            "disconnected and connected"
        )
    if isinstance(action, SetLink):
        action = SetLink(to_host_time(action.changes, dilation))
    return [(ROUTER, DeviceOrder(segment, action))]


class ScenarioPlayer:
    """Carries out `steps` on the devices of `actuator`, in the order of time.

    `segments`: on which the router or the relay acts. `send`: called with each order for another
    process. `failed`: called with a sentence on each step that failed. `dilation`: host seconds per
    second of device time.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        actuator: Actuator,
        send: Callable[[AddressedOrder], None],
        failed: Callable[[str], None],
        dilation: float = 1.0,
        segments: Collection[str] = (),
    ) -> None:
        self._dilation = dilation
        self._segments = segments
        self._steps = steps
        self._actuator = actuator
        self._send = send
        self._failed = failed
        self._next = next(steps, None)
        self._epoch: float | None = None

    def start(self, epoch: float, begin: float = 0.0) -> None:
        """`epoch`: reading of the monotonic clock at time 0 of the run clock. `begin`: seconds of the
        run clock at which a resumed run continues. Earlier steps are not repeated, but their remaining
        effects are carried out again."""
        self._epoch = epoch
        for device, action in remaining_effects(self._until(from_seconds(begin))):
            self._play(device, action, begin)

    def _until(self, begin: Nanoseconds) -> Iterator[Step]:
        while (step := self._next) is not None and step.at < begin:
            yield step
            self._next = next(self._steps, None)

    @property
    def next_due(self) -> float:
        """Seconds on the monotonic clock; infinity if no step is left."""
        if self._next is None or self._epoch is None:
            return float("inf")
        return self._epoch + to_seconds(self._next.at) * self._dilation

    def play(self) -> None:
        while (step := self._next) is not None and time.monotonic() >= self.next_due:
            self._next = next(self._steps, None)
            self._play(step.device, step.action, to_seconds(step.at))

    def execute(self, device: str, action: Action) -> None:
        """Raises BadInputError, HostError."""
        self._do(device, action, None)

    def _play(self, device: str, action: Action, planned: float) -> None:
        """If the device's state does not allow the step, report that. The run continues."""
        try:
            self._do(device, action, planned)
        except BadInputError as error:
            self._failed(str(error))

    def _do(self, device: str, action: Action, planned: float | None) -> None:
        if device in self._segments:
            orders = segment_orders(device, action, self._dilation)
        elif isinstance(action, SetBackground):
            raise BadInputError(
                f"{device} is a device, and only segments have background traffic: name a segment"
            )
        else:
            orders = self._actuator.act(device, action)
        for order in orders:
            self._send(order)
        if self._epoch is None:
            return
        at = (time.monotonic() - self._epoch) / self._dilation
        lateness = 0.0 if planned is None else at - planned
        source: Source = "hand" if planned is None else "scenario"
        self._send((AGGREGATOR, LogOrder(at, device, source, lateness, to_json(action))))
