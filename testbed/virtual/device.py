"""A device in virtual time: its client, its training in progress, and pauses, outages and crashes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

from agents import events
from agents.client import core as client
from agents.client.factory import Timing
from agents.config import silence_timeout
from agents.fields import FeatureAction
from agents.pipeline.interface import SimulatedExchange
from agents.rules.client_half import SavedVectors
from agents.timing.nanoseconds import Nanoseconds, from_seconds
from agents.wire import payloads
from testbed.virtual.network import Line
from testbed.virtual.timing import ComputeTimes


class LazyTraining(Protocol):
    """A local training whose result is computed when it is needed."""

    steps: int
    work: float
    """Work of the whole training in steps of a full mini-batch."""
    due: Nanoseconds
    """Device time at which the training is expected to end. Those that end first are computed first."""

    def outcome(self) -> client.Outcome:
        """Computed at the first call."""

    def shorten(self, steps: int) -> None: ...

    def request_result(self) -> None:
        """The result will be needed soon."""


class VirtualHalf:
    """A feature of one device, over all its restarts. The methods do nothing by default. Each is called
    at device time `now`, those that return records with the records to write."""

    def freeze(self, now: Nanoseconds) -> None: ...

    def thaw(self, now: Nanoseconds) -> None: ...

    def allows_start(self, now: Nanoseconds, *, joins: bool) -> bool:
        """Whether the device has power to start. `joins`: it takes part in the run from now on."""
        return True

    def start(self, now: Nanoseconds, duration: Nanoseconds, *, is_frozen: bool) -> None:
        """The client starts, which takes it `duration`."""

    def stop(self, now: Nanoseconds) -> Iterable[events.Record]:
        """The client's work ends."""
        return ()

    def leave(self, now: Nanoseconds) -> None:
        """The device takes no part in the run until it joins again."""

    def compute(self, now: Nanoseconds, duration: Nanoseconds, timed: Nanoseconds) -> None:
        """From now on, the device computes for `duration`, in place of what it has computed. `timed`:
        until the training ends, which may be later by the device's `timing`."""

    def compute_more(self, now: Nanoseconds, duration: Nanoseconds) -> None:
        """The device computes something more for `duration`."""

    def set_share(self, now: Nanoseconds, share: float) -> None:
        """`share`: host cores."""

    def receive(self, now: Nanoseconds, dispatch: int, received: int, sent: int) -> None:
        """`dispatch`: of the model; 0 for another message. `received`, `sent`: bytes of the message, and
        of its acknowledgements."""

    def send(self, now: Nanoseconds, sent: int, received: int) -> None:
        """A message that is not an update. `sent`, `received`: bytes of the message, and of its
        acknowledgements."""

    def send_update(
        self, now: Nanoseconds, sequence: int, sent: int, received: int
    ) -> Iterable[events.Record]:
        return ()

    def begin_training(self, now: Nanoseconds, sequence: int, dispatch: int) -> Iterable[events.Record]:
        """`sequence`: of the update that answers `dispatch`."""
        return ()

    def end_training(self, now: Nanoseconds) -> None: ...

    def act(self, now: Nanoseconds, action: FeatureAction) -> None: ...


_PATIENCE = from_seconds(silence_timeout())
"""Silence after which the broker drops most clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingTraining:
    """The training in progress. `started` is a device time; all other times exclude pauses
    (`VirtualDevice.running_time`)."""

    training: LazyTraining
    started: Nanoseconds
    since: Nanoseconds
    """Running time at which `done` steps were done. From then to `end_time`, the other steps are spread
    evenly."""
    done: Fraction = Fraction()
    """Steps done at `since`, perhaps a fraction."""
    computed: Nanoseconds
    """Running time at which all steps will be computed if the CPU share stays the same."""
    floor: Nanoseconds
    """Earliest running time at which the training may end, by the device's `timing`."""

    @property
    def end_time(self) -> Nanoseconds:
        return max(self.computed, self.floor)

    def progress(self, at: Nanoseconds) -> Fraction:
        """Steps done at running time `at`."""
        steps, duration = self.training.steps, self.end_time - self.since
        if at >= self.end_time:
            return Fraction(steps)
        at = max(at, self.since)
        return self.done + (steps - self.done) * Fraction(at - self.since, duration)

    def slowed_down(self, at: Nanoseconds, factor: float) -> OngoingTraining:
        """From running time `at` on, computing takes `factor` times as long."""
        left = round(max(0, self.computed - at) * factor)
        return replace(self, since=at, done=self.progress(at), computed=at + left)

    def delayed(self, at: Nanoseconds, by: Nanoseconds) -> OngoingTraining:
        """From running time `at` on, the device computes something else for `by`."""
        since = max(at, self.since)
        return replace(self, since=since, done=self.progress(at), computed=max(at, self.computed) + by)

    def cut_short(self, at: Nanoseconds) -> OngoingTraining:
        """Interrupted at running time `at`, the training ends with the current step."""
        steps = math.ceil(self.progress(at))
        ended = at
        if steps > self.done:
            share = (steps - self.done) / (self.training.steps - self.done)
            ended = self.since + math.ceil(share * (self.end_time - self.since))
        self.training.shorten(steps)
        return replace(self, computed=ended, floor=ended)


@dataclass(slots=True, kw_only=True)
class VirtualDevice:
    """State of a device from a start until it crashes, with which its messages in flight are lost, or
    leaves."""

    index: int
    """Position in device order."""
    name: str = ""
    core: client.ClientCore
    line: Line
    train: Callable[[client.Train], LazyTraining]
    speed: ComputeTimes
    timing: Timing
    update_size: int = 0
    """Bytes."""
    working_on: OngoingTraining | None = None
    """The latest training, which may have ended."""
    trainings: dict[int, LazyTraining] = field(default_factory=dict)
    """Trainings whose update is not sent yet, by sequence number: at most one in progress and one in the
    send buffer."""
    exchange: SimulatedExchange | None = None
    """Messages between clients, such as mask shares; None if the run has none."""
    features: tuple[VirtualHalf, ...] = ()
    memory: SavedVectors | None = None
    """Vectors that the client would find on its disk after a restart."""
    alive: bool = True
    leaving: bool = False
    """True if the client has ended, and its last messages, such as its goodbye, have not yet arrived."""
    restarts_with_power: bool = False
    """Whether the device starts when its power returns."""
    next_life: Callable[[Nanoseconds], None] | None = None
    """Starts the device after it has left, if that was ordered while it was leaving."""
    frozen_at: Nanoseconds | None = None
    """Device time at which the current pause began; None without a pause."""
    lost_to_pauses: Nanoseconds = 0
    """Duration of all pauses but the current one."""
    unplugged: bool = False
    """Whether an action has disconnected the device."""
    all_lost: bool = False
    """True if the link loses every packet, or is too slow for a connection."""
    patience: Nanoseconds = _PATIENCE
    """Silence after which the broker drops the client."""
    silent_since: Nanoseconds | None = None
    """Device time at which the device was cut off or paused, whichever was first; None if it is
    neither."""
    given_up: bool = False
    """True if the broker has dropped the client, which then has to connect again."""
    held_by_pause: list[Callable[[], None]] = field(default_factory=list)
    """Messages that reached the client while it was paused; called when it resumes."""
    held_by_network: list[Callable[[], None]] = field(default_factory=list)
    """Messages that could not pass while the device was cut off; called when packets pass again."""
    under_way: list[Callable[[], payloads.UpdateMessage]] = field(default_factory=list)
    """Functions that make the updates in flight, in the order of sending."""

    @property
    def is_cut_off(self) -> bool:
        """No packets pass between the device and the server."""
        return self.unplugged or self.all_lost or self.line.is_cut

    def last_awake(self, now: Nanoseconds) -> Nanoseconds:
        """Latest device time, up to `now`, at which the device was not paused."""
        return now if self.frozen_at is None else self.frozen_at

    def running_time(self, now: Nanoseconds) -> Nanoseconds:
        """Device time without pauses."""
        return self.last_awake(now) - self.lost_to_pauses

    def freeze(self, now: Nanoseconds) -> None:
        self.frozen_at = now
        for feature in self.features:
            feature.freeze(now)

    def thaw(self, now: Nanoseconds) -> None:
        """Handles the messages that arrived during the pause."""
        self.lost_to_pauses += now - self.last_awake(now)
        self.frozen_at = None
        for feature in self.features:
            feature.thaw(now)
        release(self.held_by_pause)

    def plug(self, *, connected: bool) -> None:
        """After a connection, the messages that have waited pass first."""
        self.unplugged = not connected
        self.release_if_free()
        self.line.plug(connected=connected)

    def change_link(self, changes: Mapping[str, float | None]) -> None:
        """Change fields of `agents.config.AccessLink`. If the link loses every packet, or is too slow
        for a connection, the device is cut off."""
        self.all_lost = self.line.link.with_changes(changes).is_outage
        self.release_if_free()
        self.line.change(changes)

    def release_if_free(self) -> None:
        """Pass the messages that have waited, unless the device is cut off."""
        if not self.is_cut_off:
            release(self.held_by_network)

    def end(self) -> None:
        """Messages in flight to and from the device are lost."""
        self.alive = self.leaving = False
        self.line.drop()

    def leave(self, now: Nanoseconds) -> None:
        """Messages in flight from the device, even a paused one, still arrive."""
        self.alive, self.leaving = False, True
        self.line.down.drop()
        self.thaw(now)

    def finish_leaving(self) -> None:
        """The device's goodbye has arrived."""
        self.leaving = False
        self.line.down.drop()


def release(waiting: list[Callable[[], None]]) -> None:
    """Empty the list and call its callbacks in order. A callback may append itself to the list to wait
    again."""
    released, waiting[:] = waiting[:], []
    for callback in released:
        callback()
