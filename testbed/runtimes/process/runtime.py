"""The `process` runtime: devices are ordinary processes of this host, limited by a duty cycle.

It is the default if no Docker engine answers. It limits CPU time, and measures memory without a limit.
If devices have links, a relay (testbed.relay) connects them to the broker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import psutil

from agents import device_actions as actions
from agents.config import BEGUN, BrokerAccess
from agents.disk.files import atomic_write
from agents.fields import FeatureAction
from agents.mqtt.topics import AGGREGATOR, CONTROLLER, ROUTER
from agents.wire.messages import AddressedOrder, DeviceOrder
from testbed import broker
from testbed.broker import (
    BROKER,
    INSTALL_MOSQUITTO,
    Account,
    Listeners,
    TlsIdentity,
    find_mosquitto,
    lack_of_broker,
)
from testbed.broker.access import new_identity
from testbed.errors import BadInputError, HostError, from_os_error
from testbed.host import forkserver, processes, programs
from testbed.host.forkserver import ForkServer
from testbed.plan import agent_configs, to_host_time
from testbed.plan.agent_configs import THREAD_VARIABLES, Places, RunSpec, real_places
from testbed.relay import relay_process as relay
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import LiveRun
from testbed.runtimes.process.device_features import DeviceFeatures
from testbed.runtimes.process.duty_cycle import Children, DutyCycle
from testbed.runtimes.process.log_writer import LogWriter
from testbed.runtimes.process.meter import ProcessMeter
from testbed.view import View

HOST = "127.0.0.1"
BROKER_TIMEOUT_SECONDS = 10.0
GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL."""

_MODULE = tuple(programs.command(""))[:-1]
"""Beginning of a command that runs a Python module."""
_LATER = {"agents.client.main": ("agents.client.training",)}
"""Imported only while a program runs, by the program's own module."""

# Environment variables that mark a process as a component of a run.
RUN, COMPONENT, DIRECTORY = "TESTBED_RUN", "TESTBED_PART", "TESTBED_DIRECTORY"


def is_available() -> bool:
    """True: this runtime is used if no other is available. `check_host` reports what this host lacks."""
    return True


def check_host() -> None:
    """Raise HostError if neither Mosquitto nor amqtt is installed."""
    if (lack := lack_of_broker()) is not None:
        raise HostError(lack)


@contextlib.contextmanager
def launcher(spec: RunSpec, view: View) -> Iterator[ProcessRuntime]:
    """Print a message if the run has to use the embedded broker."""
    runtime = ProcessRuntime(spec)
    if runtime.broker_kind != "mosquitto":
        view.progress(
            "Using the embedded broker: it may lose messages when a connection breaks, and has no limit "
            f"on messages that wait for a slow process. To use Mosquitto: {INSTALL_MOSQUITTO}"
        )
    yield runtime


def live_runs() -> list[LiveRun]:
    """Runs that have a process on this host. If a run uses another runtime, its only process here is the
    controller."""
    runs: defaultdict[str, list[ProcessInfo]] = defaultdict(list)
    for info in find():
        runs[info.run].append(info)
    found = []
    for run, infos in runs.items():
        components = sum(info.component not in (CONTROLLER, forkserver.NAME) for info in infos)
        runtime = "process" if components else None
        found.append(LiveRun.from_labels(run, runtime, components, infos[0].directory))
    return found


def take_down(run: str, directory: RunDirectory | None) -> bool:
    """Ends the controller, too. Return True: this runtime is always available."""
    remove(run)
    return True


def logs(run: str, tail: int) -> dict[str, list[str]]:
    """Return no logs, because processes write their logs to the run directory during the run."""
    return {}


@dataclass(frozen=True, slots=True)
class Programs:
    """Commands of the components; agents get the path of their configuration. Python modules with a
    function `main` are forked from one process that has imported them."""

    mosquitto: str | None = field(default_factory=find_mosquitto)
    """None for the embedded broker."""
    aggregator: tuple[str, ...] = (*programs.command("agents.aggregator.main"),)
    client: tuple[str, ...] = (*programs.command("agents.client.main"),)
    relay: tuple[str, ...] = (*programs.command("testbed.relay.main"),)


class ProcessRuntime:
    """For the main thread only: when a thread ends, all processes that it has started end, too
    (`host.programs`)."""

    def __init__(self, spec: RunSpec, programs: Programs | None = None) -> None:
        self._spec = spec
        self._directory = spec.directory
        self._devices = {device.name: device for device in spec.plan.emulated_devices}
        self._programs = programs or Programs()
        self._children = Children()
        self._forks: ForkServer | None = None
        self._commands: dict[str, list[str]] = {}
        """Commands with which broker and aggregator are restarted, by component."""
        self._logs = LogWriter()
        self._duty_cycle = DutyCycle()
        self._away: set[str] = set()
        """Devices that an action has ended, and that may start again."""
        self._restarting: set[str] = set()
        """Devices to start when their old process has ended."""
        self._paused: set[str] = set()
        self._down = set(spec.plan.absent)
        """Devices that are absent, or ended by a crash or leave."""
        self._unpowered: set[str] = set()
        self._memory_lost: set[str] = set()
        """Devices whose files a power-off has erased, which are deleted before the next start."""
        self._has_relay = relay.is_needed(spec)
        self._relay: relay.StartedRelay | None = None
        self._features = DeviceFeatures(
            spec.plan.emulated_devices, self._children, spec.plan.absent, self._power_off
        )
        self.meter = ProcessMeter(
            self._devices, self._children, self._paused, self._duty_cycle, self._features
        )

    @property
    def broker_kind(self) -> str:
        """`mosquitto` or `amqtt (embedded)`."""
        return "mosquitto" if self._programs.mosquitto else "amqtt (embedded)"

    def start(self) -> BrokerAccess:
        """Start broker, aggregator and all devices. Return the controller's login at the broker.

        Links are measured before the devices start, so that nothing disturbs that. Raises HostError if
        the broker or the relay does not start, a link cannot be measured, or the host allows too few
        file descriptors.
        """
        count = len(self._devices)
        processes.raise_limit((4 if self._has_relay else 1) * count, f"{count:,} devices")
        topology = self._spec.topology
        accounts = broker.accounts(
            self._directory.run, topology.device_names, peers=topology.has_exchange
        )
        server, tls = self._spec.plan.server, topology.broker.tls
        names = (HOST,) if server is None else (HOST, server[0])
        identity = new_identity(*names) if tls or server is not None else None
        port, tls_port = free_ports(2)
        at = Listeners(HOST, port, tls_port if tls else None, remote=server)
        self._commands[BROKER] = self._broker_command(accounts, at, identity)
        self._commands[AGGREGATOR] = [*self._programs.aggregator, self._config(AGGREGATOR)]
        self._spawn(BROKER, self._commands[BROKER])
        self._wait_for_broker(at.port)
        login = accounts[ROUTER].at(HOST, at.port)
        ports = self._start_relay(login, at.clients_port) if self._has_relay else {}
        places = Places(
            clients=(HOST, at.clients_port),
            aggregator=(HOST, at.port),
            router=(HOST, at.port),
            certificate=identity.certificate if identity and tls else None,
            ports=ports,
            real=real_places(server, identity.certificate) if identity and server else None,
        )
        self._forks = self._fork_server()  # after the links are measured, which its start would disturb
        agent_configs.write(self._spec, accounts, places)
        self._spawn(AGGREGATOR, self._commands[AGGREGATOR])
        absent = self._spec.plan.absent
        for name in self._devices:
            if name not in absent:
                self._spawn_client(name)
        return accounts[CONTROLLER].at(HOST, at.port)

    def limit(self, device: str) -> None:
        """No effect on a device that has ended, or that was not started: then somebody else has logged
        in under its name.

        Do not limit a process before its client is ready. A process first asks the kernel to end it
        together with the controller; suspended before that, it could outlive the controller.
        """
        if device not in self._children:
            return
        share = self._devices[device].host_cpu
        self._duty_cycle.limit(device, self._children[device].pid, share)
        with atomic_write(self._directory.share(device)) as partial:
            partial.write_text(repr(share))
        self._features.ready(device)

    def measure_again(self, devices: Sequence[str]) -> list[AddressedOrder]:
        if devices and self._relay is not None:
            self.meter.probes = self._relay.measure(devices)
        return []

    def begin(self) -> None:
        """Close the server for measurements. Processes have no weights."""
        if self._relay is not None:
            self._relay.close()

    def act(self, device: str, action: actions.DeviceAction) -> list[AddressedOrder]:
        """The relay changes links; signals do everything else. Raises BadInputError if a link cannot
        change as requested."""
        if isinstance(action, actions.SetLink | actions.Disconnect | actions.Reconnect):
            return [(ROUTER, DeviceOrder(device, self._link_action(action)))]
        match action:
            case actions.SetCpu(cpu):
                self._devices[device] = replace(self._devices[device], cpu=cpu)
                if self._is_running(device) and device not in self._paused:
                    self.limit(device)
            case actions.Crash():
                self._down.add(device)
                self._end(device, signal.SIGKILL)
            case actions.Leave():
                self._features.set_present(device, is_present=False)
                self._down.add(device)
                self._paused.discard(device)
                self._end(device, signal.SIGTERM)
            case actions.Restart():
                self._down.discard(device)
                if not self._is_running(device) and device not in self._unpowered:
                    self._restarting.add(device)
                    self._start_restarting()
            case actions.Join():  # which also ends a pause or disconnection
                self._features.set_present(device, is_present=True)
                reconnect = [*self.act(device, actions.Reconnect())] if self._has_relay else []
                return [
                    *reconnect,
                    *self.act(device, actions.Resume()),
                    *self.act(device, actions.Restart()),
                ]
            case actions.Pause():
                self._paused.add(device)
                if self._is_running(device):  # a process that is ending must not be suspended
                    self._duty_cycle.release(device)
                    self._children[device].send_signal(signal.SIGSTOP)
            case actions.Resume() if device in self._paused:
                self._paused.discard(device)
                if self._is_running(device):
                    self._children[device].send_signal(signal.SIGCONT)
                    self.limit(device)
            case actions.Resume():
                pass  # it is running already
            case actions.PowerOff():
                pass  # its features have ended the client already
            case actions.PowerOn():
                self._unpowered.discard(device)
                if device in self._away and device not in self._down:
                    self._restarting.add(device)
                    self._start_restarting()
            case FeatureAction():
                self._features.act(device, action)
            case _:
                assert_never(action)
        return []

    def _power_off(self, device: str, *, loses_memory: bool) -> None:
        self._unpowered.add(device)
        if loses_memory:
            self._memory_lost.add(device)
        self._end(device, signal.SIGKILL)

    def _link_action(
        self, action: actions.SetLink | actions.Disconnect | actions.Reconnect
    ) -> actions.SetLink | actions.Disconnect | actions.Reconnect:
        """Convert to the relay's units. Raises BadInputError if the relay cannot carry out the
        action."""
        if not self._has_relay:
            raise BadInputError(
                "links cannot change in this run, because no device has a link: add one to the "
                "topology, such as link: {rtt: 1ms}"
            )
        if not isinstance(action, actions.SetLink):
            return action
        if action.changes.get("loss"):
            raise BadInputError(
                "the process runtime cannot lose packets, because its links are TCP relays: use the "
                "docker runtime"
            )
        changes = to_host_time(action.changes, self._spec.plan.dilation)
        rates = ("up", "down")
        return actions.SetLink({k: v if k in rates else v or 0.0 for k, v in changes.items()})

    def _is_running(self, device: str) -> bool:
        return self._children.is_alive(device) and device not in self._away

    def _end(self, device: str, how: signal.Signals) -> None:
        """The device may start again. The process is also resumed, because a suspended process reacts
        only to SIGKILL."""
        self._restarting.discard(device)
        if self._children.is_alive(device):
            self._away.add(device)
            self._duty_cycle.release(device)
            self._children[device].send_signal(how)
            self._children[device].send_signal(signal.SIGCONT)

    def _start_restarting(self) -> None:
        """Start devices whose old processes have ended."""
        for device in [device for device in self._restarting if not self._children.is_alive(device)]:
            self._restarting.discard(device)
            self._away.discard(device)
            if device in self._memory_lost:
                self._memory_lost.discard(device)
                self._erase_memory(device)
            self._spawn_client(device)
            if device in self._paused:  # it was paused while it was down
                self._children[device].send_signal(signal.SIGSTOP)

    def _erase_memory(self, device: str) -> None:
        """Delete the client's files, but for the count of its trainings, which belongs to the
        emulation."""
        for path in self._directory.disk(device).iterdir():
            if path.name != BEGUN:
                path.unlink()

    def exit_codes(self) -> dict[str, int]:
        """Components that have ended by themselves; −n for signal n. Also starts devices whose start
        waited for the end of their old process."""
        self._start_restarting()
        self._duty_cycle.check()
        codes = {name: child.poll() for name, child in self._children.items() if name not in self._away}
        return {name: code for name, code in codes.items() if code is not None}

    def restart(self, component: str) -> int | None:
        self._spawn(component, self._commands[component])
        return None

    def stop(self) -> None:
        """Agents end first, so that none reports that the broker is lost. Idempotent. Raises HostError
        after all processes have ended, if logs could not be saved."""
        self._restarting.clear()
        self._duty_cycle.close()
        if self._relay is not None:
            self._relay.close()
        last = (ROUTER, BROKER)
        end([child for component, child in self._children.items() if component not in last])
        end([child for component, child in self._children.items() if component in last])
        for child in self._children.values():
            child.wait()
        if self._forks is not None:
            self._forks.close()
        # Processes that are not in self._children: their children, and one whose start was interrupted.
        # Processes of the controller, such as trackers, continue until the run has ended.
        remove(self._directory.run, spare=CONTROLLER)
        if failures := self._logs.close():
            reasons = "; ".join(str(from_os_error(failure)) for failure in failures)
            run = self._directory.run
            raise HostError(f"everything of {run} is removed, but logs could not be saved: {reasons}")

    def _log_tail(self, component: str) -> str:
        self._logs.catch_up()
        return self._directory.log_tail(component)

    def _start_relay(self, login: BrokerAccess, port: int) -> Mapping[str, int]:
        """Measure the links, too. Return the relay's port for each device."""
        command = [*self._programs.relay, self._config(ROUTER)]
        try:
            started = relay.launch_relay(
                self._spec, login, port, lambda fds: self._spawn(ROUTER, command, pass_fds=fds)
            )
        except OSError as error:
            log = self._log_tail(ROUTER)
            raise HostError(f"the relay does not answer ({error}).{log}") from error
        self._relay = started
        self.meter.probes = started.probes
        self.meter.traffic = started.traffic
        self._features.watch_traffic(started.traffic)
        return started.ports

    def _spawn_client(self, name: str) -> None:
        command = [*self._programs.client, self._config(name)]
        self._spawn(name, command, self._devices[name].threads)

    def _config(self, name: str) -> str:
        return str(self._directory.config(name))

    def _broker_command(
        self, accounts: Mapping[str, Account], at: Listeners, identity: TlsIdentity | None
    ) -> list[str]:
        folder = self._directory.work / BROKER
        limits = agent_configs.broker_limits(self._spec.topology)
        if self._programs.mosquitto is None:
            config = broker.write_embedded(folder, accounts, at, identity, limits=limits)
            return programs.command("testbed.broker.embedded", str(config))
        conf = broker.write_mosquitto(folder, accounts, at, identity, limits=limits)
        pipe = str(folder / "log")
        return list(broker.mosquitto_command(self._programs.mosquitto, str(conf), pipe))

    def _fork_server(self) -> ForkServer | None:
        """Start a process that imports the agents' modules, and from which they are forked. None if the
        agents are no Python modules, or the host cannot fork."""
        programs = self._programs.aggregator, self._programs.client
        modules: list[str] = []
        for *start, module in programs:
            if tuple(start) == _MODULE:
                modules += (module, *_LATER.get(module, ()))
        if not (modules and forkserver.AVAILABLE):
            return None
        room = max(len(name) for name in (AGGREGATOR, *self._devices))
        return ForkServer(modules, self._environment(forkserver.NAME), COMPONENT, room)

    def _spawn(
        self, name: str, command: list[str], threads: int = 1, pass_fds: Sequence[int] = ()
    ) -> None:
        """In a session of its own, so that Ctrl-C in the terminal reaches only the controller."""
        plan = self._spec.plan
        cpus = plan.device_cpus if name in self._devices else plan.infrastructure_cpus
        log = self._logs.pipe(self._directory.log(name))
        *start, module, argument = command
        forks = self._forks
        try:
            # Libraries read the number of threads when they are imported; in the fork server it is 1.
            if forks and tuple(start) == _MODULE and module in forks.modules and threads == 1:
                self._children[name] = forks.fork(module, argument, name=name, cpus=cpus, log=log)
                return
            self._children[name] = psutil.Popen(
                [*programs.tied_prefix(cpus), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(name, threads),
                start_new_session=True,
                pass_fds=pass_fds,
            )
        finally:
            os.close(log)

    def _environment(self, component: str, threads: int = 1) -> dict[str, str]:
        return {
            **os.environ,
            **environment(self._directory, component),
            **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        }

    def _wait_for_broker(self, port: int) -> None:
        deadline = time.monotonic() + BROKER_TIMEOUT_SECONDS
        while time.monotonic() < deadline and self._children[BROKER].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
                return
            time.sleep(0.02)
        code = self._children[BROKER].poll()
        reason = "does not answer" if code is None else f"ended with exit code {code}"
        raise HostError(
            f"the broker ({self.broker_kind}) on {HOST}:{port} {reason}.{self._log_tail(BROKER)}"
        )


def environment(directory: RunDirectory, component: str) -> dict[str, str]:
    """Variables that mark a process as `component` of a run, and make Python write its output line by
    line."""
    return {
        RUN: directory.run,
        COMPONENT: component,
        DIRECTORY: str(directory.path),
        "PYTHONUNBUFFERED": "1",
    }


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A live process of a run."""

    process: psutil.Process
    """psutil compares the start time, so that a later process with the same pid is never signalled by
    mistake."""
    run: str
    component: str
    directory: str | None


def find() -> list[ProcessInfo]:
    """Processes of this user with the variable `RUN` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            marks = process.environ() if process.uids().real == os.getuid() else {}
        except psutil.Error:  # it has ended, or is another user's
            continue
        if RUN in marks:
            component = marks.get(COMPONENT, "").rstrip()  # forks pad it to the longest name
            found.append(ProcessInfo(process, marks[RUN], component, marks.get(DIRECTORY)))
    return found


def remove(run: str | None = None, spare: str | None = None) -> int:
    """End all processes, also suspended ones, of `run`, or of all runs if it is None. Return their
    number. The calling process, its ancestors, and the component `spare` are left alone."""
    me = psutil.Process()
    spared = {me.pid, *(parent.pid for parent in me.parents())}
    marked = [info.process for info in find() if run in (None, info.run) and info.component != spare]
    processes = [process for process in marked if process.pid not in spared]
    end(processes)
    return len(processes)


def end(processes: Sequence[psutil.Process]) -> None:
    """SIGTERM, then SIGKILL after GRACE_SECONDS, also for suspended processes. They are not reaped."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            process.resume()
    for process in still_alive(processes, GRACE_SECONDS):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    still_alive(processes, GRACE_SECONDS)


def still_alive(processes: Iterable[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait at most `timeout` seconds for the end of all. They are not reaped."""
    deadline = time.monotonic() + timeout
    alive = list(processes)
    while alive := [process for process in alive if is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return alive


def is_alive(process: psutil.Process) -> bool:
    """A zombie counts as ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
