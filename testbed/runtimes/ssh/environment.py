"""Requirements of the agents on a real device: the archive of their code, and a Python environment or an
image."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed import bundle, installing
from testbed.errors import HostError
from testbed.host import cache, docker_engine
from testbed.images.wheels import significant_lines
from testbed.runtimes.ssh.connection import Connections, SshTarget, shown

if TYPE_CHECKING:
    from testbed.topology import Topology


def image_tag(topology: Topology) -> str:
    """Return the tag of the image, without asking an engine."""
    from testbed import images
    from testbed.images.device_images import additions

    agent, own = images.current_tags(images.FOLDER, images.AGENTS)["agent"], additions(topology)
    if own is None or not own.requirements:
        return agent
    return images.added_tags(own, agent)["requirements"]


def image_problem(image: str, engine: str, machine: str) -> str | None:
    """Why this host cannot send `image` to a device whose `engine` lacks it; None if it can. `machine`:
    of the device, as `uname -m` prints it."""
    mend = (
        "run `testbed images build` of this version of the testbed there, or remove container from the "
        "topology, so that a virtual environment is made"
    )
    if machine != os.uname().machine:
        return (
            f"its {engine} lacks {image}, which this host can only build for {os.uname().machine}, not "
            f"for {machine}: {mend}"
        )
    with docker_engine.connect_if_present() as here:
        if here is not None:
            return None
    return (
        f"its {engine} lacks {image}, and no Docker engine answers on this host to build it: start one, "
        f"or {mend}"
    )


@contextmanager
def image_archive(topology: Topology, progress: Callable[[str], None]) -> Iterator[Path]:
    """Compressed archive of the image, built if missing, in a context that removes the file. Raises
    HostError."""
    from testbed.images import building
    from testbed.images.device_images import additions

    image = image_tag(topology)
    with (
        closing(docker_engine.connect()) as engine,
        tempfile.NamedTemporaryFile(dir=cache.folder()) as file,
    ):
        building.ensure(engine, progress, additions(topology))
        progress(f"Packing {image} for real devices")
        try:
            with gzip.open(file, "wb", compresslevel=1) as packed:
                for chunk in engine.images.get(image).save(named=True):
                    packed.write(chunk)
        except docker_engine.ERRORS as error:
            raise HostError(f"The Docker engine cannot save {image}: {error}") from error
        file.flush()
        yield Path(file.name)


MODULES = ("cryptography", "msgspec", "numpy", "paho", "safetensors", "torch", "xxhash")
AGENTS_PYTHON = (3, 10)
"""Oldest version that can run the agents: PyTorch has no wheels for older ones."""
_PYTHON = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}[0-9A-Za-z.+]{0,20}")
_LARGEST_DISK = 2**63
_ENVIRONMENT_BYTES, _RUN_BYTES = 3 * 2**30, 200 * 2**20
"""Free space that a new environment and the files of a run need."""
INSTALL_TIMEOUT_SECONDS = 3600.0
"""Maximum seconds to make an environment: a slow device unpacks PyTorch for many minutes."""


def requirement_lines(own: Sequence[str]) -> list[str]:
    """Requirements of the agents, and `own`, of the user's own code."""
    file = bundle.IMAGES / "libraries" / "requirements.txt"
    return [*significant_lines(file.read_text(encoding="utf-8")), *own]


def environment_name(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def attempts(lines: Sequence[str]) -> list[list[str]]:
    """Arguments of `pip install`, to try one after the other. The first two get PyTorch's CPU build,
    which the device's own index may have; the last takes whatever that index has."""
    cpu = [f"{line}+cpu" if line.startswith("torch==") else line for line in lines]
    return [cpu, ["--extra-index-url", installing.CPU_INDEX, *cpu], list(lines)]


def archive(code: Path | None) -> bytes:
    """Agents as a compressed tar file, with the user's own code in the folder `code`."""
    made = io.BytesIO()
    folders = [("agents", bundle.AGENTS), *([("code", code)] if code is not None else [])]
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=6) as tar:
        for name, folder in folders:
            for path in sorted(folder.rglob("*")):
                inside = path.relative_to(folder)
                if path.is_file() and "__pycache__" not in inside.parts:
                    tar.add(path, f"{name}/{inside.as_posix()}")
    return made.getvalue()


@dataclass(frozen=True, slots=True)
class ClientContainer:
    engine: str
    """`docker` or `podman`."""
    image: str

    def as_dict(self) -> dict[str, str]:
        return {"engine": self.engine, "image": self.image}


def check(
    connections: Connections,
    target: SshTarget,
    lines: Sequence[str],
    *,
    own_python: bool,
    container: ClientContainer | None = None,
    server: tuple[str, int] | None = None,
    shape: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a device reports of itself. Raises HostError with cause and mend if it cannot run the
    agents, or cannot reach `server`.

    `own_python`: whether the topology names the interpreter. `server`: address and port of this host at
    which something listens; None if that is not checked. `shape`: limits that are to be set there.
    """
    servers = [] if server is None else [server]
    request = {
        "modules": MODULES,
        "environment": environment_name(lines),
        "servers": servers,
        "container": None if container is None else container.as_dict(),
        "shape": shape,
    }
    found = connections.call(target, "check", request, timeout=40.0)
    problem = (
        _problem(found, target, own_python=own_python)
        if container is None
        else _container_problem(found, container)
    )
    if problem is None and server is not None and found.get("reaches") != [True]:
        address, port = server
        problem = (
            f"it cannot connect to {address}, port {port} (server.address, server.port): let it pass a "
            f"firewall of this host, as by sudo ufw allow proto tcp to {address} port {port}, or write "
            "an address of this host on its network"
        )
    if problem is None and (why := found.get("unshapeable")) is not None:
        problem = shown(str(why))
    if problem is not None:
        raise HostError(f"{target.host}: {problem}")
    return found


def _problem(found: Mapping[str, Any], target: SshTarget, *, own_python: bool) -> str | None:
    needs_packages = not own_python and found.get("installed") is not True
    needed = _ENVIRONMENT_BYTES if needs_packages else _RUN_BYTES
    return (
        _machine_problem(found)
        or _python_problem(found, target, own_python=own_python)
        or _disk_problem(found, needed)
    )


def _container_problem(found: Mapping[str, Any], container: ClientContainer) -> str | None:
    problem = _machine_problem(found) or _disk_problem(found, _RUN_BYTES)
    if problem is None and found.get("has_image") is not True:
        machine = shown(str(found.get("machine")))
        return image_problem(container.image, container.engine, machine)
    return problem


def _machine_problem(found: Mapping[str, Any]) -> str | None:
    free, python = found.get("free"), found.get("python")
    is_valid = isinstance(free, int) and 0 <= free <= _LARGEST_DISK
    is_valid &= isinstance(python, str) and _PYTHON.fullmatch(python) is not None
    if not isinstance(found.get("missing"), list) or not is_valid:
        return "its answer is not valid: is another program called in place of Python?"
    if found.get("system") != "Linux":
        return f"it runs {shown(str(found.get('system')))}, expected Linux"
    return None


def _python_problem(found: Mapping[str, Any], target: SshTarget, *, own_python: bool) -> str | None:
    python, missing = shown(str(found.get("python"))), found["missing"]
    version = tuple(map(int, python.split(".")[:2]))
    if version < AGENTS_PYTHON:
        oldest = ".".join(map(str, AGENTS_PYTHON))
        return (
            f"{target.python} is Python {python}, expected at least {oldest}, which PyTorch needs: name "
            "another interpreter with python (such as uv or pyenv install), or write container: docker"
        )
    if own_python and missing:
        names = ", ".join(shown(str(one)) for one in missing)
        return (
            f"{target.python} lacks {names}: install them there, or remove python from the topology, so "
            "that an environment is made"
        )
    if not own_python and found.get("installed") is not True and found.get("venv") is not True:
        return (
            f"{target.python} cannot make virtual environments: run sudo apt-get install python3-venv "
            "there, or name an interpreter that has the packages with python"
        )
    return None


def _disk_problem(found: Mapping[str, Any], needed: int) -> str | None:
    free = found["free"]
    if free < needed:
        return (
            f"its disk has {free / 2**30:.1f} GiB free in ~/.cache, expected {needed / 2**30:.1f}: make "
            "room there"
        )
    return None
