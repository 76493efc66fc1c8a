"""The relay's process: `python -m testbed.relay.main CONFIG`. Runs until it is ended.

It is the router of a run of processes: under that name it logs in, and is told what changes.
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
from agents.transport import Connection, ConnectionFailedError, Event, Received
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
    doors: Mapping[str, tuple[int, ...]]
    """Of each device, for each target the file descriptor of a listening socket, which we inherit."""
    links: Mapping[str, Link]
    """Of each device that has one of its own."""
    access: Mapping[str, Access]
    """What devices share; only those that do."""
    traffic: str
    """Path of the file that counts what passes (testbed.relay.traffic), of the devices of `doors`."""
    seed: int


def ways(link: Link) -> tuple[Way, Way]:
    """Up and down."""
    return (
        Way(link.up, link.rtt / 2, link.jitter),
        Way(link.down, link.rtt / 2, link.jitter),
    )


@dataclass(slots=True)
class OwnLink:
    """The part of its way to the broker that a device has for itself."""

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

    def obey(self, action: LinkAction, now: float) -> Iterable[Lane]:
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


def cells(access: Mapping[str, Access]) -> dict[str, tuple[list[Lane], list[Lane]]]:
    """What each device has to pass, up and down, that others of the same access pass too."""
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
    shared = cells(cfg.access)
    traffic = Traffic(Path(cfg.traffic), cfg.doors)
    own = {name: OwnLink.of(cfg.links.get(name, Link()), cfg.seed, name, traffic) for name in cfg.doors}
    for name, link in own.items():
        # The cell first, both ways: what it has no room for is not even read.
        up, down = shared.get(name, ([], []))
        routes = [*up, link.up], [*down, link.down]
        for door, port in zip(cfg.doors[name], cfg.targets, strict=True):
            relay.listen(socket.socket(fileno=door), (cfg.broker.host, port), *routes)

    names = Topics(cfg.run)

    def obey(event: Event) -> None:
        """In paho's thread. What cannot be read is told."""
        if not isinstance(event, Received):
            return
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
        relay.tell(lambda now: link.obey(action, now))

    def fail(reason: str) -> None:
        sys.stderr.write(f"relay: {reason}\n")
        failure = messages.Failure(ROUTER, messages.clipped(reason))
        connection.publish(names.failure(ROUTER), messages.encode(failure))

    refusals = messages.Refusals(fail)
    connection = Connection(cfg.broker, [names.control(ROUTER)], obey)
    try:
        connection.open()
    except ConnectionFailedError as error:
        sys.exit(f"relay: {error}")
    realtime()  # else a busy aggregator on the same core makes it some milliseconds late
    relay.serve()


if __name__ == "__main__":
    main()
