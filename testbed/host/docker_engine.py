"""Connection to the Docker engine by the Docker SDK, without the `docker` program."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import docker
import requests
from docker.context import ContextAPI
from docker.context.config import get_current_context_name
from docker.errors import ContainerError, DockerException, ImageNotFound
from docker.types import LogConfig

from testbed.errors import HostError

ERRORS = (DockerException, requests.RequestException)
"""Exceptions of the SDK's calls: errors that the engine returns, and broken connections."""

REQUEST_TIMEOUT_SECONDS = 300
"""On a slow host an engine needs minutes to remove a container."""
_NO_ROOT = {"name=rootless": "rootless", "name=userns": "with userns-remap"}
"""Security options of engines whose containers have no real root, with their names in messages."""
_NEW_CONTEXT = "`docker context ls` lists the existing ones, `docker context use NAME` selects one"
_LOCAL = ("unix", "npipe")
"""Schemes of the addresses of engines on this machine."""
_PRESENCE_TIMEOUT_SECONDS = 30
"""Timeout of the first request. On a busy host an engine needs seconds to answer. If there is no engine,
the connection is refused immediately."""


class NoEngineError(HostError):
    """No engine answers at the configured address."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}. To fix it: {fix}")
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Unfit:
    reason: str
    fix: str
    """Instruction to the user."""


@dataclass(frozen=True, slots=True)
class _Address:
    url: str
    source: str
    """Setting that contains the address, for messages."""
    unset: str
    """Command that removes the setting, so that the local engine is used."""


def connect(timeout: int = REQUEST_TIMEOUT_SECONDS) -> docker.DockerClient:
    """Connect to the engine that DOCKER_HOST names or, if it is not set, to that of the Docker context,
    which by default is the local engine.

    `timeout`: seconds that a request may wait for an answer. Raises NoEngineError with the command that
    fixes the problem.
    """
    address = _address()
    try:
        return docker.from_env(timeout=timeout)  # fails if the engine does not answer with its version
    except ERRORS as error:
        _release_socket(error)
        where = f" at {address.url}, which {address.source} names" if address else ""
        raise NoEngineError(f"No Docker engine answers{where}", _fix(error, address)) from error


def _address() -> _Address | None:
    """Return the address that DOCKER_HOST names or, if it is not set, that of the Docker context. None
    if the local engine is used.

    Raises NoEngineError if the context does not exist, because the SDK would silently use the local
    engine.
    """
    if url := os.environ.get("DOCKER_HOST"):
        return _Address(url, "DOCKER_HOST", "unset DOCKER_HOST")
    variable = os.environ.get("DOCKER_CONTEXT")
    name = variable or get_current_context_name()
    if name == "default":
        return None
    try:
        found = ContextAPI.get_context(name)
    except Exception as error:  # the SDK raises a plain Exception for a damaged file
        reason = f"The Docker context {name} cannot be read ({error})"
        raise NoEngineError(reason, _NEW_CONTEXT) from error
    if found is None or not found.Host:
        raise NoEngineError(f"There is no Docker context {name}", _NEW_CONTEXT)
    unset = "unset DOCKER_CONTEXT" if variable else "docker context use default"
    return _Address(found.Host, f"the Docker context {name}", unset)


def connect_to(url: str, patience: float) -> docker.DockerClient:
    """Retry for `patience` seconds. Raises HostError."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return docker.DockerClient(base_url=url, version="auto", timeout=REQUEST_TIMEOUT_SECONDS)
        except ERRORS as error:
            _release_socket(error)
            if time.monotonic() > deadline:
                raise HostError(f"No Docker engine answers at {url}: {error}") from error
        time.sleep(0.1)


@contextmanager
def connect_if_present() -> Iterator[docker.DockerClient | None]:
    """Yield None if no engine answers."""
    try:
        client = connect(_PRESENCE_TIMEOUT_SECONDS)
    except HostError:
        yield None
        return
    client.api.timeout = REQUEST_TIMEOUT_SECONDS
    with closing(client):
        yield client


@contextmanager
def connect_fit() -> Iterator[docker.DockerClient]:
    """Raises HostError with the fix if no engine answers, or if the engine cannot run devices."""
    with closing(connect(_PRESENCE_TIMEOUT_SECONDS)) as client:
        client.api.timeout = REQUEST_TIMEOUT_SECONDS
        try:
            why = unfit_reason(client.info())
        except ERRORS as error:
            raise HostError(f"the Docker engine could not describe itself: {error}") from error
        if why is not None:
            raise HostError(
                f"{why.reason}. To fix it: {why.fix}; or run the devices as processes: --runtime process"
            )
        yield client


def is_available() -> bool:
    """Whether an engine that can run devices answers."""
    try:
        with connect_fit():
            return True
    except HostError:
        return False


def unfit_reason(info: Mapping[str, Any]) -> Unfit | None:
    """`info`: from `docker info`. None if the engine can run devices."""
    if "BuildahVersion" in info:
        return Unfit(
            "the engine is Podman: isolated devices cannot reach its name server, which is on the host",
            "sudo apt-get install docker.io, and point DOCKER_HOST or the Docker context to its engine",
        )
    options = {option.partition(",")[0] for option in info.get("SecurityOptions") or ()}
    if (kind := next((kind for name, kind in _NO_ROOT.items() if name in options), None)) is not None:
        return Unfit(
            f"the Docker engine runs {kind}, but only an engine that runs as root can isolate devices",
            "run the engine as root, without userns-remap in /etc/docker/daemon.json",
        )
    if (where := _engine_place(info)) is not None:
        return Unfit(
            f"the Docker engine runs {where}, but testbed needs its clock, files and control groups",
            "run testbed there, or in a container there with the engine's socket (docs/guide/faq.md)",
        )
    return None


def _engine_place(info: Mapping[str, Any]) -> str | None:
    """None if the engine uses the kernel of this process, and not that of a VM or another machine."""
    kernel, own = info.get("KernelVersion"), platform.release()
    if kernel and _full_release(kernel) != _full_release(own):
        return f"in a VM or on another machine (its kernel is {kernel}, the one here {own})"
    address, name = _address(), info.get("Name")
    if address and address.url.partition(":")[0] not in _LOCAL and name != socket.gethostname():
        return f"on another machine ({name}, at {address.url})"
    return None


def _full_release(release: str) -> str:
    """Docker may report `6.8-rc1`; the result is `6.8.0-rc1`."""
    return re.sub(r"^(\d+\.\d+)(?![.\d])", r"\1.0", release)


def shares_files(info: Mapping[str, Any]) -> bool:
    """Whether this process sees the engine's files. Otherwise this process or the engine runs in a
    container."""
    try:
        os.stat(info.get("DockerRootDir", "/"))  # noqa: PTH116
    except FileNotFoundError:
        return False
    except OSError:  # not permitted to look: it may exist
        return True
    return True


def registry_has(image: str, timeout: int = 5) -> bool:
    """False if no registry answers within `timeout` seconds."""
    with closing(connect(timeout)) as client:
        try:
            client.images.get_registry_data(image)
        except ERRORS:
            return False
    return True


def run_output(
    engine: docker.DockerClient,
    image: str,
    command: Sequence[str],
    labels: Mapping[str, str],
    **rights: Any,
) -> bytes:
    """Return the standard output. Works with any log driver of the engine.

    The container has no rights except `rights` (options of the SDK). The container is always removed,
    also after Ctrl-C. Raises ContainerError if the command fails, and another exception of ERRORS if the
    engine fails.
    """
    options: dict[str, Any] = {
        "command": list(command[1:]),
        "entrypoint": command[0],
        "labels": dict(labels),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "log_config": LogConfig(type="json-file"),
        "use_config_proxy": False,
        **rights,
    }
    try:
        container = engine.containers.create(image, **options)
    except ImageNotFound:
        engine.images.pull(image)
        container = engine.containers.create(image, **options)
    try:
        container.start()
        if (code := container.wait()["StatusCode"]) != 0:
            told = container.logs(stdout=False, stderr=True)
            raise ContainerError(container, code, list(command), image, told.decode("utf-8", "replace"))
        return bytes(container.logs(stdout=True, stderr=False))
    finally:
        container.remove(v=True, force=True)


def _fix(error: BaseException, address: _Address | None) -> str:
    """`error`: exception of the SDK."""
    if _caused_by(error, PermissionError):
        return "sudo usermod -aG docker $USER && newgrp docker"
    if address is not None:
        return f"start that engine, or `{address.unset}` to use the local one"
    if _caused_by(error, requests.Timeout):
        return "wait until this host is less busy, or sudo systemctl restart docker"
    if shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None:
        return "sudo apt-get install docker.io"
    return "sudo systemctl start docker"


def _release_socket(error: BaseException) -> None:
    """The SDK leaves the socket open after a failed connection."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for link in _chain(error):
            traceback.clear_frames(link.__traceback__)


def _caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    """Look at the chain of causes: the SDK's libraries urllib3 and requests wrap the socket's error."""
    return any(isinstance(part, kind) for link in _chain(error) for part in (link, *link.args))


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
