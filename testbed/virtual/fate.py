"""What a step of the scenario makes of a device in virtual time (`testbed.timeline` has the meanings).

A restart takes no time here: how long a client needs to start is not part of the experiment. What was
under way to or from a device that crashes is lost; what could not pass while it was disconnected arrives
once it can, as TCP would have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from agents import wire
from agents.client import core as client
from testbed.timeline import (
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


class World(Protocol):
    """What `testbed.virtual.simulation.Simulation` lets happen."""

    def device(self, name: str) -> Device: ...
    def begin_life(self, name: str) -> Device: ...
    def say(self, name: str, state: str) -> None: ...
    def tell(self, name: str, message: wire.UpdateMessage) -> None: ...
    def now_and_then(self, happens: Callable[[], None], device: Device) -> None: ...
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
            device.end()
            world.say(name, "offline")
        case Leave() if device.alive:
            for wanted in device.core.leave(now):
                if isinstance(wanted, client.SendUpdate):
                    world.tell(name, wanted.message())
            device.end()
            world.say(name, "offline")
        case Pause() if device.frozen_at is None:
            device.frozen_at = now
        case Resume() if device.frozen_at is not None:
            device.lost_to_pauses += now - device.frozen_at
            device.frozen_at = None
            _let_go(device.held)
        case Disconnect():
            device.cut_off = True
            device.line.plug(connected=False)
        case Reconnect():
            device.cut_off = False
            _let_go(device.kept)
            device.line.plug(connected=True)


def _begin(world: World, name: str, action: Action, now: float) -> None:
    """A life begins where none is. What froze the device or cut it off still does, unless it joins."""
    last = world.device(name)
    if last.alive:
        return
    device = world.begin_life(name)
    if isinstance(action, Join):
        device.line.plug(connected=True)
    else:
        device.cut_off = last.cut_off
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
