"""Has the scenario played on a run's devices, and what a user orders in mid-run; tells what it did.

Every action lands in the run's events with its lateness: what was to happen when, and when it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from agents.device_actions import Action, DeviceState, Join, Switching, from_json, holds, to_json
from agents.messages import AddressedOrder, Log, Source
from agents.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.topics import AGGREGATOR
from testbed.errors import BadInputError
from testbed.topology.timeline import Step


class Stage(Protocol):
    """What a runtime can do to its devices."""

    def act(self, device: str, action: Action) -> list[AddressedOrder]:
        """Do it, as far as it is ours to do; the rest is what others are to be told.

        An action that changes nothing (a pause of what is paused) is no error. Raises BadInputError for
        what this run cannot do (a user may want anything), HostError.
        """


def ordered(order: Mapping[str, Any]) -> tuple[str, Action]:
    """The device and the action of what a user's command has sent: the action's JSON form and `device`.
    Raises BadInputError."""
    action = from_json(order)
    if action is None:
        told = order.get("action")
        raise BadInputError(f"the controller knows no action {told!r}: is it of another version?")
    return str(order.get("device")), action


def what_holds(steps: Iterable[Step]) -> list[tuple[str, Action]]:
    """The fewest actions on each device that make of it, as it is at the start of a run, what `steps`
    have made of it."""
    states: dict[str, DeviceState] = {}
    joined = set()
    for step in steps:
        if isinstance(step.action, Join):
            joined.add(step.device)
        states[step.device] = states.pop(step.device, DeviceState()).after(step.action)
    return [
        (device, action)
        for device, state in states.items()
        for action in state.actions()
        if device in joined or not _only_ends(action)
    ]


def _only_ends(action: Action) -> bool:
    """Whether it makes no difference to a device that is as at the start and was there then."""
    return isinstance(action, Switching) and not any(holds(action).values())


class Director:
    """`steps` in the order of their times; `tell` hands an order over, `failed` hears what could not be
    done; `dilation` is how many seconds of the host make one of device time."""

    def __init__(
        self,
        steps: Iterator[Step],
        stage: Stage,
        tell: Callable[[AddressedOrder], None],
        failed: Callable[[str], None],
        dilation: float = 1.0,
    ) -> None:
        self._dilation = dilation
        self._steps = steps
        self._stage = stage
        self._tell = tell
        self._failed = failed
        self._next = next(steps, None)
        self._epoch: float | None = None

    def start(self, epoch: float, begin: float = 0.0) -> None:
        """The run clock showed 0 when the monotonic clock showed `epoch`. Where a run is resumed it goes
        on from `begin`, in seconds: of what was before, only what still holds is done again."""
        self._epoch = epoch
        for device, action in what_holds(self._until(from_seconds(begin))):
            self._play(device, action, begin)

    def _until(self, begin: Nanoseconds) -> Iterator[Step]:
        while (step := self._next) is not None and step.at < begin:
            yield step
            self._next = next(self._steps, None)

    @property
    def next_due(self) -> float:
        """On the monotonic clock; infinity where nothing is planned."""
        if self._next is None or self._epoch is None:
            return float("inf")
        return self._epoch + to_seconds(self._next.at) * self._dilation

    def play(self) -> None:
        """Do what is due."""
        while (step := self._next) is not None and time.monotonic() >= self.next_due:
            self._next = next(self._steps, None)
            self._play(step.device, step.action, to_seconds(step.at))

    def order(self, device: str, action: Action) -> None:
        """Do at once what a user wants. Raises BadInputError, HostError."""
        self._do(device, action, None)

    def _play(self, device: str, action: Action, planned: float) -> None:
        """A step that the devices no longer allow is no reason to end the run."""
        try:
            self._do(device, action, planned)
        except BadInputError as error:
            self._failed(str(error))

    def _do(self, device: str, action: Action, planned: float | None) -> None:
        for order in self._stage.act(device, action):
            self._tell(order)
        if self._epoch is None:
            return
        at = (time.monotonic() - self._epoch) / self._dilation
        lateness = 0.0 if planned is None else at - planned
        source: Source = "hand" if planned is None else "scenario"
        self._tell((AGGREGATOR, Log(at, device, source, lateness, to_json(action))))
