"""Starting a run's relay: its listening sockets, its configuration, and what its links really give.

The sockets are opened here and handed over, so that no port has to be guessed or waited for.
"""

from __future__ import annotations

import socket
import time
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agents import config
from agents.config import Broker, Link
from agents.messages import LinkFigures, Probe
from agents.topics import ROUTER
from testbed.errors import HostError
from testbed.plan import PlannedDevice
from testbed.plan.agent_configs import RunSpec
from testbed.relay import probe
from testbed.relay.main import RelayConfig
from testbed.relay.traffic import Traffic

_BROKER, _, _ECHO = range(3)
"""The targets, and a device's doors, in their order."""
_PATIENCE = 30.0
"""Seconds until the relay must serve, and more than any round trip."""


@dataclass(frozen=True, slots=True)
class Entrances:
    """Where the devices come in, and what the links behind gave before anyone did."""

    ports: Mapping[str, int]
    """Of each device; they lead to the broker."""
    probes: Sequence[Probe]
    traffic: Traffic
    """What passes from now on, and what measuring took."""


def needed(spec: RunSpec) -> bool:
    """Whether devices have links, or get them, or lose their network."""
    return (
        spec.routed
        or any(entry.disconnect is not None for entry in spec.topology.scenario)
        or any(group.availability is not None for group in spec.topology.devices)
    )


def launch(spec: RunSpec, broker: Broker, spawn: Callable[[Sequence[int]], None]) -> Entrances:
    """Have `spawn` start the relay with the file descriptors that it inherits, and measure the links.

    `broker` is the relay's login. Raises OSError where no relay answers, HostError where nobody knows
    what a link is.
    """
    devices = spec.plan.devices
    host = broker.host
    with (
        probe.answering(host) as answering,
        _opened(host, [d.name for d in devices]) as opened,
    ):
        cfg = RelayConfig(
            run=spec.directory.run,
            broker=broker,
            targets=(broker.port, *answering),
            doors={name: tuple(door.fileno() for door in pair) for name, pair in opened.items()},
            links={d.name: d.host_link for d in devices if d.host_link is not None},
            access={d.name: d.host_access for d in devices if d.host_access is not None},
            traffic=str(spec.directory.work / "traffic"),
            seed=spec.topology.seed,
        )
        traffic = Traffic(Path(cfg.traffic), cfg.doors)
        config.dump(cfg, spec.directory.config(ROUTER))
        spawn([fd for fds in cfg.doors.values() for fd in fds])
        ports = {name: tuple(map(_port, pair)) for name, pair in opened.items()}
        for pair in opened.values():  # the relay's alone: where it ends, so does listening
            for door in pair:
                door.close()
        # It serves as soon as a byte comes back.
        probe.round_trips(host, next(iter(ports.values()))[_ECHO], 1, 0.0, _PATIENCE)
        found = _measured(host, ports, [d for d in devices if not d.direct])
    at = time.monotonic()
    probes = [Probe(device, at, figures) for device, figures in found.items()]
    return Entrances({name: doors[_BROKER] for name, doors in ports.items()}, probes, traffic)


@contextmanager
def _opened(host: str, devices: Sequence[str]) -> Iterator[dict[str, tuple[socket.socket, ...]]]:
    """Of each device the listening sockets that lead through its link, in the order of the targets."""
    with ExitStack() as stack:
        yield {
            name: tuple(stack.enter_context(socket.create_server((host, 0))) for _ in range(3))
            for name in devices
        }


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def _measured(
    host: str, ports: Mapping[str, Sequence[int]], devices: Sequence[PlannedDevice]
) -> dict[str, LinkFigures]:
    """What the way of each of `devices` gives: all at once, but those that share a part of it in turn.
    Raises HostError."""
    turns: defaultdict[str, list[PlannedDevice]] = defaultdict(list)
    for device in devices:
        turns[device.shared].append(device)

    def one(device: PlannedDevice) -> LinkFigures:
        _, transfers, echoes = ports[device.name]
        try:
            return probe.measure(device.host_way or Link(), host, transfers, echoes)
        except OSError as error:  # fail closed
            raise HostError(
                f"the link of {device.name} cannot be measured ({error}), so the run does not start."
            ) from error

    def in_turn(members: Sequence[PlannedDevice]) -> dict[str, LinkFigures]:
        return {member.name: one(member) for member in members}

    pool = ThreadPoolExecutor(max(1, len(turns)))
    try:
        return dict(ChainMap(*pool.map(in_turn, turns.values())))
    finally:
        pool.shutdown(wait=False)  # where we are interrupted they end with the relay
