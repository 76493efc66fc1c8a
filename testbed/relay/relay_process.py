"""Start of a run's relay: its sockets and configuration, and the measurement of its links."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agents import config
from agents.config import AccessLink, BrokerAccess
from agents.device.link_measurement import fastest, pace, round_trip_figures
from agents.disturbances import retry
from agents.links import packets
from agents.mqtt.topics import ROUTER
from agents.timing.nanoseconds import Nanoseconds
from agents.wire.messages import LinkFigures, LinkProbe, NetworkProbe
from testbed.errors import HostError
from testbed.plan import PlannedDevice
from testbed.plan.agent_configs import RunSpec
from testbed.plan.planned_devices import segment_in_host_time
from testbed.relay.main import RelayConfig
from testbed.relay.sockets import SEGMENT, Traffic, on_wire

# Measurement of a relay's link before any client uses the link.
#
# The device's side opens a connection and sends one line, which is one of the following:
#
# - `echo`: the server sends one byte, then returns every byte that it gets;
# - `down SIZE`: the server sends SIZE bytes;
# - `up SIZE`: the client sends SIZE bytes, and the server answers with its measurement (one JSON line).
#
# A rate is measured between the first and the last arrival of payload, so that neither delay nor
# handshake counts. Arrival times are the kernel's, and receive buffers are large, so that a receiver
# that has to wait for a core changes neither the times nor the rate.

_TRANSFER_SECONDS = 1.0
"""Duration of a transfer at the requested rate."""
_MIN_BYTES, _MAX_BYTES = 12_000, 4_000_000
"""A smaller transfer has too few packets to measure a rate, a larger one takes too long for a
start-up."""
_BUFFER_SHARE, _USUAL_BUFFER = 8, 1 << 16
"""A receive buffer holds this part of the transfer, if that is more than the usual size. At 100 Mbit/s,
a receiver may then be 40 ms late before the sender has to wait. A buffer for more than 200 ms of the
rate would let the sender fill the link's queue until packets are lost."""
_ON_WIRE = on_wire(SEGMENT) / SEGMENT
"""Bytes on the wire per byte of payload."""
_SILENCE_TIMEOUT_SECONDS = 30.0
"""Seconds, beside the link's delay, within which the next byte must arrive."""


def measure_link(requested: AccessLink, host: str, port: int) -> LinkFigures:
    """Measure the link `requested` through its `port` to the server of `probe_server`.

    In the result, `rtt` and `jitter` (standard deviation of round trips) are in seconds, `up` and `down`
    in bit/s on the wire, and measured only if requested. Raises OSError.
    """
    count, interval = pace(requested, on_wire(1))
    trips = round_trips(host, port, count, interval, _SILENCE_TIMEOUT_SECONDS + requested.rtt)
    found: dict[str, Any] = round_trip_figures(requested, trips)
    for name, rate, transfer in (
        ("up", requested.up, upload_probe),
        ("down", requested.down, download_probe),
    ):
        if rate is not None:
            payload = partial(transfer, host, port, rate)
            found[name] = _ON_WIRE * fastest(payload, rate / _ON_WIRE)
    return LinkFigures(**found)


def round_trips(host: str, port: int, count: int, interval: float, timeout: float) -> list[float]:
    """Send a byte every `interval` seconds; return the seconds until each came back. Raises OSError
    after `timeout` seconds without a byte."""
    with _connect(host, port, "echo", timeout) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _receive(sock, 1)
        sent: list[float] = []
        begin = time.monotonic()

        def send() -> None:
            with suppress(OSError):  # the receiver below gets the error, too
                for number in range(count):
                    time.sleep(max(0.0, begin + number * interval - time.monotonic()))
                    sent.append(time.monotonic())
                    sock.sendall(b"!")

        threading.Thread(target=send, daemon=True).start()
        found: list[float] = []
        while len(found) < count:
            arrived = _receive(sock, count)
            found += [time.monotonic() - sent[len(found) + number] for number in range(arrived)]
        return found


def probe_size(rate: int) -> int:
    return min(max(_MIN_BYTES, int(rate / 8 * _TRANSFER_SECONDS)), _MAX_BYTES)


def upload_probe(host: str, port: int, rate: int) -> float:
    """Return bit/s of payload from here to the server. Raises OSError."""
    with _connect(host, port, f"up {probe_size(rate)}") as sock:
        sock.sendall(bytes(probe_size(rate)))
        answer = sock.makefile("rb").readline()
    if not answer:
        raise ConnectionError("the link was closed")
    return _rate(*json.loads(answer))


def download_probe(host: str, port: int, rate: int) -> float:
    """Return bit/s of payload from the server to here. Raises OSError."""
    with _connect(host, port, f"down {probe_size(rate)}") as sock:
        return _rate(*receive_timed(sock, probe_size(rate)))


def receive_timed(sock: socket.socket, count: int) -> tuple[int, float]:
    """Return the number of bytes after the first arrival, and the seconds in which they arrived. Raises
    ConnectionError if fewer than `count` bytes arrive."""
    if (wanted := count // _BUFFER_SHARE) > _USUAL_BUFFER:
        packets.enlarge_receive_buffer(sock, wanted)
    room = bytearray(count)
    first, begin, begin_read = _receive_all(sock, room)
    received, end, end_read = first, begin, begin_read
    while received < count:
        more, end, end_read = _receive_all(sock, room)
        received += more
    took = end - begin if packets.arrived_in_order(sock) else end_read - begin_read
    return received - first, took / 1e9


def listen(host: str, port: int = 0) -> socketserver.TCPServer:
    """Serve measurements in threads until `shutdown`. `port`: 0 for any free port."""
    server = _RelayProbeServer((host, port), _RelayProbeHandler)
    threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()
    return server


@contextmanager
def probe_server(host: str) -> Iterator[int]:
    """Yield the server's port."""
    with listen(host) as server:
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()


class _RelayProbeServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def server_bind(self) -> None:
        packets.enable_timestamps(self.socket)  # connections inherit this
        super().server_bind()


class _RelayProbeHandler(socketserver.StreamRequestHandler):
    rbufsize = 0  # what follows the line must be timed, not read ahead
    disable_nagle_algorithm = True
    timeout = _SILENCE_TIMEOUT_SECONDS

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # the device has closed the connection
            match self.rfile.readline(64).split():
                case [b"echo"]:
                    data = b"!"
                    while data:
                        self.request.sendall(data)
                        data = self.request.recv(64)
                case [b"down", count]:
                    self.request.sendall(bytes(min(int(count), _MAX_BYTES)))
                case [b"up", count]:
                    measured = receive_timed(self.request, min(int(count), _MAX_BYTES))
                    self.wfile.write(json.dumps(measured).encode() + b"\n")


def _connect(
    host: str, port: int, request: str, timeout: float = _SILENCE_TIMEOUT_SECONDS
) -> socket.socket:
    sock = socket.socket()
    try:
        packets.enable_timestamps(sock)
        sock.settimeout(timeout)
        sock.connect((host, port))
        sock.sendall(f"{request}\n".encode())
    except OSError:
        sock.close()
        raise
    return sock


def _receive(sock: socket.socket, most: int) -> int:
    """Return the number of bytes that came. Raises ConnectionError at the stream's end."""
    if not (count := len(sock.recv(most))):
        raise ConnectionError("the link was closed")
    return count


def _receive_all(sock: socket.socket, room: bytearray) -> tuple[int, Nanoseconds, Nanoseconds]:
    """Read all that has arrived. Return the number of bytes, the time at which the last arrived, and the
    present time, both by the real-time clock. The kernel merges packets that wait, with the last
    packet's time, so the arrival time is right only if `room` has space for all. Raises ConnectionError
    at the stream's end."""
    count, ancillary, _, _ = sock.recvmsg_into([room], packets.ANCILLARY_BYTES)
    if not count:
        raise ConnectionError("the link was closed")
    return count, packets.timestamp_in(ancillary), time.clock_gettime_ns(time.CLOCK_REALTIME)


def _rate(count: int, seconds: float) -> float:
    """Return the rate in bit/s; 0 if all bytes were read at once, because the receiver was late."""
    return 8 * count / seconds if seconds > 0 else 0.0


# The controller opens the sockets, and the relay inherits them. So no process has to guess a port, or
# wait until a socket is open.

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
        probe_port = serving.enter_context(probe_server(host))
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
        round_trips(host, ports[devices[0].name][_PROBES], 1, 0.0, _START_TIMEOUT_SECONDS)
        measured: list[LinkProbe | NetworkProbe] = []
        if cfg.attached:
            content = retry(Path(cfg.probe).read_bytes, _START_TIMEOUT_SECONDS)
            measured.append(msgspec.json.decode(content, type=NetworkProbe))

        def measure(names: Collection[str]) -> list[LinkProbe]:
            found = _measure_links(host, ports, [one for one in devices if one.name in names])
            at = time.monotonic()
            return [LinkProbe(device, at, figures) for device, figures in found.items()]

        links = measure([one.name for one in devices if not one.is_direct])
        clients = {name: own[_BROKER] for name, own in ports.items()}
        return StartedRelay(clients, [*measured, *links], traffic, measure, serving.pop_all().close)


def _measure_links(
    host: str, ports: Mapping[str, Sequence[int]], devices: Sequence[PlannedDevice]
) -> dict[str, LinkFigures]:
    """Measure in parallel. Raises HostError."""

    def measure(device: PlannedDevice) -> LinkFigures:
        try:
            return measure_link(device.host_probed or AccessLink(), host, ports[device.name][_PROBES])
        except OSError as error:  # an unmeasured link fails the run
            raise HostError(
                f"the link of {device.name} cannot be measured ({error}), so the run does not start."
            ) from error

    pool = ThreadPoolExecutor(max(1, len(devices)))
    try:
        return dict(zip((one.name for one in devices), pool.map(measure, devices), strict=True))
    finally:
        pool.shutdown(wait=False)  # if the controller is interrupted, the threads end with the relay
