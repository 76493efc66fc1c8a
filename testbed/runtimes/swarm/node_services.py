"""Parts of a run on the nodes of a Swarm beside its devices: services, their state, and the meter of
resources."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import docker

from agents.config import dump
from agents.device.control_group import ControlGroup
from agents.mqtt.topics import AGGREGATOR, ROUTER
from testbed.broker import BROKER, SOCKET, Account, router_user
from testbed.errors import HostError
from testbed.fidelity.host_load import CpuTimes, HostSample, Sampler, cpu_times
from testbed.host import docker_engine
from testbed.plan import agent_configs, cpuset
from testbed.plan.agent_configs import TLS_PORT, RunSpec
from testbed.plan.machines import PlannedNode
from testbed.plan.planned_devices import SHARES_OF_A_PROCESS, weight_alone
from testbed.runtimes import HostReading, Meter
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.meter import ContainerRef, RunningContainers
from testbed.runtimes.docker.specifications import (
    COMPONENT_LABEL,
    INFRASTRUCTURE_WEIGHT,
    Attachment,
    Container,
    ContainerLaunch,
    CpuLimits,
)
from testbed.runtimes.docker.specifications import object_name as object_name_of
from testbed.runtimes.swarm import services
from testbed.runtimes.swarm.engine_proxies import IDENTITY, NAME, EngineProxies, node_container
from testbed.runtimes.swarm.services import ServiceOptions, Volume, short_name

INFRASTRUCTURE_PER_CORE = round(INFRASTRUCTURE_WEIGHT * SHARES_OF_A_PROCESS)
"""CPU weight of each container of the infrastructure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmContext:
    manager: docker.DockerClient
    """This node's engine, which manages the Swarm."""
    names: Mapping[str, str]
    """Names of the nodes, by node id."""
    spec: RunSpec
    launch: ContainerLaunch
    base: str
    """Image of the node agents."""
    labels: Mapping[str, str]
    proxies: EngineProxies
    ids: dict[str, str] = field(default_factory=dict)
    """Images that all nodes have, by tag. The engine asks no registry for an image that is named by its
    id."""

    def create(self, container: Container, options: ServiceOptions) -> str:
        image = self.ids.get(container.image, container.image)
        return services.create(self.manager, replace(container, image=image), options)

    def object_name(self, what: str) -> str:
        return object_name_of(self.spec.directory.run, what)

    def volume(self, what: str, target: str, *, read_only: bool = False) -> Volume:
        """To mount at `target`. Each node that uses the volume has one of its own."""
        return Volume(short_name(self.object_name(what)), target, read_only)

    def devices_on(self, node: str) -> list[str]:
        plan = self.spec.plan
        return [one.name for one in plan.emulated_devices if plan.placement[one.name] == node]

    def container_of(self, task: Mapping[str, Any]) -> ContainerRef:
        """The container of a task, with the engine that runs it."""
        engine = self.proxies.engines[task["NodeID"]]
        return ContainerRef(engine, task["Status"]["ContainerStatus"]["ContainerID"])

    def await_tasks(
        self, expected: Mapping[str, int], components: Mapping[str, str], earlier: Collection[str] = ()
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the running tasks, by service id.

        `expected`: number of tasks, by service id. `components`: of the services, for messages. Tasks
        with ids in `earlier` do not count. Raises HostError if a task fails or starts too late.
        """
        return services.await_tasks(
            self.manager,
            expected,
            lambda service: components[service],
            self.names,
            earlier,
        )

    @contextmanager
    def requests_to(self, node: str) -> Iterator[None]:
        """Raises HostError if the engine does not answer."""
        try:
            yield
        except docker_engine.ERRORS as error:
            self.proxies.unreachable.add(node)
            name = self.names.get(node, node)
            raise HostError(f"the node {name} no longer answers: {error}") from error

    def addresses(self, node: str) -> dict[str, str]:
        """IPv4 addresses on the node's bridge, by container id."""
        found = executor.addresses(self.proxies.engines[node], short_name(self.object_name("data")))
        return {container: address for container, (_, address) in found.items()}

    def pin_infrastructure(self, node: str) -> None:
        """Restrict all containers of the run that are on `node` now, except devices, broker and
        aggregator, to the CPUs that the plan reserves for infrastructure."""
        planned = next(one for one in self.spec.plan.nodes if one.id == node)
        limits = CpuLimits(cpus=cpuset(planned.infrastructure), weight=INFRASTRUCTURE_PER_CORE)
        engine, run = self.proxies.engines[node], self.spec.directory.run
        others = {*(device.name for device in self.spec.plan.devices), BROKER, AGGREGATOR}
        for container in executor.containers(engine, run):
            if container["Labels"][COMPONENT_LABEL] not in others:
                executor.limit(engine, container["Id"], limits)


def without_group(limits: CpuLimits) -> CpuLimits:
    """Convert `limits` for a device that is not in a control group of the run. The weight of that device
    competes directly with the weights of all processes of the host."""
    return limits if limits.weight is None else replace(limits, weight=weight_alone(limits.weight))


NODE_AGENT, MANAGER_AGENT = "node.agent", "node.manager-agent"
"""Node agents: on other nodes, and on this one, the manager."""
_STAT = "stat"
"""Counters of a node's CPUs, in the control folder."""
_CLOCK_PORT = 7001
_CLOCK = "clock"
"""Host name of the agent on this node, whose clock is that of the run."""
_TIMEOUT_SECONDS = 30.0
"""Maximum seconds to wait until the clocks of all nodes are compared."""
FILES = str(Path(agent_configs.SHARD).parent)
"""Folder of a device or router, in a volume. They do not start before their last file is in it."""
_FILES_READY = "files-ready"
_WHEN_FILES_READY = f'until [ -e {FILES}/{_FILES_READY} ]; do sleep 0.1; done; exec "$@"'


class NodeAgents:
    """A node agent passes messages of its node's devices from a Unix socket to the broker, over TLS,
    compares the node's clock with the manager's, and reads the counters of the node's CPUs."""

    def __init__(self, context: SwarmContext) -> None:
        self._context = context
        self._containers: dict[str, str] = {}
        """Ids of the agents' containers, by node."""
        self._samplers: dict[str, Sampler] = {}
        """Load on other nodes."""
        self._latest: dict[str, tuple[dict[int, CpuTimes], float]] = {}
        """Latest input of the samplers, by node: counters of the CPUs, and CPU seconds of the node's
        devices."""

    def create(self, certificate: str) -> dict[str, tuple[str, int]]:
        """Return component and number of tasks, by service id. `certificate`: the broker's, in PEM
        format."""
        context = self._context
        control = context.volume("control", agent_configs.CONTROL_FOLDER)
        trust = services.create_config(
            context.manager,
            context.object_name("broker-pem"),
            certificate.encode(),
            context.labels,
            "/testbed/broker.pem",
        )
        to_broker = {
            "host": agent_configs.CONTROL,
            "port": TLS_PORT,
            "name": agent_configs.CONTROL,
            "trust": trust.target,
        }
        proxies = [{"listen": {"path": f"{control.target}/{SOCKET}"}, "to": to_broker}]
        clock = {"host": "0.0.0.0", "port": _CLOCK_PORT, "identity": IDENTITY}  # noqa: S104
        ask = {"host": _CLOCK, "port": _CLOCK_PORT, "identity": IDENTITY, "name": NAME}
        file = f"{control.target}/{agent_configs.CLOCK}"
        here, others = f"node.id == {context.proxies.here}", len(context.proxies.others)
        made = {}
        for component, config, node, count, aliases in (
            (MANAGER_AGENT, {"serve_clock": clock}, here, 1, (_CLOCK,)),
            (
                NODE_AGENT,
                {
                    "compare_clock": {"ask": ask, "write": file},
                    "cpu_counters": f"{control.target}/{_STAT}",
                },
                here.replace("==", "!="),
                others,
                (),
            ),
        ):
            if count == 0:
                continue
            container = node_container(
                component,
                context.object_name(component),
                context.base,
                {**context.labels, COMPONENT_LABEL: component},
                (Attachment(context.object_name("control"), aliases),),
            )
            service = context.proxies.service(
                container,
                {"proxies": proxies, **config},
                (node,),
                everywhere=component == NODE_AGENT,
                volumes=[control],
                more_configs=[trust],
            )
            made[service] = component, count
        return made

    def record_tasks(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Containers of the running `tasks`."""
        for task in tasks:
            self._containers[task["NodeID"]] = task["Status"]["ContainerStatus"]["ContainerID"]

    def check(self, alive: Collection[str]) -> None:
        """Raise HostError if a node agent is not in `alive`: the devices of its node can no longer
        communicate."""
        for node, container in self._containers.items():
            if container not in alive:
                name = self._context.names.get(node, node)
                raise HostError(f"the node agent of {name} has ended: see its log")

    def put_files(self, node: str, files: Mapping[str, bytes]) -> None:
        """Write `files`, name -> content, into the control folder, in this order."""
        engine, where = self._context.proxies.engines[node], agent_configs.CONTROL_FOLDER
        executor.put_files(engine, self._containers[node], where, files)

    def await_clocks(self, nodes: Sequence[str]) -> None:
        """Wait until each node has an estimate of this node's clock; that of the agent here is exact.
        Raises HostError if one takes too long."""
        exact = {"at": 0, "offset": 0, "drift": 0.0, "uncertainty": 0}
        self.put_files(self._context.proxies.here, {agent_configs.CLOCK: json.dumps(exact).encode()})
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        for node in nodes:
            while self._clock(node) is None:
                if time.monotonic() > deadline:
                    name = self._context.names[node]
                    raise HostError(f"the clock of {name} cannot be compared with this host's")
                time.sleep(0.1)

    def _clock(self, node: str) -> dict[str, Any] | None:
        """Estimate of this node's clock by the agent on `node`; None if it has none yet."""
        text = self._read(node, agent_configs.CLOCK)
        return None if text is None else dict(json.loads(text))

    def _read(self, node: str, name: str) -> bytes | None:
        path = f"{agent_configs.CONTROL_FOLDER}/{name}"
        return executor.read_file(self._context.proxies.engines[node], self._containers[node], path)

    def readings(self, at: float, used: Mapping[str, float]) -> dict[str, HostReading]:
        """Return a reading (clock and load) of each other node, by node name. `at` is the run time in
        seconds. `used` has the CPU seconds that each device has used so far."""
        found = {}
        for planned in self._context.spec.plan.nodes:
            if planned.here or planned.id not in self._containers:
                continue
            with self._context.requests_to(planned.id):
                clock, stat = self._clock(planned.id), self._read(planned.id, _STAT)
            found[planned.name] = HostReading(
                math.inf if clock is None else clock["uncertainty"] / 1e9,
                None if stat is None else self._load(planned, stat.decode("ascii"), at, used),
            )
        return found

    def _load(
        self, planned: PlannedNode, stat: str, at: float, used: Mapping[str, float]
    ) -> HostSample | None:
        """Since the last call; None at the first. `stat`: present counters of the node's CPUs."""
        node = planned.id
        own = math.fsum(used.get(name, 0.0) for name in self._context.devices_on(node))
        self._latest[node] = cpu_times(stat), own
        if node not in self._samplers:
            self._samplers[node] = Sampler(
                {*planned.infrastructure, *planned.devices},
                set(planned.devices),
                own=lambda: self._latest[node][1],
                read=lambda: self._latest[node][0],
                dilation=self._context.spec.plan.dilation,
                controlled=False,
            )
        return self._samplers[node].sample(at, 0.0)


class Routers:
    def __init__(self, context: SwarmContext) -> None:
        self._context = context
        self.containers: dict[str, ContainerRef] = {}
        self._components: dict[str, str] = {}
        """Components of the routers, by node."""

    def start(self, nodes: Sequence[str]) -> dict[str, str]:
        """Routers wait for their configurations. Return their addresses on their nodes' bridges, which
        have no name service, by node."""
        context, router = self._context, self._context.launch.router
        if router is None:
            raise HostError("the plan has no router, which a run on a Swarm needs")
        made = {}
        for number, node in enumerate(nodes):
            component = f"{ROUTER}.{number}"
            own = replace(
                router,
                component=component,
                name=context.object_name(component),
                labels={**router.labels, COMPONENT_LABEL: component},
                group=0,
                command=("sh", "-c", _WHEN_FILES_READY, "sh", *router.command),
            )
            volume = context.volume(f"{component}-files", FILES)
            options = ServiceOptions(nodes=(f"node.id == {node}",), volumes=[volume])
            made[context.create(own, options)] = component
            self._components[node] = component
        for service, found in context.await_tasks(dict.fromkeys(made, 1), made).items():
            self.containers[made[service]] = context.container_of(found[0])
        return {
            node: context.addresses(node)[self.containers[component].id]
            for node, component in self._components.items()
        }

    def send_configs(
        self,
        devices: Mapping[str, ContainerRef],
        accounts: Mapping[str, Account],
        places: agent_configs.Places,
        certificate: str,
    ) -> None:
        """With the addresses of the running `devices`."""
        context = self._context
        for node, component in self._components.items():
            login = accounts[router_user(node)].at(*places.router, certificate)
            found = context.addresses(node)
            ids = {name: devices[name].id for name in context.devices_on(node)}
            # For devices that have ended already, the controller reports that the start has failed.
            addresses = {name: found[one] for name, one in ids.items() if one in found}
            if not addresses:
                continue
            config = agent_configs.router_config(
                context.spec, login, places, addresses, context.names[node]
            )
            file = context.spec.directory.config(component)
            dump(config, file)
            name = Path(agent_configs.ROUTER_CONFIG).name
            files: dict[str, bytes | Path] = {name: file, _FILES_READY: b""}
            executor.put_files(
                self.containers[component].engine, self.containers[component].id, FILES, files
            )


class SwarmMeter(Meter):
    """Devices send CPU, memory and traffic themselves."""

    def __init__(
        self, context: SwarmContext, containers: RunningContainers, node_agents: NodeAgents
    ) -> None:
        self._containers = containers
        self._node_agents = node_agents
        self._manager = context.manager
        self._devices = {device.name for device in context.spec.plan.devices}
        self._here = context.devices_on(context.proxies.here)
        self._used: dict[str, float] = {}
        """CPU seconds of each device on this node, when last read."""
        self.more_pids: list[int] = []
        """Processes of this host that serve the devices beside the containers."""

    def externally_stopped(self) -> set[str]:
        """Containers that were paused in the last list, and servers on this host that a signal has
        stopped."""
        return self._containers.stopped(self._servers_here())

    def groups(self) -> Collection[str]:
        return [one.id for one in self._containers.values()]

    def server_pids(self) -> list[int]:
        return [*self._containers.pids(self._servers_here()), *self.more_pids]

    def _servers_here(self) -> list[str]:
        return [
            name
            for name, one in self._containers.items()
            if name not in self._devices and one.engine is self._manager
        ]

    def device_cpu_seconds(self) -> float | None:
        """Total on this node. Devices that have ended count with their last reading."""
        for name in self._here:
            used = ControlGroup.of_process(self._containers.pid(name)).cpu_seconds()
            if used is not None:
                self._used[name] = used
        return math.fsum(self._used.values()) if self._used or not self._here else None

    def other_hosts(self, at: float, used: Mapping[str, float]) -> Mapping[str, HostReading]:
        return self._node_agents.readings(at, used)
