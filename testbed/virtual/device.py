"""A device in virtual time: its client, what its time goes into, and what keeps it from working."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

from agents.client import core as client
from agents.client.training_times import Timing
from agents.config import silence_timeout
from agents.pipeline.interface import SimulatedExchange
from agents.rules.client_half import SavedVectors
from agents.timing.nanoseconds import Nanoseconds, from_seconds
from agents.wire import payloads
from testbed.virtual.network import Line
from testbed.virtual.timing import Speed


class Training(Protocol):
    """A local training whose result is computed when it is asked for."""

    steps: int
    due: Nanoseconds
    """When it ends, as far as is known: what is due first is best computed first."""

    def outcome(self) -> client.Outcome: ...

    def cut(self, steps: int) -> None:
        """Only `steps` steps of it are done."""

    def wanted(self) -> None:
        """Its result will be asked for soon."""


_PATIENCE = from_seconds(silence_timeout())


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingTraining:
    """The training that goes on. All its times but `started` are the device's running time
    (`Device.running_time`), in which no pause counts."""

    training: Training
    started: Nanoseconds
    """Device time."""
    since: Nanoseconds
    """When `done` steps were done: the rest is spread evenly from then to `ended`."""
    done: Fraction = Fraction()
    computed: Nanoseconds
    """When all steps are computed, at the share of the CPU that the device has now."""
    floor: Nanoseconds
    """When the time that `timing` gives it, whatever the share, is over."""

    @property
    def ended(self) -> Nanoseconds:
        return max(self.computed, self.floor)

    def progress(self, at: Nanoseconds) -> Fraction:
        """Steps done at running time `at`."""
        steps, duration = self.training.steps, self.ended - self.since
        if at >= self.ended:
            return Fraction(steps)
        at = max(at, self.since)
        return self.done + (steps - self.done) * Fraction(at - self.since, duration)

    def slower(self, at: Nanoseconds, factor: float) -> OngoingTraining:
        """The same from running time `at` on, where computing takes `factor` times as long."""
        left = round(max(0, self.computed - at) * factor)
        return replace(self, since=at, done=self.progress(at), computed=at + left)

    def later(self, at: Nanoseconds, by: Nanoseconds) -> OngoingTraining:
        """The same, where from running time `at` on the device computes something else for so long."""
        since = max(at, self.since)
        return replace(self, since=since, done=self.progress(at), computed=max(at, self.computed) + by)

    def cut_short(self, at: Nanoseconds) -> OngoingTraining:
        """The same, interrupted at running time `at`: the step that goes on is done to its end."""
        steps = math.ceil(self.progress(at))
        ended = at
        if steps > self.done:
            share = (steps - self.done) / (self.training.steps - self.done)
            ended = self.since + math.ceil(share * (self.ended - self.since))
        self.training.cut(steps)
        return replace(self, computed=ended, floor=ended)


@dataclass(slots=True, kw_only=True)
class Device:
    """One life of a device: a crash ends it, and what is still under way to or from it with it."""

    index: int
    """In device order."""
    name: str = ""
    core: client.ClientCore
    line: Line
    train: Callable[[payloads.ModelMessage, int], Training]
    speed: Speed
    timing: Timing
    update_size: int = 0
    """Bytes of an update."""
    working_on: OngoingTraining | None = None
    trainings: dict[int, Training] = field(default_factory=dict)
    """Those whose update has not left yet, by sequence number: one that goes on, one in the send
    buffer."""
    exchange: SimulatedExchange | None = None
    """What it says to other devices; None: nothing."""
    memory: SavedVectors | None = None
    """What it would find on its disk after a restart."""
    alive: bool = True
    leaving: bool = False
    """It has ended but for its goodbye, which follows what it sent before."""
    next_life: Callable[[Nanoseconds], None] | None = None
    """Begins the one that was ordered while it was leaving."""
    frozen_at: Nanoseconds | None = None
    lost_to_pauses: Nanoseconds = 0
    """In all, without a pause that goes on."""
    unplugged: bool = False
    all_lost: bool = False
    """Its link loses every packet, or is too slow for a connection."""
    patience: Nanoseconds = _PATIENCE
    """Silence after which the broker gives up on its client."""
    silent_since: Nanoseconds | None = None
    """When it was cut off or frozen, whichever came first: the broker has heard nothing since."""
    given_up: bool = False
    """The broker took it for gone: its client has to connect anew."""
    held_by_pause: list[Callable[[], None]] = field(default_factory=list)
    """What came to a frozen client, for when it resumes."""
    held_by_network: list[Callable[[], None]] = field(default_factory=list)
    """What could not pass while it was cut off, for when it can."""
    under_way: list[Callable[[], payloads.UpdateMessage]] = field(default_factory=list)
    """What makes the updates that have been sent and have not arrived."""

    @property
    def cut_off(self) -> bool:
        """Whether no packet passes."""
        return self.unplugged or self.all_lost

    def awake(self, now: Nanoseconds) -> Nanoseconds:
        """The last moment, up to `now`, at which it was not frozen."""
        return now if self.frozen_at is None else self.frozen_at

    def running_time(self, now: Nanoseconds) -> Nanoseconds:
        """Device time without the pauses."""
        return self.awake(now) - self.lost_to_pauses

    def freeze(self, now: Nanoseconds) -> None:
        self.frozen_at = now

    def thaw(self, now: Nanoseconds) -> None:
        """It goes on, and so does what came to it meanwhile."""
        self.lost_to_pauses += now - self.awake(now)
        self.frozen_at = None
        release(self.held_by_pause)

    def plug(self, *, connected: bool) -> None:
        """Packets pass, those that waited first; or none passes, either way."""
        self.unplugged = not connected
        self._release_if_free()
        self.line.plug(connected=connected)

    def relink(self, changes: Mapping[str, float | None]) -> None:
        """Change fields of the link (`agents.config.AccessLink`). A link that loses every packet, or
        is too slow for a connection, acts like a disconnected one."""
        self.all_lost = self.line.link.with_changes(changes).is_outage
        self._release_if_free()
        self.line.change(changes)

    def _release_if_free(self) -> None:
        if not self.cut_off:
            release(self.held_by_network)

    def end(self) -> None:
        """It is gone, and what is under way to and from it is lost."""
        self.alive = self.leaving = False
        self.line.drop()

    def leave(self, now: Nanoseconds) -> None:
        """It is gone, frozen or not, but what is under way from it arrives."""
        self.alive, self.leaving = False, True
        self.line.down.drop()
        self.thaw(now)

    def left(self) -> None:
        """Its goodbye has arrived."""
        self.leaving = False
        self.line.down.drop()


def release(waiting: list[Callable[[], None]]) -> None:
    """Call them in their order; what has to wait again joins the list anew."""
    released, waiting[:] = waiting[:], []
    for callback in released:
        callback()
