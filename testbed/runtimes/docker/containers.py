"""Specifications of networks and containers as data. `testbed.runtimes.docker.executor` creates the
networks and containers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RUN_LABEL = "testbed.run"
COMPONENT_LABEL = "testbed.part"
"""Label with the component of a container."""
DIRECTORY_LABEL = "testbed.directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeNetwork:
    """A bridge network."""

    name: str
    labels: Mapping[str, str]
    internal: bool = True
    """Whether the network is isolated from all other networks."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of Docker's bridge driver."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Connection of a container to a network."""

    network: str
    aliases: tuple[str, ...]
    """Host names of the container on that network."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the host in a container."""

    source: str
    """Path on the host."""
    target: str
    """Path in the container."""
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimits:
    """CPU limits of a container. A limit that is None stays unchanged."""

    quota: int | None = None
    """CPU time per period in microseconds; −1 if unlimited, None if unchanged."""
    period: int | None = None
    """Period of the quota in microseconds; None if unchanged."""
    weight: int | None = None
    """Weight relative to other containers that compete for a core; None if unchanged."""
    cpus: str | None = None
    """CPUs on which the container may run, such as `1-3`; None if unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Specification of a container. By default, the container has the least privileges. Each further
    privilege is a field."""

    component: str
    """Component of the run: `broker`, `aggregator`, `router`, `mps` or a device. The name of the
    component is also the container's host name."""
    name: str
    image: str
    command: tuple[str, ...] = ()
    """Command to run; if empty, the image's command runs."""
    user: int
    """Numeric user id."""
    group: int
    """Numeric group id."""
    labels: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    networks: tuple[Attachment, ...] = ()
    published: tuple[int, ...] = ()
    """TCP ports that are published on 127.0.0.1."""
    public: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Further TCP ports that are published: port of the container -> address and port of the host."""
    mounts: tuple[Mount, ...] = ()
    cpu: CpuLimits = CpuLimits()
    """CPU limits that the container starts with."""
    cgroup_parent: str
    """Name of the parent of the container's control group. Several containers of the run have the same
    parent."""
    memory: int | None = None
    """Memory limit in bytes, including swap; None if unlimited."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the host's GPUs that the container may use."""
    ipc: str | None = None
    """Docker's mode of inter-process communication: `shareable` if other containers may join in,
    `container:NAME` to join in with the container NAME, None to use the engine's default."""
    pids: int = 128
    """Maximum number of processes and threads."""
    cap_drop: tuple[str, ...] = ("ALL",)
    cap_add: tuple[str, ...] = ()
    security: tuple[str, ...] = ("no-new-privileges:true",)
    """Docker's security options."""
    read_only: bool = True
    """Whether the container's root file system is read-only."""
    tmpfs: Mapping[str, str] = field(default_factory=lambda: {"/tmp": "size=16m,noexec,nosuid"})  # noqa: S108
    sysctls: Mapping[str, str]
    dns: tuple[str, ...] = ("127.0.0.1",)
    """Name servers for names that the engine does not know. The default address has no name server, so
    these names do not resolve. If the host's name servers received the names, a container in an isolated
    network could send data out in the names that it looks up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLaunch:
    """Specifications of everything to launch for a run."""

    networks: tuple[BridgeNetwork, ...]
    broker: Container
    aggregator: Container
    devices: tuple[Container, ...]
    router: Container | None
    """Router of the devices' links; None if no device has a link."""
    mps: Container | None = None
    """Container of NVIDIA's MPS, which starts before the devices; None if no device shares a GPU."""
