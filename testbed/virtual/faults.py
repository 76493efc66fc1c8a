"""What actions do to devices in virtual time. What they mean is in `agents.device_actions`.

A client that starts again is ready after what that costs it, where that is known. What was under way to
or from a device that crashes is lost; what could not pass while it was disconnected arrives once it can,
as TCP would have it. So does the end of a client that ends meanwhile, farewell included.

All that unless the broker has given up on who was silent for too long, disconnected or paused. Then the
device is offline, and what was under way is lost; it is ready again as soon as packets pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, assert_never

from agents.device_actions import (
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
)
from agents.timing.nanoseconds import Nanoseconds
from agents.wire import payloads
from testbed.virtual.device import Device, OngoingTraining, release


class World(Protocol):
    """What the actions need of `testbed.virtual.simulation.Simulation`."""

    @property
    def now(self) -> Nanoseconds: ...

    def device(self, name: str) -> Device:
        """The life that the device `name` has, or had last."""
        ...

    def new_device(self, name: str) -> Device:
        """A new life of the device `name`, after the one that there was."""
        ...

    def report_status(self, name: str, state: str) -> None:
        """The aggregator hears that `name` is `joining`, `ready` or `offline`."""

    def say_last(
        self, device: Device, words: Sequence[payloads.UpdateMessage], heard: Callable[[], None]
    ) -> None:
        """The aggregator hears what is under way from `device`, then its last `words`; `heard` is called
        once its end is heard of, too."""

    def when_reachable(self, device: Device, callback: Callable[[], None]) -> None:
        """Call it as soon as `device`'s packets pass and its client runs."""

    def at(self, time: Nanoseconds, device: Device, callback: Callable[[], None]) -> None:
        """Call it at `time`, or at once where that is over."""

    def work_on(self, device: Device, work: OngoingTraining) -> None:
        """What the device works on is `work` now."""


def act(world: World, name: str, action: Action, now: Nanoseconds) -> None:
    """Do `action` to the device `name` at `now`; one that changes nothing has no effect."""
    device = world.device(name)
    match action:
        case SetCpu(cpu):
            _set_share(world, device, cpu, now)
        case SetLink(changes):
            device.relink(changes)
            _heed_link(world, name, device, now)
        case Crash():
            if device.alive:
                _crash(world, name, device)
        case Leave():
            if device.alive:
                _leave(world, name, device, now)
        case Restart() | Join():
            if device.leaving and isinstance(action, Join):
                device.plug(connected=True)
                _heed_link(world, name, device, now)
            if device.leaving:
                device.next_life = partial(_begin, world, name, device, action)
            elif not device.alive:
                _begin(world, name, device, action, now)
        case Pause():
            if device.frozen_at is None:
                device.freeze(now)
                _fall_silent(world, name, device, now)
        case Resume():
            device.thaw(now)
            _come_back(world, name, device)
        case Disconnect() | Reconnect():
            device.plug(connected=isinstance(action, Reconnect))
            _heed_link(world, name, device, now)
        case _:
            assert_never(action)


def _heed_link(world: World, name: str, device: Device, now: Nanoseconds) -> None:
    """Its packets pass from now on, or none does."""
    if device.cut_off:
        _fall_silent(world, name, device, now)
    else:
        _come_back(world, name, device)


def _fall_silent(world: World, name: str, device: Device, now: Nanoseconds) -> None:
    """From now on the broker hears nothing of it. Its last packet is taken to be of just before."""
    if device.silent_since is not None:
        return
    device.silent_since = now

    def give_up() -> None:
        if (device.alive or device.leaving) and device.silent_since == now:
            device.line.drop()
            device.held_by_network.clear()
            if device.leaving:
                _gone(world, name, device)
            else:
                device.given_up = True
                world.report_status(name, "offline")

    world.at(now + device.patience, device, give_up)


def _come_back(world: World, name: str, device: Device) -> None:
    """The broker hears it again, unless something else keeps it silent."""
    if device.cut_off or device.frozen_at is not None:
        return
    device.silent_since = None
    if device.alive and device.given_up:
        device.given_up = False
        world.report_status(name, "ready")


def _leave(world: World, name: str, device: Device, now: Nanoseconds) -> None:
    """Its client says goodbye, after all that it has sent; or the broker does, where it is silent."""
    words = [one.message() for one in device.core.leave(now)]
    if device.given_up:
        device.end()
        return
    device.leave(now)
    _come_back(world, name, device)
    world.say_last(device, words, lambda: _gone(world, name, device))


def _gone(world: World, name: str, device: Device) -> None:
    """The server has heard of the end of a client that was leaving."""
    device.left()
    world.report_status(name, "offline")
    if device.next_life is not None:
        device.next_life(world.now)


def _crash(world: World, name: str, device: Device) -> None:
    """The server hears that it is offline as soon as packets pass, or from the broker."""
    device.end()
    if device.given_up:
        return

    def passes() -> None:
        world.report_status(name, "offline")

    def give_up() -> None:
        if passes in device.held_by_network:
            device.held_by_network.remove(passes)
            world.report_status(name, "offline")

    if not device.cut_off:
        passes()
    else:
        assert device.silent_since is not None  # noqa: S101  (it is cut off)
        device.held_by_network.append(passes)
        world.at(device.silent_since + device.patience, device, give_up)


def _begin(world: World, name: str, last: Device, action: Restart | Join, now: Nanoseconds) -> None:
    """A life begins after `last`. What froze the device or cut it off still does, unless it joins."""
    if isinstance(action, Join) and not last.all_lost:
        release(last.held_by_network)  # the end of the last life, where nobody has heard of it
    device = world.new_device(name)
    device.all_lost = last.all_lost
    if isinstance(action, Join):
        device.line.plug(connected=True)
    else:
        device.unplugged = last.unplugged
        device.frozen_at = None if last.frozen_at is None else now
    if device.cut_off or device.frozen_at is not None:
        device.silent_since = last.silent_since
        device.held_by_network = last.held_by_network

    def announce() -> None:
        world.report_status(name, "joining")
        world.report_status(name, "ready")

    ready = now + device.speed.starting()
    world.at(ready, device, lambda: world.when_reachable(device, announce))


def _set_share(world: World, device: Device, share: float, now: Nanoseconds) -> None:
    """What is left to compute of the training that goes on takes as much longer as all that follows;
    what its `timing` gives does not."""
    factor = device.speed.set_share(share)
    work, running = device.working_on, device.running_time(now)
    if work is not None and device.alive and work.ended > running:
        world.work_on(device, work.slower(running, factor))
