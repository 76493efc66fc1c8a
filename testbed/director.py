"""Has the scenario played on a run's devices, and what a user orders in mid-run; tells what it did.

Every action lands in the run's events with its lateness: what was to happen when, and when it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from agents.messages import Log, Source
from agents.topics import AGGREGATOR
from testbed.device_orders import Order
from testbed.errors import BadInputError
from testbed.topology.timeline import (
    Action,
    Crash,
    Disconnect,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetCpu,
    SetLink,
    Step,
    describe,
)


class Stage(Protocol):
    """What a runtime can do to its devices."""

    def act(self, device: str, action: Action) -> list[Order]:
        """Do it, as far as it is ours to do; the rest is what others are to be told.

        An action that changes nothing (a pause of what is paused) is no error. Raises BadInputError for
        what this run cannot do (a user may want anything), HostError.
        """


_PLAIN: dict[str, Action] = {
    "crash": Crash(),
    "restart": Restart(),
    "pause": Pause(),
    "resume": Resume(),
    "disconnect": Disconnect(),
    "reconnect": Reconnect(),
}


def ordered(order: Mapping[str, Any]) -> tuple[str, Action]:
    """The device and the action of what a user's command has sent: as `describe` tells an action, with
    `device`. Raises BadInputError."""
    device, what = str(order.get("device")), order.get("action")
    if what == "set" and "cpu" in order:
        return device, SetCpu(float(order["cpu"]))
    if what == "set" and "link" in order:
        return device, SetLink(order["link"])
    if what not in _PLAIN:
        raise BadInputError(f"the controller knows no action {what!r}: is it of another version?")
    return device, _PLAIN[what]


_OF: dict[type[Action], str] = {
    SetCpu: "cpu",
    SetLink: "link",
    Crash: "up",
    Restart: "up",
    Leave: "up",
    Join: "up",
    Pause: "frozen",
    Resume: "frozen",
    Disconnect: "connected",
    Reconnect: "connected",
}
"""What of a device an action changes."""


def what_holds(steps: Sequence[Step]) -> list[Step]:
    """What makes devices that are as at the start of a run what `steps`, in order, have made of them: at
    most one step for each device and what is changed of it."""
    joined = {step.device for step in steps if isinstance(step.action, Join)}
    last: dict[tuple[str, str], Step] = {}
    for step in steps:
        if isinstance(step.action, Join):  # what held it before does so no more
            for what in ("frozen", "connected"):
                last.pop((step.device, what), None)
        key = step.device, _OF[type(step.action)]
        before, action = last.pop(key, None), step.action
        if isinstance(action, SetLink) and before is not None and isinstance(before.action, SetLink):
            action = SetLink({**before.action.changes, **action.changes})
        last[key] = Step(step.at, step.device, action)
    as_at_the_start = (Restart, Resume, Reconnect)
    return [
        step
        for step in last.values()
        if not isinstance(step.action, as_at_the_start) or step.device in joined
    ]


class Director:
    """`steps` in the order of their times; `tell` hands an order over, `failed` hears what could not be
    done; `dilation` is how many seconds of the host make one of device time."""

    def __init__(
        self,
        steps: Iterator[Step],
        stage: Stage,
        tell: Callable[[Order], None],
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
        for step in what_holds(list(self._until(begin))):
            self._play(step, begin)

    def _until(self, begin: float) -> Iterator[Step]:
        while (step := self._next) is not None and step.at < begin:
            yield step
            self._next = next(self._steps, None)

    @property
    def next_due(self) -> float:
        """On the monotonic clock; infinity where nothing is planned."""
        if self._next is None or self._epoch is None:
            return float("inf")
        return self._epoch + self._next.at * self._dilation

    def play(self) -> None:
        """Do what is due."""
        while (step := self._next) is not None and time.monotonic() >= self.next_due:
            self._next = next(self._steps, None)
            self._play(step, step.at)

    def order(self, device: str, action: Action) -> None:
        """Do at once what a user wants. Raises BadInputError, HostError."""
        self._do(device, action, None)

    def _play(self, step: Step, planned: float) -> None:
        """A step that the devices no longer allow is no reason to end the run."""
        try:
            self._do(step.device, step.action, planned)
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
        self._tell((AGGREGATOR, Log(at, device, source, lateness, describe(action))))
