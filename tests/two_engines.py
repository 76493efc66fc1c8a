"""Two Docker engines of this machine, each in a network namespace of its own, made into a Swarm.

Each has a private mount namespace, with /run of its own, and its own data and exec roots, so that the
machine's engine is not touched, and nothing is left of them: neither process, mount, nor file.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil

from testbed.host import docker_engine

_TIMEOUT_SECONDS = 30.0
_ENOUGH_MEMORY = 10 * 2**30
"""For the images of both engines, which are otherwise on the disk: it takes much longer to write and to
remove them there."""
_CHUNK = 2**20
"""Bytes of images, handed on at once."""
_START = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/lock "$1/data"
[ -z "$2" ] || mount -t tmpfs tmpfs "$1/data"
ip link set lo up
exec dockerd --data-root "$1/data" --exec-root /run/docker --pidfile "$1/pid" --bridge none \
    -H "unix://$1/docker.sock" -H unix:///run/docker.sock > "$1/log" 2>&1
"""


def lacking() -> str | None:
    """What this machine lacks for it; None: nothing."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [
        name for name in ("dockerd", "setpriv", "unshare", "nsenter", "ip") if shutil.which(name) is None
    ]
    return f"there is no {missing[0]}" if missing else None


@dataclass(frozen=True, slots=True)
class Engine:
    folder: Path
    client: docker.DockerClient
    address: str

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/docker.sock"


@contextmanager
def swarm(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    """The manager and a worker; their files are in `folder`, a short path, which is theirs."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_engine(folder / name)) for name in ("1", "2")]
        engines = []
        for number in (1, 2):  # before one answers, it may not be in its namespaces yet
            url = f"unix://{folder}/{number}/docker.sock"
            client = docker_engine.at(url, _TIMEOUT_SECONDS)
            stack.callback(client.close)
            engines.append(Engine(folder / f"{number}", client, f"10.77.0.{number}"))
        pids = [str(process.pid) for process in processes]
        _run("ip", "link", "add", "swarm0", "netns", pids[0], "type", "veth", "peer", "name", "swarm0",
             "netns", pids[1])  # fmt: skip
        for pid, engine in zip(pids, engines, strict=True):
            inside = ("nsenter", "-t", pid, "-n", "ip")
            _run(*inside, "addr", "add", f"{engine.address}/24", "dev", "swarm0")
            _run(*inside, "link", "set", "swarm0", "up")
        first, second = engines
        first.client.swarm.init(advertise_addr=first.address, listen_addr=f"{first.address}:2377")
        token = first.client.swarm.attrs["JoinTokens"]["Worker"]
        second.client.swarm.join(
            [f"{first.address}:2377"],
            token,
            advertise_addr=second.address,
            listen_addr=f"{second.address}:2377",
        )
        yield first, second


def carry(images: Sequence[str], engines: Sequence[Engine]) -> None:
    """Give `images` of this machine's engine to all `engines`, as `docker save` and `docker load` do."""
    with ExitStack() as stack:
        saving = stack.enter_context(
            subprocess.Popen(["docker", "save", *images], stdout=subprocess.PIPE)
        )
        loading = [
            stack.enter_context(
                subprocess.Popen(
                    ["docker", "-H", engine.url, "load", "--quiet"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                )
            )
            for engine in engines
        ]
        assert saving.stdout is not None
        while chunk := saving.stdout.read(_CHUNK):
            for each in loading:
                assert each.stdin is not None
                each.stdin.write(chunk)
    assert [each.returncode for each in (saving, *loading)] == [0] * (1 + len(loading))


@contextmanager
def _engine(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A `dockerd` in namespaces of its own; `setpriv` becomes it, so that it has its process id. It
    ends in order, its containers first, also where this process is killed."""
    folder.mkdir(parents=True)
    in_memory = "yes" if psutil.virtual_memory().available > _ENOUGH_MEMORY else ""
    process = subprocess.Popen(
        [
            "setpriv",
            "--pdeathsig",
            "TERM",
            "unshare",
            "--net",
            "--mount",
            "sh",
            "-c",
            _START,
            "sh",
            str(folder),
            in_memory,
        ],
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != "DOCKER_HOST"},
    )
    try:
        yield process
    finally:
        # What it has mounted and the interfaces it has made go with the namespaces.
        process.terminate()
        try:
            process.wait(_TIMEOUT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
