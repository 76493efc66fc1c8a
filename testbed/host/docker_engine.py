"""Connection to the Docker engine, by the Docker SDK alone (no `docker` program is needed)."""

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
"""All that a call of the SDK raises: the engine's answers, and the connection that broke."""

REQUEST_TIMEOUT_SECONDS = 300
"""Timeout of a request. On a slow host an engine needs minutes to remove a container."""
_NO_ROOT = {"name=rootless": "rootless", "name=userns": "with userns-remap"}
"""Security options of an engine in whose containers nobody is root of the host."""
_NEW_CONTEXT = "`docker context ls` lists those that exist, `docker context use NAME` selects one"
_LOCAL = ("unix", "npipe")
"""Schemes of the addresses of engines on this machine."""
_PRESENCE_TIMEOUT_SECONDS = 30
"""Timeout of the first request. On a busy host an engine needs seconds to answer; if there is none, the
connection is refused at once."""


class NoEngineError(HostError):
    """No engine answers at the address that is configured."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}. To fix it: {fix}")
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why an engine cannot run devices."""

    reason: str
    fix: str


@dataclass(frozen=True, slots=True)
class _Address:
    """Address of an engine that the user has named."""

    url: str
    source: str
    """Setting that names it, for messages."""
    unset: str
    """The command after which the local engine is used instead."""


def connect(timeout: int = REQUEST_TIMEOUT_SECONDS) -> docker.DockerClient:
    """A client of the engine that DOCKER_HOST or the Docker context names, else the local one.

    `timeout` is what one request without an answer may take, in seconds. Raises NoEngineError, with the
    command that fixes it.
    """
    address = _address()
    try:
        return docker.from_env(timeout=timeout)  # asks the engine for its version: it must answer
    except ERRORS as error:
        _release_socket(error)
        where = f" at {address.url}, which {address.source} names" if address else ""
        raise NoEngineError(f"No Docker engine answers{where}", _fix(error, address)) from error


def _address() -> _Address | None:
    """Return the address that DOCKER_HOST or else the Docker context names; None: the local engine's.

    Raises NoEngineError if the context does not exist, as the SDK would use the local engine.
    """
    if url := os.environ.get("DOCKER_HOST"):
        return _Address(url, "DOCKER_HOST", "unset DOCKER_HOST")
    variable = os.environ.get("DOCKER_CONTEXT")
    name = variable or get_current_context_name()
    if name == "default":
        return None
    try:
        found = ContextAPI.get_context(name)
    except Exception as error:  # the SDK's for a damaged file
        reason = f"The Docker context {name} cannot be read ({error})"
        raise NoEngineError(reason, _NEW_CONTEXT) from error
    if found is None or not found.Host:
        raise NoEngineError(f"There is no Docker context {name}", _NEW_CONTEXT)
    unset = "unset DOCKER_CONTEXT" if variable else "docker context use default"
    return _Address(found.Host, f"the Docker context {name}", unset)


def at(url: str, patience: float) -> docker.DockerClient:
    """A client of the engine at `url`, which has `patience` seconds to answer. Raises HostError."""
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
def if_present() -> Iterator[docker.DockerClient | None]:
    """A client of the engine, or None if there is none."""
    try:
        client = connect(_PRESENCE_TIMEOUT_SECONDS)
    except HostError:
        yield None
        return
    client.api.timeout = REQUEST_TIMEOUT_SECONDS
    with closing(client):
        yield client


@contextmanager
def fit() -> Iterator[docker.DockerClient]:
    """A client of the engine. Raises HostError, with what fixes it, if none answers or this one cannot
    run devices."""
    with closing(connect(_PRESENCE_TIMEOUT_SECONDS)) as client:
        client.api.timeout = REQUEST_TIMEOUT_SECONDS
        try:
            why = unfit(client.info())
        except ERRORS as error:
            raise HostError(f"the Docker engine could not tell of itself: {error}") from error
        if why is not None:
            raise HostError(
                f"{why.reason}. To fix it: {why.fix}; or run the devices as processes: --runtime process"
            )
        yield client


def available() -> bool:
    """Whether there is an engine that can run devices."""
    try:
        with fit():
            return True
    except HostError:
        return False


def unfit(info: Mapping[str, Any]) -> Unfit | None:
    """Why the engine that describes itself by `info` (`docker info`) cannot run devices; None if it
    can."""
    if "BuildahVersion" in info:
        return Unfit(
            "the engine is Podman, whose name server is on the host, where isolated devices cannot "
            "reach it",
            "sudo apt-get install docker.io, and point DOCKER_HOST or the Docker context to its engine",
        )
    options = {option.partition(",")[0] for option in info.get("SecurityOptions") or ()}
    if (kind := next((kind for name, kind in _NO_ROOT.items() if name in options), None)) is not None:
        return Unfit(
            f"the Docker engine runs {kind}, and only one that runs as root can isolate devices",
            "have the engine run as root, without userns-remap in /etc/docker/daemon.json",
        )
    if (where := _elsewhere(info)) is not None:
        return Unfit(
            f"the Docker engine runs {where}, and testbed needs its clock, files and control groups",
            "run testbed there, or in a container there with the engine's socket (docs/guide/faq.md)",
        )
    return None


def _elsewhere(info: Mapping[str, Any]) -> str | None:
    """Return where the engine runs, if that is on another kernel than this process; else None."""
    kernel, own = info.get("KernelVersion"), platform.release()
    if kernel and _in_full(kernel) != _in_full(own):
        return f"in a VM or on another machine (its kernel is {kernel}, the one here {own})"
    address, name = _address(), info.get("Name")
    if address and address.url.partition(":")[0] not in _LOCAL and name != socket.gethostname():
        return f"on another machine ({name}, at {address.url})"
    return None


def _in_full(release: str) -> str:
    """A kernel's release with three numbers, as Docker writes `6.8-rc1`: `6.8.0-rc1`."""
    return re.sub(r"^(\d+\.\d+)(?![.\d])", r"\1.0", release)


def shares_files(info: Mapping[str, Any]) -> bool:
    """Return whether this process sees the engine's files. If not, one of both is in a container."""
    try:
        os.stat(info.get("DockerRootDir", "/"))  # noqa: PTH116
    except FileNotFoundError:
        return False
    except OSError:  # it may be there
        return True
    return True


def registry_has(image: str, timeout: int = 5) -> bool:
    """Whether the engine reaches a registry that has `image`; False where none answers in time."""
    with closing(connect(timeout)) as client:
        try:
            client.images.get_registry_data(image)
        except ERRORS:
            return False
    return True


def output(
    engine: docker.DockerClient,
    image: str,
    command: Sequence[str],
    labels: Mapping[str, str],
    **rights: Any,
) -> bytes:
    """What `command` prints in a container of its own, whatever the engine's log driver, with no other
    `rights` than are given. The container is removed, also on Ctrl-C. Raises ERRORS: ContainerError
    where the command fails."""
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
    """Return what to do about an engine that does not answer. `error` is what `connect` got."""
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
    """Close the socket that the SDK leaves open where it cannot connect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for link in _chain(error):
            traceback.clear_frames(link.__traceback__)


def _caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether `kind` is in the chain: urllib3 and requests wrap the error of the socket."""
    return any(isinstance(part, kind) for link in _chain(error) for part in (link, *link.args))


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
