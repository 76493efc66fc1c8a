"""Start of a run's relay: its listening sockets, its configuration, and the measurement of its links.

The sockets are opened here and passed on, so that no port has to be guessed or waited for.
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
"""Indices of the targets, and of a device's listening sockets."""
_START_TIMEOUT_SECONDS = 30.0
"""Until the relay must serve; more than any round trip."""


@dataclass(frozen=True, slots=True)
class StartedRelay:
    """The ports of a started relay, and the measurements of its links."""

    ports: Mapping[str, int]
    """Each device's port, which leads to the broker."""
    probes: Sequence[Probe]
    traffic: Traffic
    """Counters of all traffic, that of the measurement included."""


def needed(spec: RunSpec) -> bool:
    """Whether devices have links, get them later, or lose their network."""
    return (
        spec.routed
        or any(entry.disconnect is not None for entry in spec.topology.scenario)
        or any(group.availability is not None for group in spec.topology.devices)
    )


def launch(spec: RunSpec, broker: Broker, spawn: Callable[[Sequence[int]], None]) -> StartedRelay:
    """Have `spawn` start the relay with the file descriptors that it inherits, and measure the links.

    `broker` is the relay's login. Raises OSError where no relay answers, HostError where a
    link cannot be measured.
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
            listeners={name: tuple(sock.fileno() for sock in own) for name, own in opened.items()},
            links={d.name: d.host_link for d in devices if d.host_link is not None},
            access={d.name: d.host_access for d in devices if d.host_access is not None},
            traffic=str(spec.directory.work / "traffic"),
            seed=spec.topology.seed,
        )
        traffic = Traffic(Path(cfg.traffic), cfg.listeners)
        config.dump(cfg, spec.directory.config(ROUTER))
        spawn([fd for fds in cfg.listeners.values() for fd in fds])
        ports = {name: tuple(map(_port, own)) for name, own in opened.items()}
        for own in opened.values():  # only the relay keeps them open: they close where it ends
            for sock in own:
                sock.close()
        # It serves as soon as a byte comes back.
        probe.round_trips(host, next(iter(ports.values()))[_ECHO], 1, 0.0, _START_TIMEOUT_SECONDS)
        found = _measured(host, ports, [d for d in devices if not d.direct])
    at = time.monotonic()
    probes = [Probe(device, at, figures) for device, figures in found.items()]
    return StartedRelay({name: own[_BROKER] for name, own in ports.items()}, probes, traffic)


@contextmanager
def _opened(host: str, devices: Sequence[str]) -> Iterator[dict[str, tuple[socket.socket, ...]]]:
    """Each device's listening sockets that lead through its link, in the order of the targets."""
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
    """Measure the path of each of `devices`: all at once, but those that share a part of it in turn.
    Raises HostError."""
    turns: defaultdict[str, list[PlannedDevice]] = defaultdict(list)
    for device in devices:
        turns[device.shared].append(device)

    def one(device: PlannedDevice) -> LinkFigures:
        _, transfers, echoes = ports[device.name]
        try:
            return probe.measure(device.host_end_to_end or Link(), host, transfers, echoes)
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
