"""The relay's process: `python -m testbed.relay.main CONFIG`. Runs until it is ended.

It is the router of a run of processes: it logs in under that name, and gets the orders to change links.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import assert_never

from agents import config, disturbances
from agents.config import AccessLink, BrokerAccess, SharedLink
from agents.device_actions import Disconnect, Reconnect, SetLink
from agents.mqtt.topics import ROUTER, Topics
from agents.mqtt.transport import Connection, ConnectionFailedError, ReceivedMessage
from agents.timing.realtime import realtime
from agents.wire import messages
from testbed.relay.pipe import Shape
from testbed.relay.sockets import Lane, Relay
from testbed.relay.traffic import COUNTED, Traffic

_RECORD_SECONDS = 0.5
"""Between two looks at what the queues have carried; the controller reads that once a second."""
LinkAction = SetLink | Disconnect | Reconnect


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    run: str
    broker: BrokerAccess
    targets: tuple[int, ...]
    """Ports of the broker's host that the devices reach through their links."""
    listeners: Mapping[str, tuple[int, ...]]
    """For each device, the inherited file descriptor of a listening socket for each target."""
    links: Mapping[str, AccessLink]
    """Links of the devices that have one of their own."""
    access: Mapping[str, SharedLink]
    """Shared access links, by device; only of devices that have one."""
    traffic: str
    """Path of the traffic counters' file (testbed.relay.traffic), of the devices of `listeners`."""
    seed: int


class OwnLink:
    """A device's own link, without what it shares with others."""

    def __init__(self, link: AccessLink, seed: int, device: str, traffic: Traffic) -> None:
        self.link = link
        self.up, self.down = (
            Lane(
                shape,
                random.Random(f"{seed} {device} {direction}").random,  # noqa: S311
                traffic.counter(device, counted),
            )
            for direction, counted, shape in zip(("up", "down"), COUNTED, _shapes(link), strict=True)
        )

    def apply(self, action: LinkAction) -> None:
        """Change the link, in the relay's thread."""
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
    """The directions of `link`: up and down."""
    up, down = (Shape(rate, link.rtt / 2, link.jitter) for rate in (link.up, link.down))
    return up, down


def shared_lanes(access: Mapping[str, SharedLink]) -> dict[str, tuple[list[Lane], list[Lane]]]:
    """The lanes of shared access links, up and down, that each device's traffic passes."""
    made: dict[tuple[str, str], Lane] = {}

    def lanes(shared: SharedLink, direction: str, rate: int | None) -> list[Lane]:
        if rate is None:
            return []
        return [made.setdefault((shared.name, direction), Lane(Shape(rate), random.random))]

    return {
        device: (lanes(shared, "up", shared.up), lanes(shared, "down", shared.down))
        for device, shared in access.items()
    }


def main() -> None:
    cfg = config.load(RelayConfig, Path(sys.argv[1]))
    relay = Relay()
    shared = shared_lanes(cfg.access)
    traffic = Traffic(Path(cfg.traffic), cfg.listeners)
    own = {
        name: OwnLink(cfg.links.get(name, AccessLink()), cfg.seed, name, traffic)
        for name in cfg.listeners
    }
    for name, link in own.items():
        # The shared access first, both ways: what it has no room for is not even read.
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
        """Carry out an order, in paho's thread; one that is not valid is reported."""
        try:
            order = messages.decode(names, event.topic, event.payload)
            if not isinstance(order, messages.DeviceOrder) or order.device not in own:
                raise messages.MessageError("the relay takes orders about the devices of its run")
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
    realtime()  # else a busy aggregator on the same core makes it some milliseconds late
    relay.serve()


if __name__ == "__main__":
    main()
