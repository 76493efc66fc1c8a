"""Background traffic of the segments in virtual time (`agents.links.background`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from agents.config import Background, Segment, path_of
from agents.device_actions import Action, Disconnect, Reconnect, SetBackground, SetLink
from agents.links import background
from agents.mqtt.topics import ROUTER
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import NetworkUse, SegmentUse
from testbed.plan.agent_configs import RunSpec
from testbed.virtual.fair_shares import Pipe, Transfer
from testbed.virtual.faults import World, update_reachability
from testbed.virtual.network import VirtualNetwork
from testbed.virtual.part import VirtualFleet, Write
from testbed.virtual.timing import LINK, EventQueue

_USE_EVERY: Nanoseconds = SECOND
"""Minimum nanoseconds between two records of the segments' use."""


class SegmentTraffic(VirtualFleet):
    def __init__(
        self,
        queue: EventQueue,
        network: VirtualNetwork,
        segments: Mapping[str, Segment],
        devices: Mapping[str, Sequence[str]],
        seed: int,
        write: Callable[[NetworkUse], None],
    ) -> None:
        """`segments`: a parent comes before its children. `devices`: segment -> the devices below it.
        `write`: called with the use of the segments."""
        self.events, self.network = queue, network
        self._write = write
        self.devices = devices
        self._recorded: Nanoseconds = 0
        """Time up to which the use of the segments is recorded."""
        self.planned = 0
        """Number of planned callbacks of the background traffic. Each of them plans the next one."""
        network.add_segments(segments.values())
        self._sources: dict[str, list[_TrafficSource]] = {
            name: [self._source(one, name, segments, seed) for one in segment.background]
            for name, segment in segments.items()
        }

    def begin(self, world: World) -> Collection[str]:
        self._world = world
        return ()

    def start(self) -> None:
        for sources in self._sources.values():
            for source in sources:
                source.plan_next()

    def act(self, name: str, action: Action) -> bool:
        if name not in self.devices:
            return False
        match action:
            case SetLink(changes):  # also for messages in flight
                self.network.change(name, changes)
            case Disconnect() | Reconnect():  # messages in flight wait while the segment is cut
                self.network.cut(name, is_cut=isinstance(action, Disconnect))
            case SetBackground(on):  # transfers in progress end at once when it is switched off
                for source in self._sources[name]:
                    source.switch(on=on)
            case _:
                raise ValueError(f"{action} does not apply to a segment")
        for below in self.devices[name]:
            device = self._world.device(below)
            device.release_if_free()
            update_reachability(self._world, below, device, self.events.now)
        return True

    @property
    def idle_callbacks(self) -> int:
        """Number of planned callbacks that only continue the background traffic; 0 while a transfer is
        in progress that it may delay."""
        if not self.planned:
            return 0
        is_idle = all(
            self.network.shares_of(name, way).is_idle
            for name, segment in self.network.segments.items()
            for way in segment.pipes
        )
        return self.planned if is_idle else 0

    def record(self, *, at_end: bool) -> None:
        """Record the use since the last record, if this is due or `at_end`, and anything has passed."""
        now, since = self.events.now, self._recorded
        if now == since or (now - since < _USE_EVERY and not at_end):
            return
        self._recorded = now
        found = []
        for name, segment in self.network.segments.items():
            for way, pipe in segment.pipes.items():
                self.network.shares_of(name, way).count_use()
                devices = {device: round(bits / 8) for device, bits in pipe.devices_bits.items()}
                other = round(pipe.background_bits / 8)
                pipe.devices_bits, pipe.background_bits = {}, 0.0
                if other or any(devices.values()):
                    found.append(SegmentUse(name, way, devices, other))
        if found:
            self._write(NetworkUse(ROUTER, to_seconds(now), to_seconds(now - since), found))

    def _source(
        self, one: Background, name: str, segments: Mapping[str, Segment], seed: int
    ) -> _TrafficSource:
        path = tuple(self.network.segments[part.name].pipes[one.way] for part in path_of(name, segments))
        return _TrafficSource(self, one, name, path, seed)


class _TrafficSource:
    def __init__(
        self, traffic: SegmentTraffic, one: Background, name: str, path: tuple[Pipe, ...], seed: int
    ) -> None:
        self._traffic, self._path = traffic, path
        self._shares = traffic.network.shares_of(name, one.way)
        self._is_on = True
        self._is_flows = background.is_flows(one)
        self._rate = 0.0
        """bit/s while it is on."""
        self._changes: Iterator[tuple[float, float]] = (
            background.transfers(one, seed, name)
            if self._is_flows
            else background.rates(one, seed, name)
        )
        self._transfers: dict[int, Transfer] = {}
        self._begun = 0

    def plan_next(self) -> None:
        at, value = next(self._changes, (None, 0.0))
        if at is not None:
            self._traffic.planned += 1
            self._traffic.events.plan(from_seconds(at), LINK, 0, partial(self._due, value))

    def _due(self, value: float) -> None:
        self._traffic.planned -= 1
        if not self._is_flows:
            self._rate = value
            if self._is_on:
                self._shares.set_fixed(self, self._path, value)
        elif self._is_on:
            number, self._begun = self._begun, self._begun + 1
            end = partial(self._transfers.__delitem__, number)
            bits = 8 * self._traffic.network.background_bytes(value)
            self._transfers[number] = self._shares.enter(bits, self._path, end)
        self.plan_next()

    def switch(self, *, on: bool) -> None:
        if on == self._is_on:
            return
        self._is_on = on
        if not self._is_flows:
            self._shares.set_fixed(self, self._path, self._rate if on else 0.0)
        elif not on:
            for transfer in self._transfers.values():
                self._shares.leave(transfer)
            self._transfers.clear()


def make_fleet(
    spec: RunSpec, queue: EventQueue, network: VirtualNetwork, write: Write
) -> SegmentTraffic | None:
    plan = spec.plan
    if not plan.segments:
        return None
    return SegmentTraffic(queue, network, plan.segments, plan.devices_below, spec.topology.seed, write)
