"""Files of this host that a run's containers use: mounted ones with their permissions, and images with
the user's own code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import docker

from agents.device import turns
from testbed import broker as brokers
from testbed import images
from testbed.broker import BROKER, SOCKET, TLS_SOCKET, Listeners
from testbed.errors import HostError
from testbed.images import building, device_images
from testbed.plan import agent_configs
from testbed.plan.agent_configs import MQTT_PORT, TLS_PORT, RunSpec
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.specifications import BROKER_FILES, BROKER_SOCKET, appended_files

_OWNER = 10002
"""User and group of the containers if testbed itself runs as root."""


def ensure_images(
    engine: docker.DockerClient, spec: RunSpec, progress: Callable[[str], None]
) -> images.Images:
    """Build what this host lacks, with the topology's code and packages."""
    added = device_images.additions(spec.topology)
    with_gpus = any(device.gpu is not None for device in spec.plan.devices)
    built = building.ensure(engine, progress, added, cuda=with_gpus)
    labels = executor.helper_labels(spec.directory.run)
    return replace(
        built, groups=device_images.group_images(engine, spec.topology, built, progress, labels)
    )


def owner() -> tuple[int, int]:
    """User and group of the run's files, and of the containers that write them: those of this process,
    or `_OWNER` for root. Raises HostError if they are reserved for the devices' clients."""
    found = (os.getuid(), os.getgid()) if os.getuid() else (_OWNER, _OWNER)
    if agent_configs.CLIENT_USER in found:
        raise HostError(
            f"testbed runs as user {found[0]} and group {found[1]}, but {agent_configs.CLIENT_USER} is "
            "reserved for the devices' clients: run it as another user"
        )
    return found


def give_to_containers(owner: tuple[int, int], *paths: Path) -> None:
    """Only the containers' user and group have access."""
    for path in paths:
        path.chmod(0o750 if path.is_dir() else 0o640)
        if os.getuid() == 0:  # else the user owns them already
            os.chown(path, *owner)


def prepare(
    spec: RunSpec,
    owner: tuple[int, int],
    accounts: Mapping[str, brokers.Account],
    identity: brokers.TlsIdentity | None,
    *,
    mps: bool = False,
    forwarded: bool = False,
) -> None:
    """Write the files to mount, with the permissions that containers need. `mps`: with the folder of
    NVIDIA's MPS. `forwarded`: real devices' connections are forwarded to the broker's Unix socket with
    TLS.

    The clients run as another user, who may read only the clients' own configurations and shards. On the
    host, other users have no access to `work/`.
    """
    directory, devices = spec.directory, [device.name for device in spec.plan.emulated_devices]
    directory.control.mkdir(exist_ok=True)
    (directory.control / agent_configs.ISOLATED).unlink(missing_ok=True)  # from before a resume
    turns.make(directory.control, len(spec.plan.cpus))
    give_to_containers(owner, *directory.work.iterdir())
    for device in devices:
        for path in (directory.config(device), directory.shard(device)):
            path.chmod(0o644)
    if mps:
        shutil.rmtree(directory.mps, ignore_errors=True)  # from before a resume
        directory.mps.mkdir()
        directory.mps.chmod(0o777)  # for the clients' user; its parent `work/` is closed to others
    folder = directory.work / BROKER
    at = Listeners(
        "0.0.0.0",  # noqa: S104  # in its container
        MQTT_PORT,
        tls_port=TLS_PORT if identity else None,
        socket=f"{BROKER_SOCKET}/{SOCKET}",
        remote=(f"{BROKER_SOCKET}/{TLS_SOCKET}", 0) if forwarded else None,
    )
    limits = agent_configs.broker_limits(spec.topology)
    brokers.write_mosquitto(folder, accounts, at, identity, seen_at=BROKER_FILES, limits=limits)
    written = appended_files(spec)
    for file in written:
        file.touch()
    disks = [directory.disk(device) for device in devices]
    if os.getuid() == 0:  # else the user owns the files already
        state = directory.aggregator_state
        for path in (folder, *folder.iterdir(), *written, directory.models, state, *disks):
            os.chown(path, *owner)
    for path in disks:  # writable for the clients; their parent `state/` is closed to others
        path.chmod(0o777)
