"""Machines with an SSH server, for tests of real devices: each has its own network, processes and home.
As root. The interpreter and the checkout are at the same paths as here."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import unavailable
from tests.running import UNHURRIED, write_topology
from tests.waiting import eventually

_PROGRAMS = ("sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "ip")
_SSHD = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
ListenAddress {address}
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
SetEnv HOME={home}{environment}
KexAlgorithms curve25519-sha256
{chroot}
"""
"""Settings of a server. The usual key exchange takes twice the CPU time with each connection."""


@dataclass(slots=True)
class SshServer:
    """A machine that can be switched off and on, and whose cable can be pulled."""

    name: str
    address: str
    folder: Path
    """Folder with the keys."""
    bridge: str
    interface: str
    """Name of the interface on this side of the cable."""
    environment: str = ""
    """Further environment of all programs there, such as ` LD_PRELOAD=/clock.so`."""
    outside: tuple[str, ...] = ()
    """Prefix of commands in the network on this side of the cable."""
    root: Path | None = None
    """Folder with a file system of its own, such as that of another processor's programs."""
    _holder: subprocess.Popen[str] | None = field(default=None)

    @property
    def home(self) -> Path:
        return self.folder / self.name if self.root is None else self.root / "root"

    def power_on(self) -> None:
        """Start the machine and its SSH server."""
        command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(
            [*command, "sh", "-c", "echo ready; exec cat"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            unavailable("ssh", f"no namespaces: {self._holder.stderr.read().strip()}")
        with suppress(subprocess.CalledProcessError):  # the kernel removes the old one some time later
            self._run_outside(f"ip link delete {self.interface}")
        peer = f"eth0 netns {self._init.pid}"
        self._run_outside(f"ip link add {self.interface} type veth peer name {peer}")
        self._run_outside(f"ip link set {self.interface} master {self.bridge} up")
        _run("ip link set lo up", self._inside)
        mac = ":".join(f"{int(part):02x}" for part in ("2", "0", *self.address.split(".")))
        _run(f"ip link set eth0 address {mac}", self._inside)  # the same after each start
        _run(f"ip address add {self.address}/24 dev eth0", self._inside)
        _run("ip link set eth0 up", self._inside)
        if self.root is not None:
            _run(f"mount -t proc proc {self.root}/proc", self._inside)
            for folder in ("dev", "sys"):
                _run(f"mount --rbind /{folder} {self.root}/{folder}", self._inside)
        conf = self.folder / f"{self.name}.conf"
        conf.write_text(
            _SSHD.format(
                folder=self.folder,
                address=self.address,
                home=self.home if self.root is None else "/root",
                environment=self.environment,
                chroot="" if self.root is None else f"ChrootDirectory {self.root}",
            )
        )
        _run(f"{_program('sshd')} -f {conf}", self._inside)
        eventually(self._answers, 30)

    def _answers(self) -> bool:
        connect = f"import socket; socket.create_connection(('{self.address}', 22), 1)"
        done = subprocess.run([*self.outside, sys.executable, "-S", "-c", connect], capture_output=True)
        return done.returncode == 0

    def _run_outside(self, command: str) -> None:
        _run(command, list(self.outside))

    @property
    def _init(self) -> psutil.Process:
        assert self._holder is not None
        (child,) = psutil.Process(self._holder.pid).children()
        return child

    @property
    def _inside(self) -> list[str]:
        return ["nsenter", f"--target={self._init.pid}", "--net", "--pid", "--mount"]

    @property
    def is_on(self) -> bool:
        return self._holder is not None

    def power_off(self) -> None:
        """Cut the power: all processes are killed at once."""
        if self._holder is not None:
            with suppress(ValueError, psutil.NoSuchProcess):
                self._init.kill()
            self._holder.communicate()
            self._holder = None

    def unplug(self) -> None:
        """Pull the cable."""
        self._run_outside(f"ip link set {self.interface} down")

    def plug(self) -> None:
        """Plug the cable in again."""
        self._run_outside(f"ip link set {self.interface} up")

    def processes(self, pattern: str = "agents") -> list[psutil.Process]:
        """Processes in the machine's network whose command contains `pattern`. A search of the tree of
        processes would miss those whose parent ends meanwhile."""
        network = _network(self._init.pid) if self.is_on else None
        found = []
        for process in psutil.process_iter() if network is not None else ():
            with suppress(psutil.NoSuchProcess, OSError):
                if _network(process.pid) == network and pattern in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def limits(self) -> list[str]:
        """What limits the machine's network: qdiscs other than the kernel's, and IFB devices."""
        qdiscs = json.loads(self.output("tc -j qdisc show"))
        found = [f"{one['dev']} {one['kind']}" for one in qdiscs if one["handle"] != "0:"]
        ifbs = json.loads(self.output("ip -j link show type ifb"))
        return found + [one["ifname"] for one in ifbs if one]

    def output(self, command: str) -> str:
        """Output of a command on the machine."""
        return subprocess.check_output([*self._inside, *command.split()], text=True)

    def files(self) -> list[str]:
        """Paths of all files in the machine's home, relative to it."""
        return sorted(
            str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.is_file()
        )


@dataclass(frozen=True, slots=True)
class SshServers:
    """Several machines on one network with this one."""

    address: str
    """Address of this machine on the network."""
    machines: tuple[SshServer, ...]
    ssh: str
    """Value of TESTBED_SSH with which these machines are reached."""

    def left(self) -> list[object]:
        """Processes, files and limits of the testbed on the machines."""
        return [
            one
            for machine in self.machines
            for one in (*machine.processes(), *machine.files(), *machine.limits())
        ]

    def repair(self) -> None:
        """Plug in all cables and switch on all machines, which a failed test may have left otherwise."""
        for machine in self.machines:
            if machine.is_on:
                machine.plug()
            else:
                machine.power_on()


def write_with_real_devices(
    folder: Path, hosts: SshServers, port: int, real: dict[str, Any], **changes: Any
) -> Path:
    """A topology of a local process and the group `real`, to which the broker listens at `port`."""
    rest = {
        "devices": [{"name": "near", "cpu": 0.3}, real],
        "server": {"address": hosts.address, "port": port},
        "task": {"name": "digits-logreg", "local": {"steps": 20, "lr": 0.1}},
        "rule": UNHURRIED,
        "dilation": 1,
        "runtime": {"name": "process"},
    }
    return write_topology(folder, **{**rest, **changes})


@contextmanager
def servers(
    folder: Path,
    names: tuple[str, ...],
    environment: str = "",
    beside: int | None = None,
    roots: Mapping[str, Path] | None = None,
) -> Iterator[SshServers]:
    """Machines called `names`, in a context that switches them off. `environment`: as in SshServer.
    `beside`: id of a process in the network that the machines are on; None for this process. `roots`:
    `root` of some machines, by name. Skips the test where they cannot be had."""
    lacking = [name for name in _PROGRAMS if _program(name) is None]
    if os.geteuid() != 0 or lacking:
        unavailable("ssh", f"this takes root, and {', '.join(lacking or _PROGRAMS)}")
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "user"):
        _run(f"ssh-keygen -q -t ed25519 -f {folder / key}", ["env"], input_="\n\n")
    mark, network = secrets.token_hex(3), f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
    bridge, outside = f"tb{mark}", in_network_of(beside)
    with ExitStack() as stack:
        _run(f"ip link add {bridge} type bridge", list(outside))
        stack.callback(_run, f"ip link delete {bridge}", list(outside))
        _run(f"ip address add {network}.1/24 dev {bridge}", list(outside))
        _run(f"ip link set {bridge} up", list(outside))
        machines, known, config = [], [], []
        public = " ".join((folder / "host.pub").read_text().split()[:2])
        for number, name in enumerate(names, 2):
            interface, address = f"tb{mark}{number}", f"{network}.{number}"
            root = (roots or {}).get(name)
            machine = SshServer(name, address, folder, bridge, interface, environment, outside, root)
            machine.home.mkdir(exist_ok=root is not None)
            stack.callback(machine.power_off)
            machine.power_on()
            machines.append(machine)
            known.append(f"{machine.address} {public}")
            config.append(f"Host {name}\n HostName {machine.address}")
        config.append(
            f"Host *\n User root\n IdentityFile {folder}/user\n IdentitiesOnly yes\n"
            f" UserKnownHostsFile {folder}/known"
        )
        (folder / "known").write_text("\n".join(known) + "\n")
        (folder / "config").write_text("\n".join(config) + "\n")
        yield SshServers(f"{network}.1", tuple(machines), f"ssh -F {folder}/config")


def in_network_of(process: int | None) -> tuple[str, ...]:
    """Prefix of commands in the network of the process with this id; empty for None."""
    return () if process is None else ("nsenter", f"--target={process}", "--net")


def _network(process: int) -> int:
    """Number of the network namespace of a process."""
    return Path(f"/proc/{process}/ns/net").stat().st_ino


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _run(command: str, prefix: list[str] | None = None, input_: str | None = None) -> None:
    done = subprocess.run(
        [*(prefix or []), *command.split()], capture_output=True, text=True, check=False, input=input_
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
