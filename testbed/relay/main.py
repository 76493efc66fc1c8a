"""The relay's process: `python -m testbed.relay.main CONFIG`. The process runs until it is ended from
outside.

In a run with local processes, the relay takes the place of the router. It logs in at the broker under
the router's name, and receives the orders that change links.
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

from agents import config, disturbances
from agents.config import AccessLink, BrokerAccess, Segment, Way
from agents.device_actions import Disconnect, Reconnect, SetLink
from agents.mqtt.topics import ROUTER, Topics
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage
from agents.timing.realtime import make_realtime
from agents.wire import messages
from testbed.relay.pipe import Shape
from testbed.relay.sockets import LinkLane, Relay
from testbed.relay.traffic import COUNTED, Traffic

_RECORD_SECONDS = 0.5
"""Seconds between two records of the queues' use. The controller reads the records once per second."""
LinkAction = SetLink | Disconnect | Reconnect


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Configuration of the relay of one run."""

    run: str
    """Id of the run."""
    broker: BrokerAccess
    """Address of the broker, and the relay's login."""
    targets: tuple[int, ...]
    """Ports on the broker's host that the devices reach through their links."""
    listeners: Mapping[str, tuple[int, ...]]
    """Inherited file descriptors of each device's listening sockets, one per target."""
    links: Mapping[str, AccessLink]
    """Link of each device, without its segments. Devices without a link of their own are left
    out."""
    segments: Sequence[Segment]
    """Tree of the shared links, in host time except for their background traffic. A parent comes before
    its children."""
    attached: Mapping[str, str]
    """Segment that each device is attached to. Devices without a segment are left out."""
    traffic: str
    """Path of the file with the traffic counters (testbed.relay.traffic) of the devices in
    `listeners`."""
    seed: int
    """Seed of the delays' jitter."""
    dilation: float = 1.0
    """Host seconds per second of device time."""


class OwnLink:
    """A device's own link, without the segments that the device may share with other devices."""

    def __init__(self, link: AccessLink, seed: int, device: str, traffic: Traffic) -> None:
        self.link = link
        self.up, self.down = (
            LinkLane(
                shape,
                random.Random(f"{seed} {device} {direction}").random,  # noqa: S311
                traffic.counter(device, counted),
            )
            for direction, counted, shape in zip(("up", "down"), COUNTED, _shapes(link), strict=True)
        )

    def apply(self, action: LinkAction) -> None:
        """Change the link. Called in the relay's thread."""
        now = time.monotonic()
        if isinstance(action, SetLink):
            self.link = self.link.with_changes(action.changes)
        for lane, shape in zip((self.up, self.down), _shapes(self.link), strict=True):
            match action:
                case SetLink():
                    lane.change(shape, now)
                case Disconnect():
                    lane.cut(now)
                case Reconnect():
                    lane.mend(now)
                case _:
                    assert_never(action)
            lane.advance()


def _shapes(link: AccessLink) -> tuple[Shape, Shape]:
    """Return the shapes of the two directions of `link`: up and down."""
    up, down = (Shape(rate, link.rtt / 2, link.jitter) for rate in (link.up, link.down))
    return up, down


def shared_lanes(
    segments: Sequence[Segment], attached: Mapping[str, str]
) -> dict[str, tuple[list[LinkLane], list[LinkLane]]]:
    """Return device -> lanes of its segments, up and down. Devices of the same segment get the same
    lane. A direction without a rate has no lane. `segments`: the tree. `attached`: device -> segment."""
    made: dict[tuple[str, Way], LinkLane] = {}
    by_name = {one.name: one for one in segments}

    def lanes(path: Sequence[Segment], way: Way) -> list[LinkLane]:
        return [
            made.setdefault((one.name, way), LinkLane(Shape(rate), random.random))
            for one in path
            if (rate := one.rate(way)) is not None
        ]

    paths = {device: config.path_of(name, by_name) for device, name in attached.items()}
    return {device: (lanes(path, "up"), lanes(path, "down")) for device, path in paths.items()}


def main() -> None:
    cfg = config.load(RelayConfig, Path(sys.argv[1]))
    relay = Relay()
    shared = shared_lanes(cfg.segments, cfg.attached)
    traffic = Traffic(Path(cfg.traffic), cfg.listeners)
    own = {
        name: OwnLink(cfg.links.get(name, AccessLink()), cfg.seed, name, traffic)
        for name in cfg.listeners
    }
    for name, link in own.items():
        # The segments come first in both directions: no byte is read before it has room.
        up, down = shared.get(name, ([], []))
        routes = [*up, link.up], [*down, link.down]
        for listener, port in zip(cfg.listeners[name], cfg.targets, strict=True):
            relay.listen(socket.socket(fileno=listener), (cfg.broker.host, port), *routes)

    names = Topics(cfg.run)

    def record_uses() -> None:
        for name, link in own.items():
            traffic.record(name, (link.up.use, link.down.use))

    def report_standstill(since: float, at: float) -> None:
        found = messages.Disturbance(ROUTER, at, since, "the relay stood still")
        connection.publish(names.telemetry(ROUTER), messages.encode(found))

    def apply(event: ReceivedMessage) -> None:
        """Carry out an order, or report that the order is invalid. Called in paho's thread."""
        try:
            order = messages.decode(names, event.topic, event.payload)
            if not isinstance(order, messages.DeviceOrder) or order.device not in own:
                raise messages.MessageError("the relay takes orders about the devices of its run only")
            action = order.action
            if not isinstance(action, LinkAction):
                raise messages.MessageError("the relay changes links only")
        except messages.MessageError as error:
            refusals.add(event.topic, error)
            return
        relay.submit(partial(own[order.device].apply, action))

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
    disturbances.watch(report_standstill)
    relay.repeat(_RECORD_SECONDS, record_uses)
    make_realtime()  # otherwise a busy aggregator on the same core delays it by some milliseconds
    relay.serve()


if __name__ == "__main__":
    main()
