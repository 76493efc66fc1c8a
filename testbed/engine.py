"""The way to the Docker engine, through the Docker SDK alone (no `docker` program is needed)."""

from __future__ import annotations

import os
import shutil

import docker
import requests
from docker.errors import DockerException

from testbed.errors import HostError

ERRORS = (DockerException, requests.RequestException)
"""All that a call of the SDK raises: the engine's answers, and the connection that broke."""


def connect(timeout: int = 120) -> docker.DockerClient:
    """A client of the engine that DOCKER_HOST or the Docker context names, else the local one.

    `timeout` is what one silent request may take, in seconds. Raises HostError, with the command that
    mends it, where no engine answers.
    """
    try:
        return docker.from_env(timeout=timeout)  # asks the engine for its version: it must answer
    except ERRORS as error:
        where = f" at {host}" if (host := os.environ.get("DOCKER_HOST")) else ""
        raise HostError(f"No Docker engine answers{where}. To mend it: {mend(error)}") from error


def available() -> bool:
    """Whether an engine answers within 2 s."""
    try:
        connect(timeout=2).close()
    except HostError:
        return False
    return True


def registry_has(image: str, timeout: int = 5) -> bool:
    """Whether the engine reaches a registry that has `image`; False where none answers in time."""
    client = connect(timeout)
    try:
        client.images.get_registry_data(image)
    except ERRORS:
        return False
    finally:
        client.close()
    return True


def mend(error: BaseException) -> str:
    """The command that mends an engine that does not answer, from what `connect` met."""
    if _caused_by(error, PermissionError):
        return "sudo usermod -aG docker $USER && newgrp docker"
    if shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None:
        return "sudo apt-get install docker.io"
    return "sudo systemctl start docker"


def _caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether `kind` is in the chain: urllib3 and requests wrap the error of the socket."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, kind) or any(isinstance(part, kind) for part in chain.args):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
