"""A device in virtual time: its client, what its time goes into, and what keeps it from working."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from agents import wire
from agents.client import core as client
from agents.client.uploads import Memory
from testbed.virtual.network import Line


class Training(Protocol):
    """A local training whose result is computed when it is asked for."""

    steps: int

    def outcome(self) -> client.Outcome: ...

    def cut(self, steps: int) -> None:
        """Only `steps` steps of it are done."""

    def wanted(self) -> None:
        """Its result will be asked for soon."""


@dataclass(slots=True)
class Work:
    """The training that goes on, in device time."""

    training: Training
    started: float
    ended: float
    """If it is not frozen meanwhile."""
    lost: float = 0.0
    """The device's `lost_to_pauses` when this was planned."""


@dataclass(slots=True)
class Device:
    """One life of a device: a crash ends it, and what is still under way to or from it with it."""

    index: int
    """In device order."""
    core: client.ClientCore
    line: Line
    train: Callable[[wire.ModelMessage, int], Training]
    training_time: Callable[[int], float]
    """Seconds of a training of so many steps, at the speed that the device has now."""
    set_share: Callable[[float], float]
    """Give it another CPU share; by what factor everything takes longer from there on."""
    working_on: Work | None = None
    trainings: dict[int, Training] = field(default_factory=dict)
    """Those whose update has not left yet, by sequence number: one that goes on, one in the send
    buffer."""
    memory: Memory | None = None
    """What it would find on its disk after a restart."""
    alive: bool = True
    frozen_at: float | None = None
    lost_to_pauses: float = 0.0
    """Seconds in all."""
    cut_off: bool = False
    """No packet passes."""
    silent_since: float = math.inf
    """When it was cut off or frozen, whichever came first: the broker has heard nothing since."""
    given_up: bool = False
    """The broker took it for gone: its client has to connect anew."""
    held: list[Callable[[], None]] = field(default_factory=list)
    """What comes to a frozen client, for when it goes on."""
    kept: list[Callable[[], None]] = field(default_factory=list)
    """What could not pass while it was cut off, for when it can."""

    def end(self) -> None:
        """It is gone, and what is under way to and from it is lost."""
        self.alive = False
        self.line.drop()
