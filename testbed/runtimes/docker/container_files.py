"""What of this host goes into a run's containers: mounted files, with the permissions that these need,
and own code, which is in the image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import docker

from testbed import broker as brokers
from testbed import images
from testbed.broker import BROKER, SOCKET, Listeners
from testbed.errors import HostError
from testbed.images import device_images
from testbed.plan import agent_configs
from testbed.plan.agent_configs import MQTT_PORT, TLS_PORT, RunSpec
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.specifications import BROKER_FILES, BROKER_SOCKET, appended

_OWNER = 10002
"""User and group in place of root."""


def ensure_images(
    engine: docker.DockerClient, spec: RunSpec, progress: Callable[[str], None]
) -> images.Images:
    """Build the images that the run needs and this host lacks, with what its topology adds to them."""
    code = spec.topology.user_code
    added = None
    if code is not None:
        added = images.ImageAdditions(str(code.path), code.digest, code.copy, spec.topology.requirements)
    with_gpus = any(device.gpu is not None for device in spec.plan.devices)
    built = images.ensure(engine, progress, added, cuda=with_gpus)
    labels = executor.helper(spec.directory.run)
    return replace(
        built, groups=device_images.group_images(engine, spec.topology, built, progress, labels)
    )


def owner() -> tuple[int, int]:
    """User and group of the run's files and of the containers that write them: this process's, unless
    that is root. Raises HostError."""
    found = (os.getuid(), os.getgid()) if os.getuid() else (_OWNER, _OWNER)
    if agent_configs.CLIENT_USER in found:
        raise HostError(
            f"testbed runs as user {found[0]} of group {found[1]}, and devices' clients are user and "
            f"group {agent_configs.CLIENT_USER}: run it as another user"
        )
    return found


def give(owner: tuple[int, int], *paths: Path) -> None:
    """Give `paths` to the containers' user and group, and close them to others."""
    for path in paths:
        path.chmod(0o750 if path.is_dir() else 0o640)
        if os.getuid() == 0:  # else they are that user's
            os.chown(path, *owner)


def prepare(
    spec: RunSpec,
    owner: tuple[int, int],
    accounts: Mapping[str, brokers.Account],
    identity: brokers.TlsIdentity | None,
    *,
    mps: bool = False,
) -> None:
    """Make the mounted files, with the permissions that the containers need: clients are others, and
    may read their own configurations and shards alone. On the host `work/` is closed to others."""
    directory, devices = spec.directory, [device.name for device in spec.plan.devices]
    directory.control.mkdir(exist_ok=True)
    (directory.control / agent_configs.ISOLATED).unlink(missing_ok=True)  # of an earlier segment
    give(owner, *directory.work.iterdir())
    for device in devices:
        for path in (directory.config(device), directory.shard(device)):
            path.chmod(0o644)
    if mps:
        shutil.rmtree(directory.mps, ignore_errors=True)  # of an earlier segment
        directory.mps.mkdir()
        directory.mps.chmod(0o777)  # for the clients' user; `work/`, around it, is closed to others
    folder = directory.work / BROKER
    at = Listeners(
        "0.0.0.0",  # noqa: S104  # in its container
        MQTT_PORT,
        tls_port=TLS_PORT if identity else None,
        socket=f"{BROKER_SOCKET}/{SOCKET}",
    )
    limits = agent_configs.broker_limits(spec.topology)
    brokers.write_mosquitto(folder, accounts, at, identity, seen_at=BROKER_FILES, limits=limits)
    written = appended(spec)
    for file in written:
        file.touch()
    disks = [directory.disk(device) for device in devices]
    if os.getuid() == 0:  # else it owns the files already
        state = directory.aggregator_state
        for path in (folder, *folder.iterdir(), *written, directory.models, state, *disks):
            os.chown(path, *owner)
    for path in disks:  # the clients' to write; `state/`, around these, is closed to others
        path.chmod(0o777)
