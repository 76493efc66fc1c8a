"""What the modules of the `swarm` runtime share about one run: its nodes, their engines, and what is
launched there."""

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
from testbed.runtimes.docker.specifications import INFRASTRUCTURE_WEIGHT, name_of
from testbed.runtimes.swarm import services
from testbed.runtimes.swarm.engine_proxies import EngineProxies
from testbed.runtimes.swarm.services import ServiceOptions, Volume, short

INFRASTRUCTURE_PER_CORE = round(INFRASTRUCTURE_WEIGHT * SHARES_OF_A_PROCESS)
"""CPU weight of what is no device of the run's, by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmContext:
    """Of one run."""

    manager: docker.DockerClient
    names: Mapping[str, str]
    """Of the nodes, by id."""
    spec: RunSpec
    launch: ContainerLaunch
    base: str
    """Image of the node agents."""
    labels: Mapping[str, str]
    """Of all that is the run's."""
    proxies: EngineProxies
    ids: dict[str, str] = field(default_factory=dict)
    """Of the images that all nodes have, by tag: an engine asks no registry for an image's id."""

    def create(self, container: Container, options: ServiceOptions) -> str:
        """Create the service of `container`; return its id."""
        image = self.ids.get(container.image, container.image)
        return services.create(self.manager, replace(container, image=image), options)

    def named(self, what: str) -> str:
        """Name of an object of the run."""
        return name_of(self.spec.directory.run, what)

    def volume(self, what: str, target: str, *, read_only: bool = False) -> Volume:
        """A volume of the run, on each node where it is used."""
        return Volume(short(self.named(what)), target, read_only)

    def devices_on(self, node: str) -> list[str]:
        """The devices of a node."""
        plan = self.spec.plan
        return [device.name for device in plan.devices if plan.placement[device.name] == node]

    def container_of(self, task: Mapping[str, Any]) -> ContainerRef:
        """The container of a task."""
        engine = self.proxies.engines[task["NodeID"]]
        return ContainerRef(engine, task["Status"]["ContainerStatus"]["ContainerID"])

    def running(
        self, expected: Mapping[str, int], components: Mapping[str, str], earlier: Collection[str] = ()
    ) -> dict[str, list[dict[str, Any]]]:
        """See `services.running`; `components` are the names of the services."""
        return services.running(
            self.manager,
            expected,
            lambda service: components[service],
            self.names,
            earlier,
        )

    @contextmanager
    def requests_to(self, node: str) -> Iterator[None]:
        """For requests to the engine of `node`. Raises HostError where it does not answer."""
        try:
            yield
        except docker_engine.ERRORS as error:
            self.proxies.unreachable.add(node)
            name = self.names.get(node, node)
            raise HostError(f"the node {name} does not answer any more: {error}") from error

    def addresses(self, node: str) -> dict[str, str]:
        """IPv4 addresses on the bridge of `node`, by container."""
        found = executor.addresses(self.proxies.engines[node], short(self.named("data")))
        return {container: address for container, (_, address) in found.items()}

    def pin_infrastructure(self, node: str) -> None:
        """Keep the run's infrastructure on `node` on the CPUs that the plan has for it: all its
        containers that run there now, but for devices, broker and aggregator."""
        planned = next(one for one in self.spec.plan.nodes if one.id == node)
        limits = CpuLimits(cpus=cpuset(planned.infrastructure), weight=INFRASTRUCTURE_PER_CORE)
        engine, run = self.proxies.engines[node], self.spec.directory.run
        others = {*(device.name for device in self.spec.plan.devices), BROKER, AGGREGATOR}
        for container in executor.containers(engine, run):
            if container["Labels"][COMPONENT_LABEL] not in others:
                executor.limit(engine, container["Id"], limits)


def without_group(limits: CpuLimits) -> CpuLimits:
    """`limits` of a device that is in no control group of the run's."""
    return limits if limits.weight is None else replace(limits, weight=weight_alone(limits.weight))
