"""Start of a run's relay: its listening sockets, its configuration, and the measurement of its links.

The controller opens the sockets, and the relay inherits them. So no process has to guess a port, or wait
until a socket is open.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agents import config
from agents.config import AccessLink, BrokerAccess
from agents.mqtt.retry import retry
from agents.mqtt.topics import ROUTER
from agents.wire.messages import LinkFigures, LinkProbe, NetworkProbe
from testbed.errors import HostError
from testbed.plan import PlannedDevice
from testbed.plan.agent_configs import RunSpec
from testbed.plan.planned_devices import segment_in_host_time
from testbed.relay import relay_probe
from testbed.relay.main import RelayConfig
from testbed.relay.traffic import Traffic

_BROKER, _PROBES = range(2)
"""Indices of the targets and of a device's listening sockets."""
_START_TIMEOUT_SECONDS = 60.0
"""For the measurement of the segments. Longer than any round trip."""


@dataclass(frozen=True, slots=True)
class StartedRelay:
    """Ports of a started relay, and the measurements of its links."""

    ports: Mapping[str, int]
    """Device -> port that leads to the broker through its link."""
    probes: Sequence[LinkProbe | NetworkProbe]
    traffic: Traffic
    """Includes the traffic of measurements."""
    measure: Callable[[Collection[str]], list[LinkProbe]]
    """Raises HostError."""
    close: Callable[[], None]
    """Ends the server for measurements. Idempotent."""


def is_needed(spec: RunSpec) -> bool:
    """True if a device has a link, gets one later, loses its network, or needs energy for bytes, which
    the relay counts."""
    return (
        spec.plan.is_routed
        or any(one.energy is not None and one.energy.counts_bytes for one in spec.plan.devices)
        or any(entry.disconnect is not None for entry in spec.topology.scenario)
        or any(group.availability or group.actions for group in spec.topology.devices)
    )


def launch_relay(
    spec: RunSpec, broker: BrokerAccess, port: int, spawn: Callable[[Sequence[int]], None]
) -> StartedRelay:
    """`spawn`: starts a process that inherits these file descriptors. `broker`: the relay's login.
    `port`: the broker's port for clients. Raises OSError if no relay answers, and HostError if a link
    cannot be measured."""
    devices = spec.plan.emulated_devices
    host = broker.host
    with ExitStack() as serving, ExitStack() as opened:
        probe_port = serving.enter_context(relay_probe.probe_server(host))
        listeners = {
            device.name: [opened.enter_context(socket.create_server((host, 0))) for _ in range(2)]
            for device in devices
        }
        ports = {name: [sock.getsockname()[1] for sock in own] for name, own in listeners.items()}
        cfg = RelayConfig(
            run=spec.directory.run,
            broker=broker,
            targets=(port, probe_port),
            listeners={name: tuple(map(socket.socket.fileno, own)) for name, own in listeners.items()},
            links={d.name: d.host_link for d in devices if d.host_link is not None},
            segments=[
                segment_in_host_time(one, spec.plan.dilation) for one in spec.plan.segments.values()
            ],
            attached={d.name: d.segment for d in devices if d.segment is not None},
            dilation=spec.plan.dilation,
            traffic=str(spec.directory.work / "traffic"),
            probe=str(spec.directory.work / "segments.json"),
            seed=spec.topology.seed,
        )
        traffic = Traffic(Path(cfg.traffic), cfg.listeners)
        config.dump(cfg, spec.directory.config(ROUTER))
        spawn([fd for fds in cfg.listeners.values() for fd in fds])
        opened.close()  # only the relay keeps the sockets open, so they close when it ends
        # The relay serves as soon as a byte comes back.
        relay_probe.round_trips(host, ports[devices[0].name][_PROBES], 1, 0.0, _START_TIMEOUT_SECONDS)
        measured = [_segment_rates(Path(cfg.probe))] if cfg.attached else []

        def measure(names: Collection[str]) -> list[LinkProbe]:
            found = _measure_links(host, ports, [one for one in devices if one.name in names])
            at = time.monotonic()
            return [LinkProbe(device, at, figures) for device, figures in found.items()]

        links = measure([one.name for one in devices if not one.is_direct])
        clients = {name: own[_BROKER] for name, own in ports.items()}
        return StartedRelay(clients, [*measured, *links], traffic, measure, serving.pop_all().close)


def _segment_rates(path: Path) -> NetworkProbe:
    """Wait for the relay's measurement. Raises OSError."""
    return msgspec.json.decode(retry(path.read_bytes, _START_TIMEOUT_SECONDS), type=NetworkProbe)


def _measure_links(
    host: str, ports: Mapping[str, Sequence[int]], devices: Sequence[PlannedDevice]
) -> dict[str, LinkFigures]:
    """Measure in parallel. Raises HostError."""

    def measure(device: PlannedDevice) -> LinkFigures:
        try:
            return relay_probe.measure(
                device.host_probed or AccessLink(), host, ports[device.name][_PROBES]
            )
        except OSError as error:  # an unmeasured link fails the run
            raise HostError(
                f"the link of {device.name} cannot be measured ({error}), so the run does not start."
            ) from error

    pool = ThreadPoolExecutor(max(1, len(devices)))
    try:
        return dict(zip((one.name for one in devices), pool.map(measure, devices), strict=True))
    finally:
        pool.shutdown(wait=False)  # if the controller is interrupted, the threads end with the relay
