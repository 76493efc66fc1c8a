"""Connection to the Docker engine, by the Docker SDK alone (no `docker` program is needed)."""

from __future__ import annotations

import os
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import docker
import requests
from docker.errors import ContainerError, DockerException, ImageNotFound
from docker.types import LogConfig

from testbed.errors import HostError

ERRORS = (DockerException, requests.RequestException)
"""All that a call of the SDK raises: the engine's answers, and the connection that broke."""

REQUEST_TIMEOUT_SECONDS = 300
"""What one request may take: on a slow host an engine needs minutes to remove a container."""
_UNFIT = {"name=rootless": "rootless", "name=userns": "with userns-remap"}
"""Security options of an engine in whose containers nobody is root of the host."""
_PRESENCE_TIMEOUT_SECONDS = 30
"""An engine that is there answers within this time, on a busy host too. Without one there is no wait, as
nothing listens."""


def connect(timeout: int = REQUEST_TIMEOUT_SECONDS) -> docker.DockerClient:
    """A client of the engine that DOCKER_HOST or the Docker context names, else the local one.

    `timeout` is what one request without an answer may take, in seconds. Raises HostError, with the
    command that fixes it, where no engine answers.
    """
    try:
        return docker.from_env(timeout=timeout)  # asks the engine for its version: it must answer
    except ERRORS as error:
        _release_socket(error)
        where = f" at {host}" if (host := os.environ.get("DOCKER_HOST")) else ""
        raise HostError(f"No Docker engine answers{where}. To fix it: {fix(error)}") from error


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


def available() -> bool:
    """Whether there is an engine that can run devices."""
    with if_present() as client:
        try:
            return client is not None and unfit(client.info()) is None
        except ERRORS:
            return False


def unfit(info: Mapping[str, Any]) -> str | None:
    """Why the engine of which `info` tells cannot run devices; None where it can."""
    options = {option.partition(",")[0] for option in info.get("SecurityOptions") or ()}
    found = next((kind for name, kind in _UNFIT.items() if name in options), None)
    if found is None:
        return None
    return f"the Docker engine runs {found}, and only one that runs as root can isolate devices"


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


def fix(error: BaseException) -> str:
    """The command that fixes an engine that does not answer, from what `connect` met."""
    if _caused_by(error, requests.Timeout):
        return "wait until this host is less busy, or sudo systemctl restart docker"
    if _caused_by(error, PermissionError):
        return "sudo usermod -aG docker $USER && newgrp docker"
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
