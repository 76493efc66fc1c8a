"""Specifications of what the `docker` runtime launches, as data: networks, and containers of broker,
aggregator and each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.node import mps
from testbed.broker import BROKER, MOSQUITTO_CONF, mosquitto_command
from testbed.gpu.planned import PlannedGpu, mps_limit
from testbed.host import kernel
from testbed.host.cpus import cpu_numbers
from testbed.host.gpus import MPS
from testbed.host.kernel import DEVICES, INFRASTRUCTURE
from testbed.plan import Plan, PlannedDevice, agent_configs, costs
from testbed.plan.agent_configs import MQTT_PORT, TLS_PORT, RunSpec
from testbed.plan.planned_devices import DEVICES_WEIGHT

if TYPE_CHECKING:
    from testbed.images import Images

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


# Specifications of what the `docker` runtime launches: networks, and containers of broker, aggregator
# and each device.
#
#     data network     (internal)  broker, aggregator, devices: models and updates, over the devices'
#     links control network  (no NAT)    broker, and the controller through 127.0.0.1
#
# If devices have links, a router between them and the broker has the broker's alias on the data network.
# Broker and aggregator are then behind the router, on a third network:
#
#     server network   (internal)  broker, aggregator, router
#
# The router is on the control network too.
#
# If devices share a GPU with limits, NVIDIA's MPS runs in a container without a network. Only the
# devices that share a GPU can access the folder with the pipes of MPS. These devices also share the MPS
# container's namespace for inter-process communication (IPC).
#
# A device's only network is its link. The device's init reaches the broker through a Unix socket, which
# the client may not use. The init runs as root, in the group that owns the run's files, and in its own
# namespaces. Its only capabilities are those to shape the link and to drop privileges. The client in the
# same container is an ordinary user.
#
# All containers and networks are labelled with the run.

BROKER_FILES, BROKER_SOCKET = "/testbed", "/control"
"""Folders in the broker's container: for its files, and for its Unix socket."""

_MIN_WEIGHT = 2
"""Lowest weight that the kernel allows for a container."""
UNLIMITED = CpuLimits(quota=-1, weight=_MIN_WEIGHT)
"""A client that starts during the run has no quota, but the lowest weight: start-up is not part of the
experiment, and must not take CPU time away from other devices."""
INFRASTRUCTURE_WEIGHT, _START_UP_WEIGHT = 10.0, 1.0
"""CPU weights of control groups, per core; 1 is the weight of a single process of the host. With
DEVICES_WEIGHT during the run, the devices' group gets 96 % of a core on which two other processes are
busy, but never more than the sum of the devices' quotas. With a far larger weight, the kernel's threads
that move packets would have to wait. Devices and infrastructure are separate groups with the same
parent, each with a weight for its own cores: in a common group, each could use the weight that is meant
for the other's cores."""


def group_weights(plan: Plan, *, is_started: bool) -> dict[str, float]:
    """1 is the weight of a single process. The devices' is low until all are started: their start-up has
    no quota, and links are measured at the same time."""
    weight = DEVICES_WEIGHT if is_started else _START_UP_WEIGHT
    return {
        DEVICES: weight * len(cpu_numbers(plan.device_cpus)),
        INFRASTRUCTURE: INFRASTRUCTURE_WEIGHT * len(cpu_numbers(plan.aggregator_cpus)),
    }


def launch(
    spec: RunSpec,
    images: Images,
    *,
    owner: tuple[int, int],
    congestion_control: str | None,
    cgroup_driver: str,
) -> ContainerLaunch:
    """`owner`: user and group of the run's files. `congestion_control`: TCP's, of all containers; None
    for the host's setting. `cgroup_driver`: `cgroupfs` or `systemd`."""
    sysctls = {} if congestion_control is None else {kernel.CONGESTION_CONTROL: congestion_control}
    builder = _SpecificationBuilder(spec, images, owner, sysctls, cgroup_driver)
    return ContainerLaunch(
        networks=builder.networks(),
        broker=builder.broker(),
        aggregator=builder.aggregator(),
        devices=tuple(map(builder.device, spec.plan.emulated_devices)),
        router=builder.router() if spec.plan.is_routed else None,
        mps=builder.mps() if spec.plan.shared_gpus else None,
    )


def object_name(run: str, what: str) -> str:
    """`what`: a component, or `data`, `control` or `server`."""
    return f"testbed-{run}-{what}"


def appended_files(spec: RunSpec) -> list[Path]:
    """Files that the aggregator appends to. They are mounted, so they must exist before it starts."""
    directory = spec.directory
    recorded = [directory.inputs] if spec.topology.durability == "recording" else []
    return [directory.events, *recorded]


def planned_limits(device: PlannedDevice) -> CpuLimits:
    """Limits of a device whose client is ready."""
    return CpuLimits(
        quota=device.quota,
        period=device.period,
        weight=device.weight,
        cpus=device.cores,
    )


def starting_limits(device: PlannedDevice) -> CpuLimits:
    """Limits of a device whose client is absent, or not ready, when the run clock starts, until it is
    ready."""
    return replace(UNLIMITED, cpus=device.cores)


@dataclass(frozen=True, slots=True)
class _SpecificationBuilder:
    spec: RunSpec
    images: Images
    owner: tuple[int, int]
    sysctls: Mapping[str, str]
    cgroup_driver: str

    def networks(self) -> tuple[BridgeNetwork, ...]:
        data, control, server = map(self._network, ("data", "control", "server"))
        control = replace(
            control,
            internal=False,  # an internal network cannot publish the broker's port on 127.0.0.1
            options={
                "com.docker.network.bridge.enable_ip_masquerade": "false",
                "com.docker.network.bridge.host_binding_ipv4": "127.0.0.1",
            },
        )
        return (data, control, server) if self.spec.plan.is_routed else (data, control)

    def broker(self) -> Container:
        return replace(
            self._container(BROKER, self.images.broker),
            command=mosquitto_command("mosquitto", f"{BROKER_FILES}/{MOSQUITTO_CONF}", "/tmp/log"),  # noqa: S108
            networks=(
                self._attachment("control", agent_configs.CONTROL),
                self._attachment(self._server, agent_configs.SERVER, agent_configs.ROUTED_BROKER),
            ),
            published=(MQTT_PORT,),
            public={} if self.spec.plan.server is None else {TLS_PORT: self.spec.plan.server},
            mounts=(
                Mount(str(self.spec.directory.work / BROKER), BROKER_FILES),
                Mount(str(self.spec.directory.control), BROKER_SOCKET, read_only=False),
            ),
            cpu=self._infrastructure,
            memory=agent_configs.broker_limits(self.spec.topology).container,
        )

    def aggregator(self) -> Container:
        run = self.spec.directory
        inside = Path(agent_configs.RUN_DIRECTORY)
        probes = ("python3", "-m", "agents.links.probe_server") if self.spec.plan.is_routed else ()
        return replace(
            self._container(AGGREGATOR, self.images.agent),
            command=(
                *probes,
                "python3",
                "-m",
                "agents.aggregator.main",
                agent_configs.AGGREGATOR_CONFIG,
            ),
            environment=dict.fromkeys(agent_configs.THREAD_VARIABLES, "1"),
            networks=(self._attachment(self._server, AGGREGATOR),),
            mounts=(
                Mount(str(run.config(AGGREGATOR)), agent_configs.AGGREGATOR_CONFIG),
                Mount(str(run.test_set), agent_configs.TEST_SET),
                *self._device_set,
                *self._start,
                *(
                    Mount(str(path), str(inside / path.relative_to(run.path)), read_only=False)
                    for path in (*appended_files(self.spec), run.models, run.aggregator_state)
                ),
            ),
            cpu=CpuLimits(cpus=self.spec.plan.aggregator_cpus),
            memory=self.spec.plan.aggregator_memory,
        )

    def device(self, device: PlannedDevice) -> Container:
        run, name, gpu = self.spec.directory, device.name, device.gpu
        disk = Mount(str(run.disk(name)), agent_configs.DISK, read_only=False)
        limits = self._mps_variables(gpu) if gpu is not None and gpu.limited else {}
        return replace(
            self._container(name, self._image_of(device)),
            user=0,  # and in the group of the run's files
            command=("python3", "-m", "agents.device.main", agent_configs.DEVICE_CONFIG),
            environment={
                **dict.fromkeys(agent_configs.THREAD_VARIABLES, str(device.threads)),
                **limits,
            },
            networks=(self._attachment("data", name),),
            mounts=(
                Mount(str(run.control), agent_configs.CONTROL_FOLDER),
                Mount(str(run.config(agent_configs.init_name(name))), agent_configs.DEVICE_CONFIG),
                Mount(str(run.config(name)), agent_configs.CLIENT_CONFIG),
                Mount(str(run.shard(name)), agent_configs.SHARD),
                *self._start,
                disk,
                *((self._mps_folder,) if limits else ()),
            ),
            memory=device.memory,
            gpus=() if gpu is None else (gpu.uuid,),
            ipc=f"container:{self._object_name(MPS)}" if limits else None,
            cgroup_parent=self._cgroup(DEVICES),
            cap_add=("SETUID", "SETGID", "KILL", "NET_ADMIN"),
            # For the pings by which it measures its link.
            sysctls={**self.sysctls, "net.ipv4.ping_group_range": "0 2147483647"},
        )

    def _image_of(self, device: PlannedDevice) -> str:
        default = self.images.agent if device.gpu is None else self.images.gpu
        return self.images.groups.get(device.group, default)

    def mps(self) -> Container:
        """Container of MPS, without a network. The container runs as the user of the devices' clients,
        because MPS serves only one user."""
        spec = self.spec
        return replace(
            self._container(MPS, self.images.gpu),
            user=agent_configs.CLIENT_USER,
            group=agent_configs.CLIENT_USER,
            command=("python3", "-m", "agents.node.mps", agent_configs.MPS_FOLDER),
            mounts=(self._mps_folder,),
            cpu=self._infrastructure,
            memory=mps_limit(len(spec.plan.devices)),
            gpus=spec.plan.shared_gpus,
            ipc="shareable",
        )

    def router(self) -> Container:
        return replace(
            self._container(ROUTER, self.images.agent),
            user=0,
            command=("python3", "-m", "agents.router.main", agent_configs.ROUTER_CONFIG),
            environment={"XTABLES_LOCKFILE": "/tmp/xtables.lock"},  # noqa: S108  # iptables-legacy's
            networks=(
                self._attachment("data", agent_configs.SERVER),
                self._attachment("server", ROUTER),
                self._attachment("control", ROUTER),
            ),
            mounts=(Mount(str(self.spec.directory.config(ROUTER)), agent_configs.ROUTER_CONFIG),),
            cpu=self._infrastructure,
            memory=costs.router_limit(len(self.spec.plan.devices)),
            cap_add=("NET_ADMIN", "NET_RAW", "SYS_NICE"),
            sysctls={**self.sysctls, "net.ipv4.ip_forward": "1"},
        )

    @property
    def _mps_folder(self) -> Mount:
        return Mount(str(self.spec.directory.mps), agent_configs.MPS_FOLDER, read_only=False)

    def _mps_variables(self, gpu: PlannedGpu) -> dict[str, str]:
        """Environment by which a client's CUDA uses MPS within the device's limits."""
        limits = mps.limit_variables(gpu.share, gpu.memory, len(self.spec.plan.shared_gpus))
        return {**mps.environment(agent_configs.MPS_FOLDER), **limits}

    @property
    def _device_set(self) -> tuple[Mount, ...]:
        """File with all devices' samples, if the model is evaluated on each device's samples."""
        if self.spec.topology.evaluate.devices is None:
            return ()
        return (Mount(str(self.spec.directory.device_set), agent_configs.DEVICE_SET),)

    @property
    def _start(self) -> tuple[Mount, ...]:
        """File with the initial state of the model, if the run has one."""
        weights = agent_configs.initial_model(self.spec.topology, self.spec.directory).weights
        return () if weights is None else (Mount(weights, agent_configs.START),)

    @property
    def _server(self) -> str:
        """Network of broker and aggregator."""
        return "server" if self.spec.plan.is_routed else "data"

    @property
    def _infrastructure(self) -> CpuLimits:
        """Limits of broker, aggregator and router. On a host with one core, they share it with the
        devices."""
        return CpuLimits(cpus=self.spec.plan.infrastructure_cpus)

    def _cgroup(self, group: str) -> str:
        return kernel.cgroup_parent(self.spec.directory.run, group, self.cgroup_driver)

    def _object_name(self, what: str) -> str:
        return object_name(self.spec.directory.run, what)

    def _labels(self, component: str) -> dict[str, str]:
        run = self.spec.directory
        return {RUN_LABEL: run.run, COMPONENT_LABEL: component, DIRECTORY_LABEL: str(run.path)}

    def _network(self, name: str) -> BridgeNetwork:
        return BridgeNetwork(name=self._object_name(name), labels=self._labels(name))

    def _attachment(self, network: str, *aliases: str) -> Attachment:
        return Attachment(self._object_name(network), aliases)

    def _container(self, component: str, image: str) -> Container:
        return Container(
            component=component,
            name=self._object_name(component),
            image=image,
            user=self.owner[0],
            group=self.owner[1],
            labels=self._labels(component),
            sysctls=self.sysctls,
            cgroup_parent=self._cgroup(INFRASTRUCTURE),
        )
