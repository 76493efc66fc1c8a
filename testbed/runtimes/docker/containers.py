"""Specifications of networks and containers as data, which `testbed.runtimes.docker.executor`
creates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RUN_LABEL = "testbed.run"
COMPONENT_LABEL = "testbed.part"
"""Label with the component of a container."""
DIRECTORY_LABEL = "testbed.directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeNetwork:
    name: str
    labels: Mapping[str, str]
    internal: bool = True
    """Isolated from all other networks."""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attachment:
    network: str
    aliases: tuple[str, ...]
    """Host names of the container there."""


@dataclass(frozen=True, slots=True)
class Mount:
    """File or folder of the host in a container."""

    source: str
    target: str
    """Path in the container."""
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimits:
    """None leaves a limit unchanged."""

    quota: int | None = None
    """µs per period; −1 if unlimited."""
    period: int | None = None
    """µs."""
    weight: int | None = None
    """Relative to other containers that compete for a core."""
    cpus: str | None = None
    """CPU numbers, such as `1-3`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """By default, the container has the least privileges. Each further privilege is a field."""

    component: str
    """`broker`, `aggregator`, `router`, `mps` or a device; also the container's host name."""
    name: str
    image: str
    command: tuple[str, ...] = ()
    """Empty for the image's command."""
    user: int
    group: int
    labels: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    networks: tuple[Attachment, ...] = ()
    published: tuple[int, ...] = ()
    """TCP ports published on 127.0.0.1."""
    public: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Further ports: of the container -> address and port of the host."""
    mounts: tuple[Mount, ...] = ()
    cpu: CpuLimits = CpuLimits()
    """Limits at the start."""
    cgroup_parent: str
    """Parent of the control group, shared with other containers of the run."""
    memory: int | None = None
    """Bytes, swap included; None if unlimited."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the host's GPUs."""
    ipc: str | None = None
    """`shareable` if other containers may join in, `container:NAME` to join in with NAME, None for the
    engine's default."""
    pids: int = 128
    """Maximum number of processes and threads."""
    cap_drop: tuple[str, ...] = ("ALL",)
    cap_add: tuple[str, ...] = ()
    security: tuple[str, ...] = ("no-new-privileges:true",)
    read_only: bool = True
    tmpfs: Mapping[str, str] = field(default_factory=lambda: {"/tmp": "size=16m,noexec,nosuid"})  # noqa: S108
    sysctls: Mapping[str, str]
    dns: tuple[str, ...] = ("127.0.0.1",)
    """For names that the engine does not know. The default has no name server, so they do not resolve:
    the host's would carry data out of an isolated network, in the names that a container looks up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLaunch:
    networks: tuple[BridgeNetwork, ...]
    broker: Container
    aggregator: Container
    devices: tuple[Container, ...]
    router: Container | None
    """None if no device has a link."""
    mps: Container | None = None
    """NVIDIA's MPS, which starts before the devices; None if no device shares a GPU."""
