"""What a step of the scenario makes of a device in virtual time (meanings: `testbed.topology.timeline`).

A restart takes no time here: how long a client needs to start is not part of the experiment. What was
under way to or from a device that crashes is lost; what could not pass while it was disconnected arrives
once it can, as TCP would have it. So does the end of a client that ends meanwhile, farewell included.

All that unless the broker has given up on who was silent for too long, disconnected or paused. Then the
device is offline, and what was under way is lost; it is ready again as soon as packets pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from agents import wire
from agents.client import core as client
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
)
from testbed.virtual.device import Device, Work

_PATIENCE = 45.0
"""Seconds of silence after which the broker gives up on a client: one and a half times its keep-alive.
Its last packet is taken to be of the moment before."""


class World(Protocol):
    """What `testbed.virtual.simulation.Simulation` lets happen."""

    def device(self, name: str) -> Device: ...
    def begin_life(self, name: str) -> Device: ...
    def say(self, name: str, state: str) -> None: ...
    def tell(self, name: str, message: wire.UpdateMessage) -> None: ...
    def now_and_then(self, happens: Callable[[], None], device: Device) -> None: ...
    def at(self, time: float, happens: Callable[[], None], device: Device) -> None: ...
    def work_on(self, device: Device, work: Work) -> None: ...


def act(world: World, name: str, action: Action, now: float) -> None:
    """Do `action` to the device `name` at `now`, in seconds."""
    match action:
        case Restart() | Join():
            _begin(world, name, action, now)
            return
    device = world.device(name)
    match action:
        case SetCpu(share):
            _set_share(world, device, share, now)
        case SetLink(changes):
            device.line.change(changes)
        case Crash() if device.alive:
            _end(world, name, device, [], now)
        case Leave() if device.alive:
            sent = [one for one in device.core.leave(now) if isinstance(one, client.SendUpdate)]
            _end(world, name, device, sent, now)
        case Pause() if device.frozen_at is None:
            device.frozen_at = now
            _fall_silent(world, name, device, now)
        case Resume() if device.frozen_at is not None:
            device.lost_to_pauses += now - device.frozen_at
            device.frozen_at = None
            _let_go(device.held)
            _come_back(world, name, device)
        case Disconnect():
            device.cut_off = True
            device.line.plug(connected=False)
            _fall_silent(world, name, device, now)
        case Reconnect():
            device.cut_off = False
            _let_go(device.kept)
            device.line.plug(connected=True)
            _come_back(world, name, device)


def _fall_silent(world: World, name: str, device: Device, now: float) -> None:
    """From now on the broker hears nothing of it."""
    if device.silent_since < now:
        return
    device.silent_since = now

    def is_given_up() -> None:
        if device.alive and device.silent_since == now:
            device.given_up = True
            device.line.drop()
            device.kept.clear()
            world.say(name, "offline")

    world.at(now + _PATIENCE, is_given_up, device)


def _come_back(world: World, name: str, device: Device) -> None:
    """The broker hears it again, unless something else keeps it silent."""
    if device.cut_off or device.frozen_at is not None:
        return
    device.silent_since = math.inf
    if device.alive and device.given_up:
        device.given_up = False
        world.say(name, "ready")


def _end(
    world: World, name: str, device: Device, farewell: Sequence[client.SendUpdate], now: float
) -> None:
    """The server hears its `farewell`, and that it is offline, as soon as packets pass; where that takes
    too long, the latter alone, from the broker."""
    messages = [one.message() for one in farewell]
    device.end()
    if device.given_up:
        return

    def passes() -> None:
        for message in messages:
            world.tell(name, message)
        world.say(name, "offline")

    def is_given_up() -> None:
        if passes in device.kept:
            device.kept.remove(passes)
            world.say(name, "offline")

    if not device.cut_off:
        passes()
    else:
        device.kept.append(passes)
        world.at(max(now, device.silent_since + _PATIENCE), is_given_up, device)


def _begin(world: World, name: str, action: Action, now: float) -> None:
    """A life begins where none is. What froze the device or cut it off still does, unless it joins."""
    last = world.device(name)
    if last.alive:
        return
    if isinstance(action, Join):
        _let_go(last.kept)  # the end of the last life, where nobody has heard of it
    device = world.begin_life(name)
    if isinstance(action, Join):
        device.line.plug(connected=True)
    else:
        device.cut_off, device.kept, device.silent_since = last.cut_off, last.kept, last.silent_since
        device.frozen_at = None if last.frozen_at is None else now

    def announces() -> None:
        world.say(name, "joining")
        world.say(name, "ready")

    world.now_and_then(announces, device)


def _set_share(world: World, device: Device, share: float, now: float) -> None:
    """What is left of the training that goes on takes as much longer as all that follows."""
    factor = device.set_share(share)
    work = device.working_on
    if work is None or not device.alive:
        return
    paused_for = 0.0 if device.frozen_at is None else now - device.frozen_at
    ends = work.ended + device.lost_to_pauses - work.lost + paused_for
    if ends > now:
        left = (ends - now) * factor
        # A pause that goes on is counted when it is over.
        work = Work(work.training, work.started, now + left - paused_for, device.lost_to_pauses)
        world.work_on(device, work)


def _let_go(waiting: list[Callable[[], None]]) -> None:
    """In their order; what has to wait again joins the list anew."""
    released, waiting[:] = waiting[:], []
    for happens in released:
        happens()
