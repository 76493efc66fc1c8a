"""Actions on devices in virtual time, as `agents.device_actions` defines them.

A restarted client is ready after `virtual.start_time`. If a device crashes, its messages in flight are
lost in both directions. Messages that could not pass during a disconnection arrive when it is over, as
with TCP, and so do the client's goodbye and the report that the client has ended.

If a device is disconnected or paused for too long, the broker drops its client: it is offline, its
messages in flight are lost, and it is ready again as soon as packets pass.

A device without power powers off, as in a crash, and starts again when it has power.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, assert_never

from agents import device_actions as actions
from agents import events
from agents.fields import FeatureAction
from agents.timing.nanoseconds import Nanoseconds
from agents.wire import payloads
from testbed.virtual.device import OngoingTraining, VirtualDevice, release


class World(Protocol):
    """Simulation, as actions use it."""

    @property
    def now(self) -> Nanoseconds: ...

    def device(self, name: str) -> VirtualDevice:
        """The last state, if the device has ended."""
        ...

    def new_device(self, name: str) -> VirtualDevice: ...

    def report_status(self, name: str, state: str) -> None:
        """`joining`, `ready` or `offline`."""

    def send_last(
        self,
        device: VirtualDevice,
        messages: Sequence[payloads.UpdateMessage],
        on_gone: Callable[[], None],
    ) -> None:
        """Deliver the device's messages in flight, then its last messages (`messages`). Call `on_gone`
        when the aggregator knows that the device has ended."""

    def when_reachable(self, device: VirtualDevice, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as the device is connected and not paused."""

    def call_at(self, time: Nanoseconds, device: VirtualDevice, callback: Callable[[], None]) -> None:
        """If `time` is past, call now."""

    def set_work(self, device: VirtualDevice, work: OngoingTraining) -> None:
        """Make `work` the device's training in progress, and plan its end."""

    def stop_features(self, device: VirtualDevice) -> None:
        """The client's work ends."""

    def check(self, name: str) -> None:
        """Power the device off or on if its features require it now."""

    @property
    def names(self) -> Sequence[str]:
        """All devices."""
        ...

    def write(self, record: events.Record) -> None: ...


def act(world: World, name: str, action: actions.DeviceAction, now: Nanoseconds) -> None:
    """An action that does not fit the device's state has no effect, such as the crash of a device that
    is not running."""
    device = world.device(name)
    match action:
        case actions.SetCpu(cpu):
            _set_share(world, device, cpu, now)
        case actions.SetLink(changes):
            device.change_link(changes)
            update_reachability(world, name, device, now)
        case actions.Crash():
            device.restarts_with_power = False  # a crash without power lasts beyond its return
            if device.alive:
                _crash(world, name, device)
        case actions.Leave():
            if device.alive:
                _leave(world, name, device, now)
            device.restarts_with_power = False
            for feature in device.features:
                feature.leave(now)
        case actions.Restart() | actions.Join():
            if device.leaving and isinstance(action, actions.Join):
                device.plug(connected=True)
                update_reachability(world, name, device, now)
            if device.leaving:
                device.next_life = partial(_start, world, name, device, action)
            elif not device.alive:
                _start(world, name, device, action, now)
        case actions.Pause():
            if device.frozen_at is None:
                device.freeze(now)
                _fall_silent(world, name, device, now)
        case actions.Resume():
            device.thaw(now)
            _come_back(world, name, device)
            world.check(name)
        case actions.Disconnect() | actions.Reconnect():
            device.plug(connected=isinstance(action, actions.Reconnect))
            update_reachability(world, name, device, now)
        case FeatureAction():
            for feature in device.features:
                feature.act(now, action)
            world.check(name)
        case actions.PowerOff():
            device.restarts_with_power = device.alive
            if device.alive:
                _crash(world, name, device)
        case actions.PowerOn():
            if device.restarts_with_power:
                device.restarts_with_power = False
                _start(world, name, device, actions.Restart(), now)
        case _:
            assert_never(action)


def update_reachability(world: World, name: str, device: VirtualDevice, now: Nanoseconds) -> None:
    if device.is_cut_off:
        _fall_silent(world, name, device, now)
    else:
        _come_back(world, name, device)


def _fall_silent(world: World, name: str, device: VirtualDevice, now: Nanoseconds) -> None:
    """If the silence lasts too long, the broker drops the client. The last packet is assumed to have
    passed just before."""
    if device.silent_since is not None:
        return
    device.silent_since = now

    def give_up() -> None:
        if (device.alive or device.leaving) and device.silent_since == now:
            device.line.drop()
            device.held_by_network.clear()
            if device.leaving:
                _finish_leaving(world, name, device)
            else:
                device.given_up = True
                world.report_status(name, "offline")

    world.call_at(now + device.patience, device, give_up)


def _come_back(world: World, name: str, device: VirtualDevice) -> None:
    """Do nothing while the device is cut off or paused. Reconnect the client if the broker has dropped
    it."""
    if device.is_cut_off or device.frozen_at is not None:
        return
    device.silent_since = None
    if device.alive and device.given_up:
        device.given_up = False
        world.report_status(name, "ready")


def _leave(world: World, name: str, device: VirtualDevice, now: Nanoseconds) -> None:
    """The goodbye comes after the client's other messages. If the device is silent, the broker reports
    the end later."""
    world.stop_features(device)
    messages = [one.message() for one in device.core.leave(now)]
    if device.given_up:
        device.end()
        return
    device.leave(now)
    _come_back(world, name, device)
    world.send_last(device, messages, lambda: _finish_leaving(world, name, device))


def _finish_leaving(world: World, name: str, device: VirtualDevice) -> None:
    """Start the device again if that was ordered in the meantime."""
    device.finish_leaving()
    world.report_status(name, "offline")
    if device.next_life is not None:
        device.next_life(world.now)


def _crash(world: World, name: str, device: VirtualDevice) -> None:
    """If packets pass, the server learns at once that the device is offline; else when they pass again,
    or when the broker drops the client."""
    world.stop_features(device)
    device.end()
    if device.given_up:
        return

    def passes() -> None:
        world.report_status(name, "offline")

    def give_up() -> None:
        if passes in device.held_by_network:
            device.held_by_network.remove(passes)
            world.report_status(name, "offline")

    if not device.is_cut_off:
        passes()
    else:
        assert device.silent_since is not None  # noqa: S101  (it is cut off)
        device.held_by_network.append(passes)
        world.call_at(device.silent_since + device.patience, device, give_up)


def _start(
    world: World,
    name: str,
    last: VirtualDevice,
    action: actions.Restart | actions.Join,
    now: Nanoseconds,
) -> None:
    """`last`: the device's state when it ended. A pause or disconnection continues unless the device
    joins. A device without power starts when its power returns."""
    joins = isinstance(action, actions.Join)
    for feature in last.features:
        if not feature.allows_start(now, joins=joins):
            last.restarts_with_power = True
            if joins:
                last.thaw(now)
                last.plug(connected=True)
            return
    if joins and not last.all_lost:
        release(last.held_by_network)  # including the news of its last end
    device = world.new_device(name)
    device.all_lost = last.all_lost
    if joins:
        device.line.plug(connected=True)
    else:
        device.unplugged = last.unplugged
        device.frozen_at = None if last.frozen_at is None else now
    if device.is_cut_off or device.frozen_at is not None:
        device.silent_since = last.silent_since
        device.held_by_network = last.held_by_network

    def announce() -> None:
        world.report_status(name, "joining")
        world.report_status(name, "ready")

    for feature in device.features:
        feature.start(now, device.speed.starting(), is_frozen=device.frozen_at is not None)
    world.check(name)
    ready = now + device.speed.starting()
    world.call_at(ready, device, lambda: world.when_reachable(device, announce))


def _set_share(world: World, device: VirtualDevice, share: float, now: Nanoseconds) -> None:
    """Remaining steps of a training become slower or faster by the same factor as later ones. The
    minimum duration by `timing` stays."""
    factor = device.speed.set_share(share)
    for feature in device.features:
        feature.set_share(now, share)
    work, running = device.working_on, device.running_time(now)
    if work is not None and device.alive and work.end_time > running:
        world.set_work(device, work.slowed_down(running, factor))
    world.check(device.name)
