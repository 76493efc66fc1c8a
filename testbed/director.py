"""Has the scenario played on a run's devices, and what a user orders in mid-run; tells what it did.

Every action lands in the run's events with its lateness: what was to happen when, and when it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from agents.topics import AGGREGATOR
from testbed.errors import BadInputError
from testbed.timeline import (
    Action,
    Crash,
    Disconnect,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetCpu,
    SetLink,
    Step,
    describe,
)

Order = tuple[str, Mapping[str, Any]]
"""Which part of the run is told what over the control network."""


class Stage(Protocol):
    """What a runtime can do to its devices."""

    def act(self, device: str, action: Action) -> list[Order]:
        """Do it, as far as it is ours to do; the rest is what others are to be told.

        An action that changes nothing (a pause of what is paused) is no error. Raises HostError.
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


class Director:
    """`steps` in the order of their times; `tell` hands an order over."""

    def __init__(self, steps: Iterator[Step], stage: Stage, tell: Callable[[Order], None]) -> None:
        self._steps = steps
        self._stage = stage
        self._tell = tell
        self._next = next(steps, None)
        self._epoch: float | None = None
        self.latest = 0.0
        """Seconds by which the most belated step was late."""

    def start(self, epoch: float) -> None:
        """The run clock started when the monotonic clock showed `epoch`."""
        self._epoch = epoch

    @property
    def next_due(self) -> float:
        """On the monotonic clock; infinity where nothing is planned."""
        if self._next is None or self._epoch is None:
            return float("inf")
        return self._epoch + self._next.at

    def play(self) -> None:
        """Do what is due."""
        while (step := self._next) is not None and time.monotonic() >= self.next_due:
            self._next = next(self._steps, None)
            self._do(step.device, step.action, step.at)

    def order(self, device: str, action: Action) -> None:
        """Do at once what a user wants."""
        self._do(device, action, None)

    def _do(self, device: str, action: Action, planned: float | None) -> None:
        for order in self._stage.act(device, action):
            self._tell(order)
        if self._epoch is None:
            return
        at = time.monotonic() - self._epoch
        lateness = 0.0 if planned is None else at - planned
        self.latest = max(self.latest, lateness)
        source = "hand" if planned is None else "scenario"
        told = {"at": at, "device": device, "source": source, "lateness": lateness}
        self._tell((AGGREGATOR, {"do": "log", **told, "details": describe(action)}))
