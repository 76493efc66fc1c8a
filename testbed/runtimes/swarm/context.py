"""State of one run in the `swarm` runtime: the nodes, their engines, and the specifications of what to
launch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import docker

from agents.mqtt.topics import AGGREGATOR
from testbed.broker import BROKER
from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.plan import cpuset
from testbed.plan.agent_configs import RunSpec
from testbed.plan.planned_devices import SHARES_OF_A_PROCESS, weight_alone
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.containers import COMPONENT_LABEL, Container, ContainerLaunch, CpuLimits
from testbed.runtimes.docker.running_containers import ContainerRef
from testbed.runtimes.docker.specifications import INFRASTRUCTURE_WEIGHT
from testbed.runtimes.docker.specifications import object_name as object_name_of
from testbed.runtimes.swarm import services
from testbed.runtimes.swarm.engine_proxies import EngineProxies
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
