"""Docker engines of other Debian releases, beside this host's engine.

An engine has data, sockets, network and mounts of its own, and leaves nothing. It uses the control
groups and the kernel of this host. The network has no way out, so images are built from outside of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from testbed import images
from testbed.errors import HostError
from testbed.host import cache, docker_engine
from testbed.host.processes import run
from testbed.images import building
from tests import two_engines
from tests.platforms import facts, pythons
from tests.platforms.local import ENVIRONMENT, LocalMachine
from tests.platforms.machine import Machine

_PACKAGES = ("docker.io", "iptables", "iproute2", "kmod", "procps", "ca-certificates")
"""`docker top` of the engine takes procps."""
_OF_A_USER = ("apt", "python3", "python3-venv", "make", "git")
"""Packages that the README assumes. Every Debian has apt, and so libstdc++, which torch needs."""
_SETTINGS = ("resolv.conf", "hosts", "pip.conf", "xdg/pip", "ssl/certs/ca-certificates.crt")
"""Files of this host in /etc that say how to reach the Python Package Index."""
_PATIENCE_SECONDS = 60.0
_CONTAINERD_STORE = {"features": {"containerd-snapshotter": True}}
"""Configuration with which containerd keeps the images, the default from Docker 29 on."""
_ENTER = """
mkdir -p "$1/cgroup"
mount --rbind /sys/fs/cgroup "$1/cgroup"
mount -t sysfs sysfs /sys
mount --rbind "$1/cgroup" /sys/fs/cgroup
umount --recursive --lazy "$1/cgroup"
shift
exec "$@"
"""
"""Shows the interfaces of the present network namespace in /sys, with the control groups of before."""
_WITH_FILES_OF = """
mount --bind "$1/etc" /etc
mount --bind "$1/usr" /usr
shift
exec "$@"
"""
"""Shows the programs and settings of another root file system in place of this host's."""


def lacking() -> str | None:
    """Return what this host lacks to run such engines; None if nothing."""
    if (why := two_engines.lacking()) is not None:
        return why
    return None if shutil.which("mmdebstrap") else "there is no mmdebstrap"


@contextmanager
def engine(
    release: str, *, containerd_store: bool = False, binaries: Path | None = None
) -> Iterator[LocalMachine]:
    """The engine of the Debian `release` (such as `trixie`), with this checkout's images.

    Programs in the folder `binaries`, such as a `dockerd` of another version, come before the release's.
    Ends the engine and all that runs in its network. Raises HostError or RuntimeError if it
    cannot be started.
    """
    root = chroot(release)
    with tempfile.TemporaryDirectory(prefix="testbed-") as temporary:  # short: of Unix sockets
        folder = Path(temporary) / "engine"
        configuration = Path(temporary) / "daemon.json"
        configuration.write_text(json.dumps(_CONTAINERD_STORE if containerd_store else {}))
        options = ("--config-file", str(configuration))
        with two_engines.engine_process(
            folder, root=root, binaries=binaries, options=options
        ) as process:
            url = f"unix://{folder}/docker.sock"
            _wait(url, folder / "log")
            _load_images(url)
            enter = ("nsenter", "--target", str(process.pid), "--net", "unshare", "--mount")
            machine = LocalMachine(
                prefix=(*enter, "sh", "-e", "-c", _ENTER, "sh", str(folder)),
                environment={"DOCKER_HOST": url},
            )
            machine.facts = facts.of(machine)
            yield machine


@contextmanager
def with_python(release: str) -> Iterator[LocalMachine]:
    """The engine of the Debian `release` and its Python: this host's kernel with programs of the release
    alone, and a clone of the project that `make` has set up there.

    Raises HostError or RuntimeError if that fails.
    """
    root = chroot(release, _OF_A_USER)
    for name in _SETTINGS:
        if Path("/etc", name).exists():
            subprocess.run(["cp", "-aL", "--parents", name, root / "etc"], cwd="/etc", check=True)
    inside = ("unshare", "--mount", "sh", "-e", "-c", _WITH_FILES_OF, "sh", str(root))
    with pythons.clone("/usr/bin/python3", inside) as clone, engine(release) as machine:
        machine.prefix = (*machine.prefix, *inside)
        machine.python = clone / ENVIRONMENT / "bin" / "python"
        machine.clone = clone
        machine.facts = facts.of(machine)
        yield machine


@contextmanager
def host() -> Iterator[Machine]:
    """This host with the engine that runs on it, or without one."""
    machine = LocalMachine()
    machine.facts = facts.of(machine)
    yield machine


def chroot(release: str, more: Sequence[str] = ()) -> Path:
    """The folder with an unpacked Debian `release` that has a Docker engine and the packages `more`.

    It is made once, then cached. Its name says what it was made of. To get newer packages, remove it.
    Raises HostError.
    """
    command = [
        "mmdebstrap",
        "--mode=root",
        *images.DEBIAN_OPTIONS,
        # A mirror that is not updated any more still has what we need.
        '--aptopt=Acquire::Check-Valid-Until "false"',
        f"--include={','.join((*_PACKAGES, *more))}",
        release,
    ]
    digest = hashlib.sha256("\n".join(command).encode()).hexdigest()[:12]
    folder = cache.folder() / "platforms"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{release}-{digest}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _unpack(command, made)
    return made


def _unpack(command: Sequence[str], to: Path) -> None:
    """Run mmdebstrap, with mounts of its own: none is left even if it is killed."""
    with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
        partial = Path(temporary) / "root"
        run(["unshare", "--mount", *command, str(partial)], stop=threading.Event())
        partial.rename(to)


def _wait(url: str, log: Path) -> None:
    """Wait until the engine at `url` answers. Raises RuntimeError with the end of its log."""
    try:
        docker_engine.connect_to(url, _PATIENCE_SECONDS).close()
    except HostError as error:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else ""
        raise RuntimeError(f"{error}\n{last}") from error


def _load_images(url: str) -> None:
    """Give the engine at `url` the images of this checkout: those of this host's engine, or new ones."""
    every = images.current_tags(images.FOLDER, images.AGENTS)
    tags = [tag for kind, tag in every.items() if not kind.endswith("-cuda")]
    with docker_engine.connect_if_present() as client:
        built = [tag for tag in tags if client is not None and building.image_exists(client, tag)]
    if built:
        two_engines.carry(built, [url])
    with closing(docker_engine.connect_to(url, _PATIENCE_SECONDS)) as client:
        building.ensure(client, lambda line: print(line, flush=True))
