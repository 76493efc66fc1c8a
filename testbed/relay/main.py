"""The relay's process: `python -m testbed.relay.main CONFIG`. It runs until it is ended from outside.

In a run with local processes, the relay takes the place of the router: it has the router's login at the
broker, and receives the orders that change links.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import assert_never

import msgspec

from agents import config, disturbances
from agents.config import WAYS, AccessLink, BrokerAccess, Segment
from agents.device_actions import Disconnect, Reconnect, SetBackground, SetLink
from agents.disk import files
from agents.mqtt.topics import ROUTER, Topics
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage
from agents.timing.clock import make_realtime
from agents.wire import messages
from testbed.relay.segments import SegmentLane, SharedSegments, UnshapedLane
from testbed.relay.sockets import COUNTED, Lane, LinkLane, Relay, Traffic

_RECORD_SECONDS = 0.5
"""Seconds between two records of the queues' use, which the controller reads once per second."""
_USE_SECONDS = 1.0
"""Seconds between two reports of the segments' use."""
LinkAction = SetLink | Disconnect | Reconnect
_LANES = (SegmentLane, UnshapedLane)
"""Way through the segments to each of the targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    run: str
    broker: BrokerAccess
    targets: tuple[int, ...]
    """Ports on the broker's host: the broker's, and that of the server for measurements."""
    listeners: Mapping[str, tuple[int, ...]]
    links: Mapping[str, AccessLink]
    """Links without their segments. Devices without a link of their own are left out."""
    segments: Sequence[Segment]
    """In host time except for their background traffic. A parent comes before its children."""
    attached: Mapping[str, str]
    """Devices without a segment are left out."""
    traffic: str
    """Path of the file with the counters (testbed.relay.sockets) of the devices in `listeners`."""
    probe: str
    """Path of the file for the segments' measured rates (NetworkProbe)."""
    seed: int
    """Seed of the delays' jitter."""
    dilation: float = 1.0
    """Host seconds per second of device time."""


class OwnLink:
    """A device's link, without its segments."""

    def __init__(self, link: AccessLink, seed: int, device: str, traffic: Traffic) -> None:
        self.link = link
        self.up, self.down = (
            LinkLane(
                link,
                way,
                random.Random(f"{seed} {device} {way}").random,  # noqa: S311
                traffic.counter(device, counted),
            )
            for way, counted in zip(WAYS, COUNTED, strict=True)
        )

    def apply(self, action: LinkAction) -> None:
        """Called in the relay's thread."""
        now = time.monotonic()
        if isinstance(action, SetLink):
            self.link = self.link.with_changes(action.changes)
        for lane in (self.up, self.down):
            match action:
                case SetLink():
                    lane.change(self.link, now)
                case Disconnect():
                    lane.cut(now)
                case Reconnect():
                    lane.mend(now)
                case _:
                    assert_never(action)
            lane.advance()


def main() -> None:
    cfg = config.load(RelayConfig, Path(sys.argv[1]))
    relay = Relay()
    shared = SharedSegments(cfg.segments, cfg.attached, cfg.seed, cfg.dilation)
    traffic = Traffic(Path(cfg.traffic), cfg.listeners)
    own = {
        name: OwnLink(cfg.links.get(name, AccessLink()), cfg.seed, name, traffic)
        for name in cfg.listeners
    }
    for name, link in own.items():
        for listener, port, kind in zip(cfg.listeners[name], cfg.targets, _LANES, strict=True):
            # The segments come first in both directions: no byte is read before it has room.
            up: list[Lane] = [*shared.lane(name, "up", kind), link.up]
            down: list[Lane] = [*shared.lane(name, "down", kind), link.down]
            relay.listen(socket.socket(fileno=listener), (cfg.broker.host, port), up, down)

    names = Topics(cfg.run)

    def record_uses() -> None:
        for name, link in own.items():
            traffic.record(name, (link.up.use, link.down.use))

    def report_use() -> None:
        if (use := shared.use()) is not None:
            connection.publish(names.telemetry(ROUTER), messages.encode(use))

    def report_standstill(since: float, at: float) -> None:
        found = messages.Disturbance(ROUTER, at, since, "the relay stood still")
        connection.publish(names.telemetry(ROUTER), messages.encode(found))

    def apply(event: ReceivedMessage) -> None:
        """Called in paho's thread."""
        try:
            order = messages.decode(names, event.topic, event.payload)
            if isinstance(order, messages.NetworkStart):
                relay.submit(partial(shared.start, order.run_time))
                return
            if isinstance(order, messages.MeasureOrder):
                relay.start(measure_again(order.measure))
                return
            if isinstance(order, messages.DeviceOrder) and order.device in shared.segments:
                relay.submit(partial(change_segment, order))
                return
            if not isinstance(order, messages.DeviceOrder) or order.device not in own:
                raise messages.MessageError("the relay takes orders about the devices of its run only")
            action = order.action
            if not isinstance(action, LinkAction):
                raise messages.MessageError("the relay changes links only")
        except messages.MessageError as error:
            refusals.add(event.topic, error)
            return
        relay.submit(partial(own[order.device].apply, action))

    async def measure_again(segments: Sequence[str]) -> None:
        found = messages.encode(await shared.measure(segments))
        connection.publish(names.telemetry(ROUTER), found)

    def change_segment(order: messages.DeviceOrder) -> None:
        match order.action:
            case SetLink(changes):
                shared.change(shared.segments[order.device].with_changes(changes))
            case Disconnect():
                shared.cut(order.device)
            case Reconnect():
                shared.restore(order.device)
            case SetBackground(on):
                shared.switch_background(order.device, on=on)

    def fail(reason: str) -> None:
        sys.stderr.write(f"relay: {reason}\n")
        failure = messages.Failure(ROUTER, reason)
        connection.publish(names.failure(ROUTER), messages.encode(failure))

    refusals = messages.Refusals(fail)
    connection = Connection(cfg.broker, [names.control(ROUTER)], apply)
    try:
        connection.open()
    except ConnectionFailedError as error:
        sys.exit(f"relay: {error}")
    disturbances.Standstills().watch(report_standstill)
    relay.report_errors(fail)
    relay.repeat(_RECORD_SECONDS, record_uses)
    make_realtime()  # otherwise a busy aggregator on the same core delays it by some milliseconds
    if cfg.attached:
        found = relay.complete(shared.measure(shared.segments))
        with files.atomic_write(Path(cfg.probe)) as partial_file:
            partial_file.write_bytes(msgspec.json.encode(found))
        relay.repeat(_USE_SECONDS, report_use)
    relay.serve()


if __name__ == "__main__":
    main()
