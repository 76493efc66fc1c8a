"""The segments of a run at its router: classes, background traffic, state, and use."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Mapping, Sequence

from agents.config import WAYS, RouterConfig, Segment, Way
from agents.device.delayline import Impairment
from agents.device.link import LinkError, run
from agents.device_actions import Disconnect, Reconnect, SegmentAction, SetBackground, SetLink
from agents.links.background import is_flows
from agents.mqtt import topics
from agents.router import background
from agents.router.background import RoutedTraffic, TrafficStates
from agents.router.segments import FIELDS, FIRST_LEAF, INTERFACES, Leaf, SegmentTree, ShapedSegments
from agents.wire.messages import NetworkProbe, NetworkUse, SegmentUse

_FLOW_LEAVES = 16
"""Leaves of a source of transfers. Each open transfer has one of its own; further ones share them."""


class Network:
    """Methods raise LinkError and OSError."""

    def __init__(self, cfg: RouterConfig) -> None:
        self._config = cfg
        used = _used(cfg)
        leaves: dict[Way, list[Leaf]] = {way: [] for way in WAYS}
        self._devices: dict[int, str] = {}
        """Device of each leaf, by the leaf's number."""
        for number, (device, attached) in enumerate(cfg.attached.items(), FIRST_LEAF):
            self._devices[number] = device
            for way in WAYS:
                leaves[way].append(Leaf(number, attached, FIELDS[way], cfg.addresses[device]))
        number = FIRST_LEAF + len(cfg.attached)
        self._sources: list[RoutedTraffic] = []
        for segment in used:
            for traffic in segment.background:
                count = _FLOW_LEAVES if is_flows(traffic) else 1
                made = [
                    Leaf(one, segment.name, "src", f"198.18.{one >> 8}.{one & 255}", is_first=count == 1)
                    for one in range(number, number + count)
                ]
                number += count
                leaves[traffic.way] += made
                addresses = [leaf.address for leaf in made]
                self._sources.append(
                    RoutedTraffic(segment.name, traffic, cfg.background_seed, addresses, cfg.dilation)
                )
        self._shaped = ShapedSegments(SegmentTree(used, leaves))
        self._epoch: float | None = None
        self._off: set[int] = set()
        """Numbers of the sources that are switched off."""
        self._cut: set[str] = set()
        """Segments that are cut."""
        self._generator: subprocess.Popen[bytes] | None = None
        self._is_measuring = False

    @property
    def _tree(self) -> SegmentTree:
        return self._shaped.tree

    def impairments(self, device: str) -> list[Impairment]:
        """Return what the packets of `device` pass in each direction, besides the device's own link."""
        name = self._config.attached.get(device)
        path = [] if name is None else self._tree.path(name)
        if any(segment.name in self._cut for segment in path):
            return [Impairment(loss=1.0)]
        found = [Impairment(one.rtt / 2, one.jitter, one.loss) for one in path]
        return [one for one in found if one != Impairment()]

    def set_up(self, inside: str) -> NetworkProbe:
        """Shape the packets of `inside`, the devices' interface, and measure the segments."""
        self._shaped.set_up(inside)
        if flows := [one for one in self._sources if is_flows(one.traffic)]:
            self._loop(flows)
        found = self.measure(self.segments)
        if self._sources:
            self._generator = subprocess.Popen(background.command(self._sources), stdin=subprocess.PIPE)
        return found

    def measure(self, names: Collection[str]) -> NetworkProbe:
        """The bytes of a measurement are not counted as use."""
        self._is_measuring = True
        figures = self._shaped.measure(names)
        self._shaped.use(time.monotonic())
        self._is_measuring = False
        return NetworkProbe(topics.ROUTER, time.monotonic(), figures)

    def close(self) -> None:
        if self._generator is not None and self._generator.stdin is not None:
            self._generator.stdin.close()
            self._generator.wait()

    def start(self, run_time: float) -> None:
        """Shape all packets, and begin the background traffic. `run_time`: device time now, in
        seconds."""
        self._shaped.start()
        self._epoch = time.monotonic() - run_time * self._config.dilation
        self._order()

    @property
    def segments(self) -> Mapping[str, Segment]:
        """Segments on the ways of this router's devices, as they are now, by name."""
        return self._shaped.tree.segments

    def act(self, segment: str, action: SegmentAction) -> set[str]:
        """Return the devices below the segment, whose impairments may have changed."""
        match action:
            case SetLink(changes):
                self._shaped.change(self.segments[segment].with_changes(changes))
            case Disconnect():
                self._cut.add(segment)
            case Reconnect():
                self._cut.discard(segment)
            case SetBackground(on):
                numbers = {n for n, one in enumerate(self._sources) if one.segment == segment}
                self._off = self._off - numbers if on else self._off | numbers
        self._order()
        below = self._tree.below(segment)
        return {device for device, name in self._config.attached.items() if name in below}

    def use(self, now: float) -> NetworkUse | None:
        """Since the last call; None if nothing has passed, or during a measurement. Raises LinkError if
        the background traffic has ended."""
        if self._is_measuring:
            return None
        if self._generator is not None and (code := self._generator.poll()) is not None:
            self._generator = None
            raise LinkError(f"the background traffic ended with exit code {code}")
        seconds, passed = self._shaped.use(now)
        found = []
        for way in INTERFACES:
            for name in self._tree.segments:
                if not passed[way].get(self._tree.number(name)):
                    continue
                devices, others = {}, 0
                for leaf in self._tree.leaves_of(name, way):
                    size = passed[way].get(leaf.number, 0)
                    if (device := self._devices.get(leaf.number)) is None:
                        others += size
                    elif size:
                        devices[device] = size
                found.append(SegmentUse(name, way, devices, others))
        return NetworkUse(topics.ROUTER, now, seconds, found) if found else None

    def _order(self) -> None:
        if self._generator is None or self._generator.stdin is None:
            return
        cut = {name for one in self._cut for name in self._tree.below(one)}
        halted = [number for number, one in enumerate(self._sources) if one.segment in cut]
        try:
            self._generator.stdin.write(
                background.line(TrafficStates(self._epoch, sorted(self._off), halted))
            )
            self._generator.stdin.flush()
        except BrokenPipeError as error:
            raise LinkError("the background traffic has ended") from error

    def _loop(self, sources: Sequence[RoutedTraffic]) -> None:
        """Redirect the transfers' packets, on the loopback interface, to the classes."""
        run(["ip", "link", "set", "dev", "lo", "mtu", "1500", "gso_max_segs", "1"])
        run(["ip", "address", "add", f"{background.SINK[0]}/32", "dev", "lo"])
        run(["tc", "qdisc", "replace", "dev", "lo", "clsact"])
        for source in sources:
            for address in source.addresses:
                run(["ip", "address", "add", f"{address}/32", "dev", "lo"])
                run(
                    f"tc filter add dev lo ingress protocol ip u32 match ip src {address}/32 "
                    f"action mirred egress redirect dev {INTERFACES[source.traffic.way]}".split()
                )


def _used(cfg: RouterConfig) -> list[Segment]:
    """Segments on the way of any of this router's devices, parents first. In a Swarm, the router of the
    node with a segment's devices shapes it."""
    by_name: Mapping[str, Segment] = {segment.name: segment for segment in cfg.segments}
    names: set[str] = set()
    for segment in cfg.attached.values():
        one: str | None = segment
        while one is not None and one not in names:
            names.add(one)
            one = by_name[one].parent
    return [segment for segment in cfg.segments if segment.name in names]
