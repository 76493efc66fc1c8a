"""The relay's process: `python -m testbed.relay.main CONFIG`. Runs until it is ended.

It is the router of a run of processes: it logs in under that name, and gets the orders to change links.
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from agents import config, messages
from agents.config import Access, Broker, Link
from agents.device_actions import Disconnect, Reconnect, SetLink
from agents.realtime import realtime
from agents.topics import ROUTER, Topics
from agents.transport import Connection, ConnectionFailedError, Received
from testbed.relay.pipe import Pipe, Way
from testbed.relay.server import Lane, Relay
from testbed.relay.traffic import WAYS, Traffic

LinkAction = SetLink | Disconnect | Reconnect


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    run: str
    broker: Broker
    targets: tuple[int, ...]
    """Ports of the broker's host that the devices reach through their links."""
    listeners: Mapping[str, tuple[int, ...]]
    """For each device, the inherited file descriptor of a listening socket for each target."""
    links: Mapping[str, Link]
    """Links of the devices that have one of their own."""
    access: Mapping[str, Access]
    """Shared access links, by device; only of devices that have one."""
    traffic: str
    """Path of the traffic counters' file (testbed.relay.traffic), of the devices of `listeners`."""
    seed: int


def ways(link: Link) -> tuple[Way, Way]:
    """The directions of `link`: up and down."""
    return (
        Way(link.up, link.rtt / 2, link.jitter),
        Way(link.down, link.rtt / 2, link.jitter),
    )


@dataclass(slots=True)
class OwnLink:
    """A device's own link, without what it shares with others."""

    link: Link
    up: Lane
    down: Lane

    @classmethod
    def of(cls, link: Link, seed: int, device: str, traffic: Traffic) -> OwnLink:
        up, down = (
            Lane(
                way,
                random.Random(f"{seed} {device} {name}").random,  # noqa: S311
                traffic.counter(device, counted),
            )
            for way, name, counted in zip(ways(link), ("up", "down"), WAYS, strict=True)
        )
        return cls(link, up, down)

    def apply(self, action: LinkAction, now: float) -> Iterable[Lane]:
        lanes = self.up, self.down
        match action:
            case SetLink(changes):
                given: dict[str, Any] = dict(changes)
                self.link = replace(self.link, **given)
                for lane, way in zip(lanes, ways(self.link), strict=True):
                    lane.change(way, now)
            case Disconnect():
                for lane in lanes:
                    lane.cut(now)
            case Reconnect():
                for lane in lanes:
                    lane.mend(now)
            case _:
                assert_never(action)
        return lanes


def shared_lanes(access: Mapping[str, Access]) -> dict[str, tuple[list[Lane], list[Lane]]]:
    """The lanes of shared access links, up and down, that each device's traffic passes."""
    made: dict[tuple[str, str], Lane] = {}

    def lanes(shared: Access, way: str, rate: int | None) -> list[Lane]:
        if rate is None:
            return []
        return [made.setdefault((shared.name, way), Pipe(Way(rate), random.random))]

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
        name: OwnLink.of(cfg.links.get(name, Link()), cfg.seed, name, traffic) for name in cfg.listeners
    }
    for name, link in own.items():
        # The shared access first, both ways: what it has no room for is not even read.
        up, down = shared.get(name, ([], []))
        routes = [*up, link.up], [*down, link.down]
        for listener, port in zip(cfg.listeners[name], cfg.targets, strict=True):
            relay.listen(socket.socket(fileno=listener), (cfg.broker.host, port), *routes)

    names = Topics(cfg.run)

    def apply(event: Received) -> None:
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
        link = own[order.device]
        relay.submit(lambda now: link.apply(action, now))

    def fail(reason: str) -> None:
        sys.stderr.write(f"relay: {reason}\n")
        failure = messages.Failure(ROUTER, messages.clipped(reason))
        connection.publish(names.failure(ROUTER), messages.encode(failure))

    refusals = messages.Refusals(fail)
    connection = Connection(cfg.broker, [names.control(ROUTER)], apply)
    try:
        connection.open()
    except ConnectionFailedError as error:
        sys.exit(f"relay: {error}")
    realtime()  # else a busy aggregator on the same core makes it some milliseconds late
    relay.serve()


if __name__ == "__main__":
    main()
