"""Specifications of networks and containers, as data; `testbed.runtimes.docker.executor` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RUN_LABEL = "testbed.run"
COMPONENT_LABEL = "testbed.part"
"""(As in 0.2.0, of whose runs `testbed down` may find something.)"""
DIRECTORY_LABEL = "testbed.directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A bridge."""

    name: str
    labels: Mapping[str, str]
    internal: bool = True
    """Whether it has no way out."""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attachment:
    network: str
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mount:
    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimits:
    """CPU limits of a container; None leaves a limit unchanged."""

    quota: int | None = None
    """µs per period; -1: without limit."""
    period: int | None = None
    """µs."""
    weight: int | None = None
    """Against other containers that want a core at once."""
    cpus: str | None = None
    """cpuset, as in `1-3`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container with least privilege: whatever it may do beyond that has a field."""

    component: str
    """Of the run: `broker`, `aggregator`, `router`, `mps` or a device. Its host name."""
    name: str
    image: str
    command: tuple[str, ...] = ()
    """Empty: the image's own."""
    user: int
    group: int
    labels: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    networks: tuple[Attachment, ...] = ()
    published: tuple[int, ...] = ()
    """TCP ports that can be reached on 127.0.0.1."""
    mounts: tuple[Mount, ...] = ()
    cpu: CpuLimits = CpuLimits()
    """As it starts."""
    cgroup_parent: str
    """Control group that it shares with other containers of the run."""
    memory: int | None = None
    """Bytes, swap included; None: without limit."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the host's GPUs that it may use."""
    ipc: str | None = None
    """Inter-process communication: `shareable`, or `container:` and the name of one that is; None: its
    own."""
    pids: int = 128
    cap_drop: tuple[str, ...] = ("ALL",)
    cap_add: tuple[str, ...] = ()
    security: tuple[str, ...] = ("no-new-privileges:true",)
    read_only: bool = True
    """Its root file system."""
    tmpfs: Mapping[str, str] = field(default_factory=lambda: {"/tmp": "size=16m,noexec,nosuid"})  # noqa: S108
    sysctls: Mapping[str, str]
    dns: tuple[str, ...] = ("127.0.0.1",)
    """Whom the engine asks, in the container's own network, for names that are not its own: nobody.
    Otherwise it would ask the host's servers, some engines in the host's network, from where names
    carry words out of a network that has no way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLaunch:
    """All that is launched for a run, in this order."""

    networks: tuple[Network, ...]
    broker: Container
    aggregator: Container
    devices: tuple[Container, ...]
    router: Container | None
    mps: Container | None = None
    """NVIDIA's MPS, started before the devices, where any of them shares a GPU."""
