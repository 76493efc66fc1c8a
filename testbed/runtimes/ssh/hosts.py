"""The real devices of one run: they are prepared, started, looked after, and cleaned up, in parallel."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agents import device_actions as actions
from agents.config import DeviceConfig, dump, load
from agents.disturbances import STANDSTILL_SECONDS
from agents.remote import program
from agents.wire.messages import AddressedOrder, DeviceOrder, Disturbance, LinkFigures, LinkProbe
from testbed.broker.access import listening
from testbed.errors import BadInputError, HostError
from testbed.fidelity.host_load import HostSample
from testbed.plan import Plan, PlannedDevice, agent_configs
from testbed.plan.agent_configs import RunSpec, init_name
from testbed.real_devices.measured import RealDeviceFigures
from testbed.runtimes import HostReading
from testbed.runtimes.ssh import environment, removal
from testbed.runtimes.ssh.connection import (
    Channel,
    Connections,
    SshTarget,
    errors_of,
    in_parallel,
    parse,
)
from testbed.runtimes.ssh.environment import ClientContainer
from testbed.topology import Topology
from testbed.view import View

CONTACT_TIMEOUT_SECONDS = 600.0
"""Without the run's broker for this long, a real device ends its processes and removes its files."""
_CLOCK_TIMEOUT_SECONDS = 60.0
"""Maximum seconds until the clocks of all devices are compared."""
_RETRY_SECONDS = 2.0
"""Seconds between two attempts to reach a device."""
_MAX_RESTARTS = 5
"""Maximum number of times that a device is started again after its processes were killed."""
_MAX_UNCERTAINTY = 10**12
_LINE_BYTES, _MAX_LINES = 1000, 60
"""Maximum length of a report, and number of reports and questions per second."""
_CERTIFICATE = "broker.pem"
_MAX_TRANSFER_BYTES, _MAX_TRANSFERS = 2**24, 20
"""Maximum size and number of transfers that a device asks for when its link is measured."""
_SPEEDS = ("up", "down", "rtt", "jitter", "loss", "round_trips")
_MAX_SPEED = 1e12
_WIRE_FACTOR = 1514 / 1448
"""Length of a full packet, with its Ethernet header, per byte of TCP payload: rates of shaped links are
rates on the wire, as those of emulated links."""
_LOADS = ("total", "busy", "stolen", "own", "cores")
"""CPU seconds in a report, as in `agents.remote.program.cpu_seconds`."""
_MAX_SECONDS = 1e12


def target_of(device: PlannedDevice) -> SshTarget:
    """The interpreter of the topology serves for all."""
    return SshTarget(str(device.host), device.python or "python3")


def container_of(device: PlannedDevice, topology: Topology) -> ClientContainer | None:
    """None if the client is a process."""
    if device.container is None:
        return None
    return ClientContainer(device.container, environment.image_tag(topology))


def shape_request(device: PlannedDevice, plan: Plan) -> dict[str, Any] | None:
    """Limits of a shaped device, for a request; None if it has none."""
    if device.shape is None or plan.server is None:
        return None
    shaped = device.as_shaped
    return {
        "server": plan.server[0],
        "link": shaped.link is not None,
        "netem": device.shape.needs_netem,
        "cpu": None if shaped.cpu is None else (shaped.quota, shaped.period),
        "ifb": f"ifb{secrets.token_hex(5)}",
    }


def check_hosts(plan: Plan, topology: Topology) -> None:
    """Check this host and all real devices in parallel. Raises HostError that names each device, the
    cause and the mend."""
    if plan.server is None:
        return
    server = plan.server
    lines, connections = environment.requirement_lines(topology.requirements), Connections()
    distinct = {
        (target_of(one), one.python is not None, container_of(one, topology), one.shape): one
        for one in plan.real_devices
    }

    def check(device: PlannedDevice) -> None:
        environment.check(
            connections,
            target_of(device),
            lines,
            own_python=device.python is not None,
            container=container_of(device, topology),
            server=server,
            shape=shape_request(device, plan),
        )

    with listening(plan.server):  # for the devices to try
        try:
            errors = errors_of(in_parallel({one.name: partial(check, one) for one in distinct.values()}))
        finally:
            connections.close()
    if errors:
        raise HostError("\n".join(map(str, errors)))


class RealHosts:
    def __init__(self, spec: RunSpec, view: View) -> None:
        self._spec, self._view = spec, view
        self._connections = Connections(spec.plan.infrastructure_cpus)
        absent = spec.plan.absent
        self._devices = {
            planned.name: RealDevice(spec, planned, self._connections, is_down=planned.name in absent)
            for planned in spec.plan.real_devices
        }

    @property
    def names(self) -> set[str]:
        return set(self._devices)

    def prepare(self) -> None:
        """Send the agents, and make their environments. Raises HostError."""
        spec = self._spec
        lines = environment.requirement_lines(spec.topology.requirements)
        packed = environment.archive(spec.directory.code if spec.topology.user_code else None)
        removal.note(spec.directory, {one.name: one.target for one in self._devices.values()})
        count = len(self._devices)
        self._view.progress(
            f"Preparing {count} real device{'' if count == 1 else 's'}: the first time, PyTorch is "
            "installed there, which takes minutes"
        )
        self._in_parallel(lambda device: device.install(packed, lines))
        if any(device.lacks_image for device in self._devices.values()):
            with environment.image_archive(spec.topology, self._view.progress) as image:
                self._view.progress("Sending the image to real devices, once")
                self._in_parallel(lambda device: device.load(image))

    def start(self) -> None:
        """Measure the links one after the other, because devices may share a network. Then start all,
        and wait until their clocks are compared. Measure shaped links again. Raises HostError."""
        for device in self._devices.values():
            device.measure()
        self._in_parallel(RealDevice.start)
        deadline = time.monotonic() + _CLOCK_TIMEOUT_SECONDS
        for device in self._devices.values():
            device.await_clock(deadline)
        figures = [device.figures() for device in self._devices.values()]
        self._spec.directory.write_manifest(real={one.device: one.as_dict() for one in figures})
        self.measure_again([one.name for one in self._devices.values() if one.has_shaped_link])

    def measure_again(self, names: Sequence[str]) -> None:
        """Shaped links, one after the other. Raises HostError."""
        for name in names:
            self._devices[name].measure(is_shaped=True)

    def act(self, name: str, action: actions.DeviceAction) -> list[AddressedOrder]:
        """Orders for the device's init, which carries out the action. Raises BadInputError."""
        return self._devices[name].act(action)

    def exit_codes(self) -> dict[str, int]:
        codes = {name: device.exit_code for name, device in self._devices.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def disturbances(self) -> list[Disturbance]:
        """Noticed since the last call."""
        return [one for device in self._devices.values() for one in device.take_disturbances()]

    def probes(self) -> list[LinkProbe]:
        """Measurements of links that were not returned before."""
        found = [one.probe for one in self._devices.values() if one.probe is not None]
        for device in self._devices.values():
            device.probe = None
        return found

    def readings(self, at: float) -> dict[str, HostReading]:
        """Return the uncertainty of each device's clock, and its load since the last call, by host.
        `at`: run time in seconds."""
        return {
            device.target.host: HostReading(device.uncertainty, device.take_load(at))
            for device in self._devices.values()
            if device.uncertainty is not None
        }

    def stop(self) -> None:
        """End everything on all devices, fetch logs and files, remove everything there. Idempotent.
        Raises HostError if something may be left."""
        self.close()
        removal.remove(self._spec.directory)

    def close(self) -> None:
        """End all connections to the devices. Idempotent."""
        for device in self._devices.values():
            device.stop_watching()
        self._connections.close()
        for device in self._devices.values():
            device.join()

    def _in_parallel(self, task: Callable[[RealDevice], None]) -> None:
        tasks = {name: partial(task, device) for name, device in self._devices.items()}
        if errors := errors_of(in_parallel(tasks)):
            raise HostError("\n".join(map(str, errors)))


class RealDevice:
    """Real device, as the controller sees it. A thread watches it over one SSH connection: the keeper
    there reports the state, and asks for the time of this host's clock."""

    def __init__(
        self, spec: RunSpec, planned: PlannedDevice, connections: Connections, *, is_down: bool
    ) -> None:
        self._spec, self._connections = spec, connections
        self.name, self.target = planned.name, target_of(planned)
        self._container = container_of(planned, spec.topology)
        self.lacks_image = False
        """The device's container engine lacks the image of its container."""
        self._has_own_python = planned.python is not None or self._container is not None
        self._python = self.target.python
        """Interpreter of the agents there."""
        self._request = {
            "run": spec.directory.run,
            "device": planned.name,
            "container": None if self._container is None else self._container.as_dict(),
            "shape": shape_request(planned, spec.plan),
        }
        self._link = planned.as_shaped.link
        self.exit_code: int | None = None
        """None while the device's init runs or may start again."""
        self.uncertainty: float | None = None
        """Maximum error of times of the device's clock, in seconds; None if not compared yet."""
        self._is_down, self._is_paused = is_down, False
        self._restarts = 0
        self._reported: float | None = None
        """Monotonic time of the last report; None before the first, and while the processes are started
        again."""
        self._noted_gap: float | None = None
        """Begin of the last loss of contact that was noted."""
        self.probe: LinkProbe | None = None
        """Measurement of the link, until it is recorded."""
        self._cpu: dict[str, float] = {}
        """CPU seconds of the machine in the last report; empty before the first."""
        self._cpu_taken: dict[str, float] = {}
        """CPU seconds at the last call of `take_load`."""
        self._noticed: list[Disturbance] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._compared = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._watch, name=f"watch {self.name}", daemon=True)

    @property
    def has_shaped_link(self) -> bool:
        return self._link is not None

    def install(self, packed: bytes, lines: Sequence[str]) -> None:
        """Send the agents, and make their environment. Raises HostError."""
        request = {
            **self._request,
            "environment": environment.environment_name(lines),
            "attempts": environment.attempts(lines),
            "own_python": self._has_own_python,
        }
        files = [("agents.tar.gz", packed)]
        found = self._connections.call(
            self.target, "install", request, files, environment.INSTALL_TIMEOUT_SECONDS
        )
        if not isinstance(python := found.get("python"), str):
            raise HostError(f"{self.target.host}: its answer names no interpreter")
        self._python, self.lacks_image = python, found.get("has_image") is False

    def load(self, image: Path) -> None:
        """Unless the device has the image. Raises HostError."""
        if self.lacks_image:
            timeout = environment.INSTALL_TIMEOUT_SECONDS
            self._connections.call(self.target, "load", self._request, [("image", image)], timeout)
            self.lacks_image = False

    def measure(self, *, is_shaped: bool = False) -> None:
        """Measure round trip and rates between the device and this host. `is_shaped`: its link has to be
        shaped by now. Raises HostError."""
        factor, seconds = (_WIRE_FACTOR, 2.0) if is_shaped else (1.0, 0.5)
        link = self._link if is_shaped else None
        shaped = None if link is None else {"up": link.up, "down": link.down}
        more = {"server": self._spec.plan.server, "shaped": shaped, "seconds": seconds}
        request, up = {**self._request, **more}, None
        with self._connections.channel(self.target, "measure", request) as channel:
            for _ in range(_MAX_TRANSFERS):
                match channel.read_answer():
                    case {"send": int(size)} if 0 < size <= _MAX_TRANSFER_BYTES:
                        program.send(channel.sink, size, link.down if link else None)
                    case {"receive": int(size)} if 0 < size <= _MAX_TRANSFER_BYTES:
                        up = _received_rate(channel, size, is_shaped=is_shaped) or up
                        channel.sink.write(b"received\n")
                        channel.sink.flush()
                    case {"measured": dict() as found}:
                        figures = _numbers({**found, "up": up}, _SPEEDS, _MAX_SPEED)
                        trips = int(figures.pop("round_trips", 0))
                        rates = {way: figures[way] for way in ("up", "down") if way in figures}
                        figures |= {way: factor * rate for way, rate in rates.items()}
                        probe = _link_figures({**figures, "round_trips": trips})
                        self.probe = LinkProbe(self.name, time.monotonic(), probe)
                        return
                    case other:
                        raise HostError(f"the measurement of its link failed: {other}")
        raise HostError(f"{self.target.host}: the measurement of its link does not end")

    def figures(self) -> RealDeviceFigures:
        """Measured before the run."""
        probe = LinkFigures() if self.probe is None else self.probe.probe
        return RealDeviceFigures(
            device=self.name,
            host=self.target.host,
            step=None,
            up=probe.up,
            down=probe.down,
            rtt=probe.rtt,
            jitter=probe.jitter,
            clock=self.uncertainty,
            foreign=None,
        )

    def take_load(self, at: float) -> HostSample | None:
        """Since the last call; None if unknown. `at`: run time in seconds."""
        before, after = self._cpu_taken, self._cpu
        if after is before or not after:
            return None
        self._cpu_taken = after
        spent = {name: after[name] - before.get(name, 0.0) for name in _LOADS[:-1]}
        if not before or min(spent.values()) < 0 or spent["total"] <= 0:  # e.g. it was started again
            return None
        return HostSample(
            at=at,
            seconds=spent["total"] / after["cores"],
            server_load=None,
            foreign=min(1.0, max(0.0, spent["busy"] - spent["own"]) / spent["total"]),
            elsewhere=None,
            device_busy=min(1.0, spent["busy"] / spent["total"]),
            steal=min(1.0, spent["stolen"] / spent["total"]),
            tick_lateness=0.0,
        )

    def start(self) -> None:
        """Send the device's files, start its processes, then watch them. Raises HostError."""
        self._start(self._files())
        self._thread.start()

    def _files(self) -> list[tuple[str, Path | bytes]]:
        directory, name = self._spec.directory, self.name
        server = load(DeviceConfig, directory.config(init_name(name))).broker
        disk = sorted(path for path in directory.disk(name).iterdir() if path.is_file())
        sent = agent_configs.files_to_send(self._spec, name)
        return [
            *self._configurations(),
            (_CERTIFICATE, (server.certificate or "").encode()),
            *((Path(path).name, source) for path, source in sent.items()),
            *((f"disk/{path.name}", path) for path in disk),
        ]

    def _configurations(self) -> list[tuple[str, Path | bytes]]:
        """For init and client. That of the init has the state that the actions so far have led to."""
        file = self._spec.directory.config(init_name(self.name))
        init = load(DeviceConfig, file)
        dump(replace(init, present=not self._is_down, paused=self._is_paused), file)
        return [("init.json", file), ("client.json", self._spec.directory.config(self.name))]

    def _start(self, files: Sequence[tuple[str, Path | bytes]]) -> None:
        server = self._spec.plan.server or ("", 0)
        keeper = {
            "host": server[0],
            "port": server[1],
            "timeout": CONTACT_TIMEOUT_SECONDS,
            "container": self._request["container"],
        }
        request = {**self._request, "python": self._python, "keeper": keeper}
        self._connections.call(self.target, "start", request, files, 600.0)

    def await_clock(self, deadline: float) -> None:
        """`deadline`: monotonic time. Raises HostError."""
        if not self._compared.wait(max(0.0, deadline - time.monotonic())):
            raise HostError(
                f"{self.target.host}: its clock cannot be compared with this host's"
                + (f" ({self._failure})" if self._failure else "")
            )

    def act(self, action: actions.DeviceAction) -> list[AddressedOrder]:
        if isinstance(action, actions.Disconnect):
            raise BadInputError(f"{self.name} is a real device, whose network is not cut off")
        if not isinstance(action, actions.Switching):
            raise BadInputError(f"{self.name} is a real device, of which nothing is emulated")
        if isinstance(action, actions.Restart | actions.Join) and self.exit_code is not None:
            raise BadInputError(
                f"{self.name} cannot restart: its client exited unexpectedly (exit code "
                f"{self.exit_code}). See its log."
            )
        if isinstance(action, actions.Crash | actions.Leave):
            self._is_down = True
        if isinstance(action, actions.Restart | actions.Join):
            self._is_down = False
        if isinstance(action, actions.Pause):
            self._is_paused = True
        if isinstance(action, actions.Resume | actions.Join | actions.Leave):
            self._is_paused = False
        if isinstance(action, actions.Reconnect):
            return []
        return [(self.name, DeviceOrder(self.name, action))]

    def take_disturbances(self) -> list[Disturbance]:
        self._note_gap()  # which may last until the end of the run
        with self._lock:
            found, self._noticed = self._noticed, []
            return found

    def _note(self, since: float, reason: str, *, is_over: bool = True) -> None:
        with self._lock:
            self._noticed.append(Disturbance(self.name, time.monotonic(), since, reason, is_over))

    def stop_watching(self) -> None:
        self._stopping.set()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        """Watch the device until the end of the run. After each loss of contact, try again."""
        while not self._stopping.is_set():
            try:
                with self._connections.channel(self.target, "watch", self._request, timeout=None) as one:
                    self._follow(one)
            except Exception as error:  # noqa: BLE001  (a device may send anything; a gap is noted)
                self._failure = str(error)
            self._stopping.wait(_RETRY_SECONDS)

    def _follow(self, channel: Channel) -> None:
        lines, since = 0, time.monotonic()
        while not self._stopping.is_set():
            line, lines = channel.source.readline(_LINE_BYTES), lines + 1
            if lines > _MAX_LINES and time.monotonic() - since < lines / _MAX_LINES:
                raise HostError(f"{self.target.host}: it sends far too much")
            if line == b"?\n":
                channel.sink.write(b"%d\n" % time.monotonic_ns())
                channel.sink.flush()
                continue
            if not line:
                return
            self._handle(parse(line))

    def _handle(self, state: Any) -> None:
        """Raises ValueError for an invalid report of the device's keeper."""
        match state:
            case {"gone": True}:
                self.exit_code = 1
                self._reported = None
                self._note(time.monotonic(), f"the files of {self.name} were removed from its machine")
                self._stopping.set()
            case {"kept": bool(kept), "exit": int() | None as code, "uncertainty": int(uncertainty)}:
                if not 0 <= uncertainty <= _MAX_UNCERTAINTY:
                    raise ValueError(f"uncertainty {uncertainty} ns")
                self.uncertainty = uncertainty / 1e9
                if isinstance(cpu := state.get("cpu"), dict):
                    self._cpu = _cpu_seconds(cpu)
                self._note_gap(is_over=True)
                self._compared.set()
                if code is not None and 0 <= code < 128:
                    self.exit_code = code
                elif code is not None or not kept:
                    self._start_again(code)
            case _:
                raise ValueError("the report has another form")

    def _note_gap(self, *, is_over: bool = False) -> None:
        """Once when it is noticed, and again when it is over: reports come once a second. `is_over`: a
        report has arrived now."""
        now, since = time.monotonic(), self._reported
        if is_over:
            self._reported = now
        elif since == self._noted_gap:
            return
        if since is not None and now - since >= STANDSTILL_SECONDS:
            self._noted_gap = since
            reason = f"there was no contact with {self.name} ({self.target.host})"
            self._note(since, reason, is_over=is_over)

    def _start_again(self, code: int | None) -> None:
        """Start the device's processes again, which a power cut or a signal has ended."""
        if self._restarts == _MAX_RESTARTS:
            self.exit_code = 1 if code is None else code if code >= 0 else 128 - code
            return
        self._restarts += 1
        begin, self._reported = time.monotonic(), None
        why = "were gone, as after a power cut" if code is None else f"had ended with exit code {code}"
        try:
            self._start(self._configurations())
        except HostError:
            self._note(begin, f"the processes of {self.name} {why}, and starting them again failed")
            self._reported = begin
            raise
        self._note(begin, f"the processes of {self.name} {why}, and were started again")
        self._reported = time.monotonic()


def _received_rate(channel: Channel, size: int, *, is_shaped: bool) -> float | None:
    """bit/s of `size` bytes from the device; None if all came at once."""
    try:
        rate, _ = program.receive(channel.source, size, is_shaped=is_shaped)
    except program.RequestError as error:
        raise HostError(str(error)) from None
    return rate


def _link_figures(values: dict[str, float]) -> LinkFigures:
    """Return what a device has measured, within the bounds of the message that has it."""
    try:
        return msgspec.convert(values, LinkFigures)
    except msgspec.ValidationError as error:
        raise HostError(f"the measurement of its link is impossible: {error}") from None


def _numbers(values: dict[Any, Any], names: Sequence[str], largest: float) -> dict[str, float]:
    """Finite numbers from 0 to `largest` among `names`: devices are not trusted."""
    found = {name: values.get(name) for name in names}
    return {
        name: float(one)
        for name, one in found.items()
        if isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one <= largest
    }


def _cpu_seconds(values: dict[Any, Any]) -> dict[str, float]:
    """Raises ValueError if one is missing or invalid."""
    found = _numbers(values, _LOADS, _MAX_SECONDS)
    if len(found) < len(_LOADS) or found["cores"] < 1:
        raise ValueError(f"CPU seconds {values}")
    return found
