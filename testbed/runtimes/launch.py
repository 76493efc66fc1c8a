"""What the `docker` runtime launches, as data: one container per device, one each for broker and
aggregator, and networks.

    data network     (internal)  broker, aggregator, clients: FL's own traffic, over the devices' links
    control network  (no NAT)    broker, device inits, and the controller through 127.0.0.1

Where devices have links, a router stands between them and the broker, which then has its alias on the
data network; broker and aggregator are on a third, behind it:

    server network   (internal)  broker, aggregator, router

A device's container runs its init as root with the few capabilities that shaping and dropping privileges
need, in its own namespaces; the client in it is an ordinary user. Everything is labelled with the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agents.topics import AGGREGATOR, ROUTER
from testbed import configs, kernel
from testbed.broker import BROKER
from testbed.configs import RunSpec
from testbed.plan import PlannedDevice
from testbed.rundir import RunDirectory
from testbed.runtimes.containers import (
    DIRECTORY_LABEL,
    PART_LABEL,
    RUN_LABEL,
    Attachment,
    Container,
    CpuLimits,
    Launch,
    Mount,
    Network,
)

if TYPE_CHECKING:  # which brings the Docker SDK
    from testbed.images import Images

BROKER_FILES = "/testbed"
"""Where the broker finds its files."""

_DATA_ALIAS, MQTT_PORT = configs.IN_CONTAINERS.data
_CONTROL_ALIAS, _ = configs.IN_CONTAINERS.control
_LEAST_WEIGHT, _MOST_WEIGHT = 2, 262_144
"""The kernel's bounds of a container's weight against others."""

UNLIMITED = CpuLimits(quota=-1, weight=_LEAST_WEIGHT)
"""Of a client that starts in mid-run: start-up is no part of the experiment, but must not take what
others are promised."""


def launch(spec: RunSpec, images: Images, *, owner: int, congestion_control: str | None) -> Launch:
    """What to launch for a run, whose files belong to the user `owner`.

    `congestion_control` is that of all TCP in containers; None: the host's.
    """
    return _Author(spec, images, owner, congestion_control).launch()


def data_network(run: str) -> str:
    """Name of the network that the devices are on."""
    return f"testbed-{run}-data"


def appended(spec: RunSpec) -> list[Path]:
    """Files that the aggregator appends to: there before it starts, as nothing else can be mounted."""
    directory = spec.directory
    recorded = [directory.inputs] if spec.topology.record == "updates" else []
    return [directory.events, *recorded]


def planned_limits(spec: RunSpec, device: PlannedDevice) -> CpuLimits:
    """Of a device at work."""
    return CpuLimits(
        quota=device.quota, period=device.period, weight=device.weight, cpus=spec.plan.device_cpus
    )


@dataclass(frozen=True, slots=True)
class _Author:
    spec: RunSpec
    images: Images
    owner: int
    congestion_control: str | None

    def launch(self) -> Launch:
        return Launch(
            networks=self._networks(),
            broker=self._broker(),
            aggregator=self._aggregator(),
            devices=tuple(map(self._device, self.spec.plan.devices)),
            router=self._router() if self.spec.routed else None,
        )

    @property
    def _run(self) -> RunDirectory:
        return self.spec.directory

    @property
    def _data(self) -> str:
        return data_network(self._run.run)

    @property
    def _control(self) -> str:
        return f"testbed-{self._run.run}-control"

    @property
    def _server(self) -> str:
        """The network that broker and aggregator are on."""
        return f"testbed-{self._run.run}-server" if self.spec.routed else self._data

    @property
    def _infrastructure(self) -> CpuLimits:
        """On a host with one core the devices have it too."""
        return CpuLimits(weight=_MOST_WEIGHT, cpus=self.spec.plan.infrastructure_cpus)

    def _labels(self, part: str) -> dict[str, str]:
        return {RUN_LABEL: self._run.run, PART_LABEL: part, DIRECTORY_LABEL: str(self._run.path)}

    def _sysctls(self, **more: str) -> dict[str, str]:
        name = self.congestion_control
        return {**({} if name is None else {kernel.CONGESTION_CONTROL: name}), **more}

    def _name(self, part: str) -> str:
        return f"testbed-{self._run.run}-{part}"

    def _networks(self) -> tuple[Network, ...]:
        control = Network(
            name=self._control,
            labels=self._labels("control"),
            # An internal network could not publish the broker's port on 127.0.0.1.
            internal=False,
            options={
                "com.docker.network.bridge.enable_ip_masquerade": "false",
                "com.docker.network.bridge.host_binding_ipv4": "127.0.0.1",
            },
        )
        data = Network(name=self._data, labels=self._labels("data"))
        server = Network(name=self._server, labels=self._labels("server"))
        return (data, control, server) if self.spec.routed else (data, control)

    def _broker(self) -> Container:
        return Container(
            part=BROKER,
            name=self._name(BROKER),
            image=self.images.broker,
            user=self.owner,
            labels=self._labels(BROKER),
            networks=(
                Attachment(self._control, (_CONTROL_ALIAS,)),
                Attachment(self._server, (_DATA_ALIAS, configs.ROUTED_BROKER)),
            ),
            published=(MQTT_PORT,),
            mounts=(Mount(str(self._run.work / BROKER), BROKER_FILES),),
            cpu=self._infrastructure,
            sysctls=self._sysctls(),
        )

    def _aggregator(self) -> Container:
        run, inside = self._run, Path(configs.IN_CONTAINERS.run_directory(self._run))
        turns = ("python3", "-m", "agents.turns") if self.spec.routed else ()
        written = [*appended(self.spec), run.models]
        return Container(
            part=AGGREGATOR,
            name=self._name(AGGREGATOR),
            image=self.images.agent,
            command=(*turns, "python3", "-m", "agents.aggregator.main", configs.AGGREGATOR_CONFIG),
            user=self.owner,
            labels=self._labels(AGGREGATOR),
            networks=(Attachment(self._server, (AGGREGATOR,)),),
            mounts=(
                Mount(str(run.config(AGGREGATOR)), configs.AGGREGATOR_CONFIG),
                Mount(str(run.test_set), configs.TEST_SET),
                *(Mount(str(path), str(inside / path.name), read_only=False) for path in written),
            ),
            cpu=self._infrastructure,
            sysctls=self._sysctls(),
        )

    def _device(self, device: PlannedDevice) -> Container:
        run = self._run
        remembered = Mount(str(run.memory(device.name).parent), configs.MEMORY, read_only=False)
        return Container(
            part=device.name,
            name=self._name(device.name),
            image=self.images.agent,
            command=("python3", "-m", "agents.device.main", configs.DEVICE_CONFIG),
            user=0,
            labels=self._labels(device.name),
            environment=dict.fromkeys(configs.THREAD_VARIABLES, str(device.threads)),
            networks=(
                Attachment(self._data, (device.name,)),
                Attachment(self._control, (device.name,)),
            ),
            mounts=(
                Mount(str(run.config(configs.init_name(device.name))), configs.DEVICE_CONFIG),
                Mount(str(run.config(device.name)), configs.CLIENT_CONFIG),
                Mount(str(run.shard(device.name)), configs.SHARD),
                *((remembered,) if self.spec.remembers else ()),
            ),
            memory=device.memory,
            cap_add=("SETUID", "SETGID", "KILL", "NET_ADMIN"),
            # It measures its link by echoes.
            sysctls=self._sysctls(**{"net.ipv4.ping_group_range": "0 2147483647"}),
        )

    def _router(self) -> Container:
        return Container(
            part=ROUTER,
            name=self._name(ROUTER),
            image=self.images.agent,
            command=("python3", "-m", "agents.router.main", configs.ROUTER_CONFIG),
            user=0,
            labels=self._labels(ROUTER),
            networks=(
                Attachment(self._data, (_DATA_ALIAS,)),
                Attachment(self._server, (ROUTER,)),
                Attachment(self._control, (ROUTER,)),
            ),
            mounts=(Mount(str(self._run.config(ROUTER)), configs.ROUTER_CONFIG),),
            cpu=self._infrastructure,
            cap_add=("NET_ADMIN", "NET_RAW", "SYS_NICE"),
            sysctls=self._sysctls(**{"net.ipv4.ip_forward": "1"}),
        )
