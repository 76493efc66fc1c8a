"""Random faults on real runs: `python -m tests.chaos --runs 20 --runtime process`.

Each run has a rule in its turn, and from its seed some faults: broker, aggregator, a client or the
controller is killed (after the last, the run is resumed) or frozen for a while, the connection of a
process to the broker is broken, the disk is full for a while, messages are delivered twice, a device
crashes, is cut off or paused, a file of the run is damaged while nothing of it lives. With `--features`
the devices have batteries that run empty, a segment, compressed updates and a selection, and two real
devices take part, which lose their cable or power.

A run is as it should be if it completes, all clients go on after the last fault, of what the clients
have finished nothing is lost and nothing is applied twice, the records name what was frozen, and nothing
is left anywhere. With a damaged file it must not be resumed, but for odd ones among clients' updates,
and no file may change, until the file is as it was.

What a client has finished is what it has put into its folder, which the kernel tells (`Finished`, by
inotify); what became of it is in `events.jsonl`, by client and number of the dispatch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import psutil

from agents import events
from agents.device_actions import Restart, to_json
from agents.energy.messages import RoundEnergy
from agents.events import COMPLETE
from agents.mqtt.topics import AGGREGATOR, CONTROLLER
from testbed.broker import BROKER
from testbed.errors import TestbedError
from testbed.plan.agent_configs import MQTT_PORT, TLS_PORT
from testbed.rundir import live_files
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import RecordFollower
from testbed.runtimes.process.runtime import find
from tests.running import (
    Finished,
    cli,
    left_as_processes,
    left_in_docker,
    started,
    write_topology,
)
from tests.ssh_servers import SshServer, SshServers, servers

RULES: Mapping[str, Mapping[str, Any]] = {
    "fedbuff": {"name": "fedbuff", "buffer_size": 2},
    "defedavg_niid": {"name": "defedavg_niid", "sample": 2, "send_buffer": "hold"},
    "fedavg": {"name": "fedavg"},
    "area": {"name": "area", "every": 1},
    "port": {"name": "port", "min_updates": 2},
}
CLIENTS = ("a", "b", "c", "d")
REAL_DEVICES = ("pi-1", "pi-2")
DRAWING_RULES: Mapping[str, Mapping[str, Any]] = {
    "fedbuff": {"name": "fedbuff", "buffer_size": 2, "concurrency": 5},
    "defedavg_niid": {"name": "defedavg_niid", "sample": 5, "send_buffer": "hold"},
    "fedavg": {"name": "fedavg", "sample": 5},
    "port": {"name": "port", "min_updates": 2, "concurrency": 5},
}
SELECTIONS = ("uniform", "round_robin")
_BATTERY = {
    "idle": "1W",
    "core": "2W",
    "sent": "1J/MB",
    "battery": {"capacity": "1Wh", "power_off_at": "5%", "return_at": "20%"},
    "charger": "400W",
}
"""A battery that is empty returns after two seconds."""
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "a": {"energy": _BATTERY},
    "b": {"energy": _BATTERY, "link": {"compression": {"kind": "fp16"}}},
    "c": {"segment": "cell", "link": {"compression": {"kind": "topk", "share": "10%"}}},
    "d": {"segment": "cell", "link": {"up": "2mbit", "compression": {"kind": "int8"}}},
}
"""What the clients have with `--features`."""
CELL = {"cell": {"up": "4mbit", "down": "8mbit", "rtt": "4ms"}}
FILES = ("log", "checkpoint", "topology", "outbox")
FAULTS = """
import os, random, shutil, signal, socket, stat, threading, time
import paho.mqtt.client as paho
made, clients = paho.Client.__init__, []
def make(client, *args, **options):
    clients.append(client)
    made(client, *args, **options)
paho.Client.__init__ = make
def break_connections(*_):
    own = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.stat(number).st_mode):
                one = socket.socket(fileno=os.dup(number))
                own[one.getsockname()] = one
        except OSError:
            pass
    for one in own.values():
        if one.family == socket.AF_INET and one.getpeername() not in own:  # else a pair of paho's own
            one.shutdown(socket.SHUT_RDWR)
        one.close()
signal.signal(signal.SIGUSR1, break_connections)
def flood(*_):
    topic = f"testbed/{os.environ['TESTBED_RUN']}/update/{os.environ['TESTBED_PART']}"
    def push():
        while True:
            try:
                for _ in range(50):
                    sent = clients[-1].publish(topic, bytes(4_000))
                sent.wait_for_publish()
            except (RuntimeError, ValueError):  # there is no connection, for now
                time.sleep(0.1)
    threading.Thread(target=push, daemon=True).start()
signal.signal(signal.SIGUSR2, flood)
if os.environ.get("WITHOUT_MOSQUITTO"):
    which = shutil.which
    shutil.which = lambda name, **more: None if name == "mosquitto" else which(name, **more)
if os.environ.get("MESSAGES_TWICE"):
    handle, recent = paho.Client._handle_on_message, []
    def twice(client, message):
        handle(client, message)
        recent[:] = [*recent[-2:], message]
        if random.random() < 0.2:
            for one in recent:
                handle(client, one)
    paho.Client._handle_on_message = twice
"""
"""A `sitecustomize` that has a process break its TCP connections when it gets SIGUSR1, that has a client
flood on its topic when it gets SIGUSR2, and that can have the latest messages come once more, in order,
as from a broker that has missed their acknowledgement."""
_MOST_RESUMES = 6
_DISK_MIB = 96
_FULL_SECONDS = 1.5
_FROZEN_SECONDS = 5.0
_UNPLUGGED_SECONDS = 2.0
_PORT = 18_891
_IN_MOVED_TO = 0x80
_INOTIFY_EVENT = struct.Struct("iIII")


@dataclass(frozen=True)
class Fault:
    """At `at` seconds of the run: `kill`, `freeze` for a while, or `break` (the connection) of `part`,
    `fill` the disk, let the client `part` `flood` the aggregator, which shuts it out, or kill the
    controller and `damage` the file `part` before the run is resumed."""

    at: float
    what: str
    part: str

    def __str__(self) -> str:
        return f"{self.what} {self.part} {self.at:g}s"


@dataclass(frozen=True)
class Outcome:
    """What became of a run; `wrong`, if anything, is not as it should be."""

    run: Finished
    output: str
    wrong: Sequence[str] = ()
    finished: int = 0
    """Updates that clients have finished."""
    applied: int = 0
    reported: int = 0
    """Of what was finished and not applied: what the records tell of."""
    lost: Sequence[str] = ()
    """The rest of it."""
    twice: Sequence[str] = ()
    """Updates that were applied more than once."""
    resumed: int = 0
    reasons: Sequence[str] = field(default_factory=list)
    """Why the run is not valid."""


class Outboxes:
    """Follows what `clients` put into their folders below `runs`, from before the run clock starts.
    `homes`: home folders of real devices, where the folders are made anew when a run is resumed."""

    def __init__(self, runs: Path, clients: Sequence[str] = CLIENTS, homes: Sequence[Path] = ()) -> None:
        self._runs, self._names, self._homes = runs, {*clients}, homes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_CLOEXEC)
        if self._inotify < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._clients: dict[int, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self.finished: Counter[tuple[str, int]] = Counter()
        """Number of finished updates by client and dispatch."""

    def __enter__(self) -> Outboxes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        os.close(self._inotify)

    @property
    def complete(self) -> bool:
        """Whether the folders of all clients are followed."""
        return set(self._clients.values()) >= self._names

    def _follow(self) -> None:
        while not self._over.is_set():
            if self._homes or not self.complete:
                folders = {folder: folder.name for folder in self._runs.glob("*/state/clients/*")}
                for home in self._homes:
                    found = home.glob(".cache/edge-fl-testbed/runs/*/*/disk")
                    folders |= {folder: folder.parent.name for folder in found}
                for folder, name in folders.items():
                    watched = self._libc.inotify_add_watch(
                        self._inotify, bytes(folder), ctypes.c_uint32(_IN_MOVED_TO)
                    )
                    if watched >= 0:
                        self._clients[watched] = name
            while select.select([self._inotify], [], [], 0.05)[0]:
                self._read(os.read(self._inotify, 1 << 16))

    def _read(self, data: bytes) -> None:
        while data:
            watched, _, _, length = _INOTIFY_EVENT.unpack_from(data)
            name = data[_INOTIFY_EVENT.size : _INOTIFY_EVENT.size + length].rstrip(b"\0").decode()
            if name.endswith(".update") and not name.startswith("."):
                self.finished[self._clients[watched], int(name.removesuffix(".update"))] += 1
            data = data[_INOTIFY_EVENT.size + length :]


class _Live:
    """A run that is started, and resumed whenever it has ended before it was complete."""

    def __init__(
        self, stack: ExitStack, runs: Path, environment: Mapping[str, str], stopped: threading.Event
    ) -> None:
        self._stack, self._runs, self._environment, self._stopped = stack, runs, environment, stopped
        self.resumed = 0
        self.output = ""
        self._begun = 0.0
        self._ended = False
        """It does not go on any more."""
        self.up: subprocess.Popen[str]

    def start(self, *arguments: str | Path) -> None:
        self._begun = time.time()
        command = ("up", *arguments, "--runs", self._runs)
        self.up = self._stack.enter_context(started(*command, environment=self._environment))

    @property
    def name(self) -> str:
        return next(self._runs.iterdir()).name

    @property
    def complete(self) -> bool:
        """Whether it has ended as planned: containers do so also where their controller was killed."""
        records = RecordFollower(self._runs / self.name / "events.jsonl").read()
        return any(isinstance(one, events.RunEnded) and one.reason in COMPLETE for one in records)

    def goes_on(self) -> bool:
        """Whether it does; resumes it where it has ended early, as a user would. Raises InterruptedError
        where the tests are `stopped`."""
        if self._stopped.is_set():
            raise InterruptedError
        if self._ended or self.up.poll() is None:
            return not self._ended
        self.output += self.up.communicate()[0]
        self._ended = self.complete or self.resumed == _MOST_RESUMES
        if not self._ended:
            cli("down", self.name, "--runs", self._runs)
            self._ended = self.complete  # containers need no controller to get to the end
        if self._ended:
            return False
        self.resumed += 1
        self.start("--resume", self.name)
        return True

    def until(self, at: float) -> bool:
        """Wait for `at` seconds of the run clock; False where the run has ended before."""
        while self.goes_on():
            zero = self._zero()
            if zero is not None and time.time() >= zero + at:
                return True
            time.sleep(0.02)
        return False

    def _zero(self) -> float | None:
        """The Unix time when the run clock, as it goes now, showed 0; None: it stands still."""
        for path in self._runs.glob("*/events.jsonl"):
            starts = [one for one in RecordFollower(path).read() if isinstance(one, events.RunStarted)]
            if starts and starts[-1].wall_clock >= self._begun:
                return starts[-1].wall_clock - starts[-1].at
        return None


def run(
    folder: Path,
    rule: Mapping[str, Any],
    faults: Sequence[Fault],
    *,
    scenario: Sequence[Mapping[str, Any]] = (),
    runtime: str = "process",
    embedded: bool = False,
    twice: bool = False,
    after: float = 25.0,
    calm: float = 8.0,
    stopped: threading.Event | None = None,
    hosts: SshServers | None = None,
    selection: str | None = None,
) -> Outcome:
    """Run four clients for `after` seconds under `faults`; in the last `calm` ones, all have to go on.
    `embedded`: with the embedded broker. `twice`: messages may come twice. `hosts`: two machines that
    take part as real devices; then the clients have `FEATURES`, and a `selection` chooses them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(FAULTS)
    devices: list[dict[str, Any]] = [
        {"name": name, "cpu": 0.2, "timing": f"{timing}ms", "link": {"rtt": "1ms"} if scenario else None}
        for name, timing in zip(CLIENTS, (150, 200, 300, 400), strict=True)
    ]
    clients: tuple[str, ...] = CLIENTS
    features: dict[str, Any] = {}
    if hosts is not None:
        clients += REAL_DEVICES
        devices = [{**one, **FEATURES[one["name"]]} for one in devices]
        addresses = [f"root@{machine.name}" for machine in hosts.machines]
        devices.append(
            {"name": "pi", "hosts": addresses, "python": sys.executable, "local": {"steps": 2}}
        )
        server = {"address": hosts.address, "port": _PORT}
        features = {"network": CELL, "selection": {"name": selection}, "server": server, "dilation": 1}
    topology = write_topology(
        folder,
        **features,
        rule=dict(rule),
        devices=devices,
        scenario=list(scenario),
        stop={"after": f"{after}s"},
        evaluate={"every": "5s"},
        durability="recording",
    )
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": paths, "WITHOUT_MOSQUITTO": "yes" if embedded else ""}
    environment["MESSAGES_TWICE"] = "yes" if twice else ""
    runs = folder / "runs"
    runs.mkdir()
    full = any(fault.what == "fill" for fault in faults)
    with ExitStack() as stack:
        if full:
            stack.enter_context(_small_disk(runs))
        homes = [machine.home for machine in hosts.machines] if hosts is not None else []
        outboxes = stack.enter_context(Outboxes(runs, clients, homes))
        live = _Live(stack, runs, environment, stopped or threading.Event())
        live.start(topology, "--runtime", runtime)
        followed = live.until(0) and outboxes.complete
        wrong = []
        for fault in sorted(faults, key=lambda fault: fault.at):
            if live.until(fault.at):
                if fault.part in REAL_DEVICES and hosts is not None:
                    _do_to_machine(fault, hosts.machines[REAL_DEVICES.index(fault.part)])
                else:
                    _do(fault, live.name, runs, runtime)
                if fault.what == "damage":
                    live.up.wait()
                    cli("down", live.name, "--runs", runs)
                    wrong += _damage(fault, RunDirectory(runs / live.name))
        while live.goes_on():
            time.sleep(0.05)
        try:
            found = Finished.only_one_in(runs)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"there was no run: {error}\n{live.output}") from error
    if live.up.returncode not in (0, -signal.SIGKILL):
        wrong.append(f"exit code {live.up.returncode}: {live.output[-600:]}")
    wrong += [] if followed else ["the clients' folders were not followed from the start"]
    disrupted = [one.reason for one in found.records if isinstance(one, events.Disrupted)]
    for fault in faults:
        others = [one.at for one in faults if one.what not in ("freeze", "break")]
        alone = all(abs(at - fault.at) > 2 * _FROZEN_SECONDS for at in others)
        named = f"the {fault.part} stood still" in disrupted
        if fault.what == "freeze" and alone and not named:
            wrong.append(f"no record names the frozen {fault.part}")
    flooding = {fault.part for fault in faults if fault.what == "flood"}
    wrong += [f"{one} is left" for one in _left(live.name, runtime, hosts)]
    return _judged(found, live, outboxes.finished, wrong, after - calm, {*clients} - flooding)


def _left(name: str, runtime: str, hosts: SshServers | None) -> list[str]:
    """What is left of a run on this machine and on those of real devices."""
    found = left_as_processes(name)
    if runtime == "docker":
        with closing(docker.from_env()) as engine:
            found += left_in_docker(engine, name)
    return found + [str(one) for one in (hosts.left() if hosts is not None else ())]


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """`folder` on a disk of its own, for which one has to be root."""
    options = f"size={_DISK_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield
    finally:
        kept = folder.with_name("kept")
        subprocess.run(["cp", "-a", f"{folder}/.", str(kept)], check=True)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
        kept.rename(folder)


def _do_to_machine(fault: Fault, machine: SshServer) -> None:
    match fault.what:
        case "kill":
            for process in machine.processes("agents.client.main"):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        case "unplug":
            machine.unplug()
            time.sleep(_UNPLUGGED_SECONDS)
            machine.plug()
        case _:
            machine.power_off()
            time.sleep(_UNPLUGGED_SECONDS)
            machine.power_on()


def _do(fault: Fault, name: str, runs: Path, runtime: str) -> None:
    match fault.what, runtime:
        case "fill", _:
            _fill(runs / "filler")
        case "freeze", _:
            with suppress(psutil.NoSuchProcess):
                _freeze(fault.part, name, runs, runtime)
        case _ if fault.part == CONTROLLER or fault.what == "damage":
            controller = RunDirectory(runs / name).controller()
            if controller is not None:
                controller.kill()
                controller.wait()
        case "kill", "docker":
            container = f"testbed-{name}-{fault.part}"
            subprocess.run(["docker", "kill", container], capture_output=True, check=False)
        case "break", "docker":
            _break_container(f"testbed-{name}-{fault.part}")
        case _:
            sent = {"kill": signal.SIGKILL, "break": signal.SIGUSR1, "flood": signal.SIGUSR2}[fault.what]
            for info in find():
                if (info.run, info.component) == (name, fault.part):
                    info.process.send_signal(sent)
    if (fault.what, runtime) == ("kill", "process") and fault.part in CLIENTS:
        time.sleep(1.0)
        with suppress(TestbedError):  # it may have ended, or be busy with its end
            live_files.send_command(
                RunDirectory(runs / name), {"device": fault.part, **to_json(Restart())}
            )


def _freeze(part: str, name: str, runs: Path, runtime: str) -> None:
    """Stop `part` for a while, as `kill -STOP` or `docker pause` does."""
    container = f"testbed-{name}-{part}"
    if runtime == "docker" and part != CONTROLLER:
        subprocess.run(["docker", "pause", container], capture_output=True, check=False)
        time.sleep(_FROZEN_SECONDS)
        subprocess.run(["docker", "unpause", container], capture_output=True, check=False)
        return
    controller = RunDirectory(runs / name).controller()
    found = [one.process for one in find() if (one.run, one.component) == (name, part)]
    frozen = found if part != CONTROLLER else [controller] if controller is not None else []
    for one in frozen:
        one.suspend()
    time.sleep(_FROZEN_SECONDS)
    for one in frozen:
        one.resume()


def _damage(fault: Fault, run: RunDirectory) -> list[str]:
    """Damage a file of a run that does not live, and resume it; what is wrong with the answer."""
    if not run.checkpoint.is_file():  # it is complete, or never began
        return []
    rng = random.Random(f"{fault.at} {fault.part}")  # noqa: S311
    if fault.part == "outbox":
        folder = run.disk(rng.choice(CLIENTS))
        (folder / "9999.update").touch()
        (folder / "9998.update").mkdir()
        (folder / "abc.update").write_bytes(rng.randbytes(100))
        os.mkfifo(folder / "9997.update")
        return []
    path = {"log": run.inputs, "checkpoint": run.checkpoint, "topology": run.topology}[fault.part]
    whole = bytearray(path.read_bytes())
    how = "empty" if rng.random() < 0.3 else "a bit"
    data = bytearray() if how == "empty" else bytearray(whole)
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    before = run.events.read_bytes(), run.inputs.read_bytes(), run.checkpoint.read_bytes()
    said = cli("up", "--resume", run.run, "--runs", run.path.parent)
    output, wrong = said.stdout + said.stderr, []
    if said.returncode not in (1, 2) or "Traceback" in output:
        wrong.append(f"with its {fault.part} damaged ({how}) it ended with {said.returncode}: {output}")
    if (run.events.read_bytes(), run.inputs.read_bytes(), run.checkpoint.read_bytes()) != before:
        wrong.append(f"with its {fault.part} damaged ({how}) its files were changed")
    path.write_bytes(whole)
    return wrong


def _fill(file: Path) -> None:
    """Leave no byte of the disk for a while."""
    try:
        with file.open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    except OSError:
        time.sleep(_FULL_SECONDS)
    finally:
        file.unlink()


def _break_container(container: str) -> None:
    inspect = ["docker", "inspect", "-f", "{{.State.Pid}}", container]
    pid = subprocess.run(inspect, capture_output=True, text=True, check=False).stdout.strip()
    if pid and pid != "0":
        ports = f"( dport = :{MQTT_PORT} or dport = :{TLS_PORT} )"
        command = ["nsenter", "-t", pid, "-n", "ss", "-K", ports]
        subprocess.run(command, capture_output=True, check=False)


def _judged(
    run: Finished,
    live: _Live,
    finished: Counter[tuple[str, int]],
    wrong: list[str],
    calm_from: float,
    clients: Set[str],
) -> Outcome:
    """`clients`: those that have to go on."""
    if not live.complete:
        wrong.append("it is not complete")
    late = {update.client for update in run.updates if update.applied >= calm_from}
    acted = [record for record in run.records if isinstance(record, events.Acted)]
    shut_out = {record.device for record in acted if record.source == AGGREGATOR}
    wrong += [f"{client} was shut out" for client in shut_out & clients]
    wrong += [f"{client} did not go on" for client in sorted(clients - late)]
    applied = Counter((update.client, update.dispatch) for update in run.updates)
    twice = [f"update {number} of {client}" for (client, number), times in applied.items() if times > 1]
    lost = [f"update {number} of {client}" for client, number in unaccounted(finished, run.records)]
    energies = [one for one in run.records if isinstance(one, RoundEnergy)]
    # A round that was lost with its client may be sent later, from the client's disk.
    rounds = Counter((one.client, one.dispatch, one.outcome) for one in energies)
    again = [one for one, times in rounds.items() if times > 1]
    wrong += [f"energy of round {number} of {client} was counted twice" for client, number, _ in again]
    unknown = len(applied.keys() - finished.keys())
    wrong += [f"{one} was applied twice" for one in twice] + [f"{one} was lost" for one in lost]
    wrong += [f"{unknown} updates were applied that nobody has finished"] if unknown else []
    return Outcome(
        run,
        live.output,
        wrong,
        finished=len(finished),
        applied=len(applied),
        reported=len(finished.keys() - applied.keys()) - len(lost),
        lost=lost,
        twice=twice,
        resumed=live.resumed,
        reasons=run.manifest.get("validity", {}).get("reasons", []),
    )


def unaccounted(
    finished: Mapping[tuple[str, int], int], records: Sequence[events.Record]
) -> list[tuple[str, int]]:
    """Which of the `finished` updates (client, dispatch) the records do not tell of: neither applied nor
    rejected, and an update of a later dispatch was applied before a record `unfinished` included it, or
    there is no such record."""
    told = set()
    closed: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
    for record in records:
        match record:
            case events.UpdateApplied(client=client, dispatch=number):
                told.add((client, number))
                closed[client].append((number, False))
            case events.UpdateRejected(client=client, dispatch=number):
                told.add((client, number))
            case events.RoundUnfinished(client=client, dispatch=number):
                closed[client].append((number, True))
    return [
        (client, number)
        for client, number in sorted(finished.keys() - told)
        if not next((unfinished for n, unfinished in closed[client] if n >= number), False)
    ]


def drawn(
    seed: int,
    runtime: str,
    until: float,
    *,
    disk: bool = False,
    freeze: bool = False,
    features: bool = False,
) -> tuple[list[Fault], list[dict[str, Any]], bool]:
    """Faults from outside, with a full `disk`, processes that `freeze`, and what befalls `features`,
    those that a scenario makes, up to `until` seconds of a run, and whether messages come twice."""
    rng = random.Random(seed)  # noqa: S311
    kinds = [("kill", BROKER), ("kill", AGGREGATOR), ("kill", CONTROLLER), ("break", AGGREGATOR)]
    if disk:
        kinds.append(("fill", "disk"))
    if runtime == "process":
        kinds += [("break", rng.choice(CLIENTS)), ("kill", rng.choice(CLIENTS))]
    chosen = rng.sample(kinds, k=rng.randint(1, 3))
    faults = [Fault(round(rng.uniform(0.5, until), 2), what, part) for what, part in chosen]
    scenario = []
    for client in rng.sample(CLIENTS, k=rng.randint(0, 2)):
        step = {"at": f"{rng.uniform(0.5, until):.2f}s"}
        match rng.randint(0, 2):
            case 0:
                step |= {"crash": client, "restart_after": "1s"}
            case 1:
                step |= {"pause": client, "for": "2s"}
            case _:
                step |= {"disconnect": client, "for": "2s"}
        scenario.append(step)
    twice = runtime == "process" and rng.random() < 0.3
    if rng.random() < 0.4:
        faults.append(Fault(round(rng.uniform(0.5, until), 2), "damage", rng.choice(FILES)))
    if freeze and rng.random() < 0.4:
        part = rng.choice((BROKER, AGGREGATOR, CONTROLLER))
        faults.append(Fault(round(rng.uniform(0.5, until), 2), "freeze", part))
    if features:
        what = rng.choice(("kill", "unplug", "power off"))
        faults.append(Fault(round(rng.uniform(0.5, until), 2), what, rng.choice(REAL_DEVICES)))
        at = (f"{rng.uniform(0.5, until):.2f}s" for _ in range(2))
        scenario.append({"at": next(at), "set": rng.choice("ab"), "battery": "1%"})
        scenario.append({"at": next(at), "disconnect": "cell", "for": "2s"})
    return faults, scenario, twice


@dataclass(frozen=True)
class _Row:
    seed: int
    rule: str
    faults: Sequence[str]
    found: Outcome

    def __str__(self) -> str:
        found = self.found
        return (
            f"{self.seed:>4} {self.rule:14} {found.finished:>8} {found.applied:>7} {found.reported:>8} "
            f"{len(found.lost):>4} {len(found.twice):>5} {found.resumed:>7}  {', '.join(self.faults)}; "
            f"{'; '.join(found.wrong) or 'nothing'}\n"
        )


def _row(
    seed: int, asked: argparse.Namespace, stopped: threading.Event, hosts: SshServers | None
) -> _Row:
    rules = RULES if hosts is None else DRAWING_RULES
    rule = rules[list(rules)[seed % len(rules)]]
    faults, scenario, twice = drawn(
        seed,
        asked.runtime,
        asked.until,
        disk=os.geteuid() == 0,
        freeze=True,
        features=hosts is not None,
    )
    selection = SELECTIONS[seed % len(SELECTIONS)]
    if asked.flood:
        faults.append(Fault(1.0, "flood", CLIENTS[seed % len(CLIENTS)]))
    done = [*map(str, faults), *(" ".join(map(str, step.values())) for step in scenario)]
    done += ["messages twice"] if twice else []
    with tempfile.TemporaryDirectory() as folder:
        found = run(
            Path(folder),
            rule,
            faults,
            scenario=scenario,
            runtime=asked.runtime,
            embedded=asked.embedded,
            twice=twice,
            after=asked.after,
            calm=asked.calm,
            stopped=stopped,
            hosts=hosts,
            selection=selection,
        )
        if found.wrong and asked.keep is not None:
            kept = asked.keep / f"{asked.runtime}-{seed}"
            subprocess.run(["cp", "-a", folder, str(kept)], check=True)
            (kept / "output.txt").write_text(found.output)
    return _Row(seed, rule["name"], done, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--runtime", choices=("process", "docker"), default="process")
    parser.add_argument("--embedded", action="store_true", help="with the embedded broker")
    parser.add_argument("--flood", action="store_true", help="a client of local processes floods, too")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--until", type=float, default=12.0, help="seconds that have faults")
    parser.add_argument("--after", type=float, default=25.0, help="seconds of a run")
    parser.add_argument("--calm", type=float, default=8.0, help="last seconds, in which all must go on")
    parser.add_argument("--keep", type=Path, help="a folder for runs that are not as they should be")
    parser.add_argument(
        "--features",
        action="store_true",
        help="batteries, a segment, compression, selection and two real devices; as root, one at a time",
    )
    asked = parser.parse_args()
    out = sys.stdout
    out.write(
        "seed rule           finished applied reported lost twice resumed  faults; what is wrong\n"
    )
    rows, stopped = [], threading.Event()
    with ExitStack() as stack:
        hosts = None
        if asked.features:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            hosts = stack.enter_context(servers(folder, ("pi1", "pi2")))
            os.environ["TESTBED_SSH"] = hosts.ssh
        pool = stack.enter_context(ThreadPoolExecutor(1 if asked.features else asked.jobs))
        under_way = [pool.submit(_row, asked.seed + n, asked, stopped, hosts) for n in range(asked.runs)]
        try:
            for one in as_completed(under_way):
                rows.append(row := one.result())
                out.write(str(row))
                out.flush()
        except KeyboardInterrupt:
            stopped.set()  # and the runs are taken down
            pool.shutdown(cancel_futures=True)
            raise
    found = [row.found for row in rows]
    out.write(
        f" all {len(rows):>4} runs      {sum(one.finished for one in found):>8} "
        f"{sum(one.applied for one in found):>7} {sum(one.reported for one in found):>8} "
        f"{sum(len(one.lost) for one in found):>4} {sum(len(one.twice) for one in found):>5} "
        f"{sum(one.resumed for one in found):>7}\n"
    )
    sys.exit(any(one.wrong for one in found))


if __name__ == "__main__":
    main()
