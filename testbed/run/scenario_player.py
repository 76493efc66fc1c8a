"""Scenario player: carries out the scenario's steps on a run's devices, and users' commands in mid-run.

Every action goes into the run's events with its lateness, the time between due and done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from agents.device_actions import Action, DeviceState, Join, Switching, from_json, holds, to_json
from agents.mqtt.topics import AGGREGATOR
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import AddressedOrder, LogOrder, Source
from testbed.errors import BadInputError
from testbed.topology.action_timeline import Step


class Actuator(Protocol):
    """What acts on devices: one side of a runtime."""

    def act(self, device: str, action: Action) -> list[AddressedOrder]:
        """Do what the runtime does of `action`; return the orders for the processes that do the rest.

        An action that changes nothing (a pause of what is paused) is no error. Raises BadInputError for
        what this run cannot do (a user may ask for anything), HostError.
        """


def parsed(command: Mapping[str, Any]) -> tuple[str, Action]:
    """The device and the action of a user's command: the action's JSON form and `device`. Raises
    BadInputError."""
    action = from_json({key: value for key, value in command.items() if key != "device"})
    if action is None:
        name = command.get("action")
        raise BadInputError(f"the controller knows no action {name!r}: is it of another version?")
    return str(command.get("device")), action


def remaining_effects(steps: Iterable[Step]) -> list[tuple[str, Action]]:
    """The fewest actions that bring each device from its state at the start of a run to its state after
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
    """Whether it has no effect on a device that was present at the start and is as it was then."""
    return isinstance(action, Switching) and not any(holds(action).values())


class ScenarioPlayer:
    """Plays `steps`, which are in the order of their times, on the devices of `actuator`.

    `send` takes the orders for other processes, `failed` a sentence on each step that failed; `dilation`
    is how many seconds of the host make one of device time.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        actuator: Actuator,
        send: Callable[[AddressedOrder], None],
        failed: Callable[[str], None],
        dilation: float = 1.0,
    ) -> None:
        self._dilation = dilation
        self._steps = steps
        self._actuator = actuator
        self._send = send
        self._failed = failed
        self._next = next(steps, None)
        self._epoch: float | None = None

    def start(self, epoch: float, begin: float = 0.0) -> None:
        """Begin: the run clock showed 0 when the monotonic clock showed `epoch`. A resumed run goes on
        from `begin`, in seconds; of the steps before, only the remaining effects are done again."""
        self._epoch = epoch
        for device, action in remaining_effects(self._until(from_seconds(begin))):
            self._play(device, action, begin)

    def _until(self, begin: Nanoseconds) -> Iterator[Step]:
        while (step := self._next) is not None and step.at < begin:
            yield step
            self._next = next(self._steps, None)

    @property
    def next_due(self) -> float:
        """When the next step is due, on the monotonic clock; infinity where nothing is planned."""
        if self._next is None or self._epoch is None:
            return float("inf")
        return self._epoch + to_seconds(self._next.at) * self._dilation

    def play(self) -> None:
        """Do the steps that are due."""
        while (step := self._next) is not None and time.monotonic() >= self.next_due:
            self._next = next(self._steps, None)
            self._play(step.device, step.action, to_seconds(step.at))

    def execute(self, device: str, action: Action) -> None:
        """Do at once the action of a user's command. Raises BadInputError, HostError."""
        self._do(device, action, None)

    def _play(self, device: str, action: Action, planned: float) -> None:
        """Do a step; one that the devices no longer allow does not end the run."""
        try:
            self._do(device, action, planned)
        except BadInputError as error:
            self._failed(str(error))

    def _do(self, device: str, action: Action, planned: float | None) -> None:
        for order in self._actuator.act(device, action):
            self._send(order)
        if self._epoch is None:
            return
        at = (time.monotonic() - self._epoch) / self._dilation
        lateness = 0.0 if planned is None else at - planned
        source: Source = "hand" if planned is None else "scenario"
        self._send((AGGREGATOR, LogOrder(at, device, source, lateness, to_json(action))))
