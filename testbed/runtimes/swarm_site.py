"""What the parts of one run on a Swarm share: its nodes, their engines, and what runs there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import docker

from agents.topics import AGGREGATOR
from testbed.broker import BROKER
from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.plan import cpuset
from testbed.plan.agent_configs import RunSpec
from testbed.runtimes import executor, swarm_executor
from testbed.runtimes.containers import PART_LABEL, Container, CpuLimits, Launch
from testbed.runtimes.doors import Doors
from testbed.runtimes.launch import DEVICES_WEIGHT, INFRASTRUCTURE_WEIGHT, name_of
from testbed.runtimes.services import Placed, Volume, short

_SINGLE, _MOST = 1024, 262_144
"""CPU weight of a single process, and the most that a container can have."""
_OF_A_CORE = 10_000
"""CPU weight of a device with a whole core, among others of its run."""
INFRASTRUCTURE_PER_CORE = round(INFRASTRUCTURE_WEIGHT * _SINGLE)
"""CPU weight of what is no device of the run's, by itself."""


@dataclass(frozen=True, slots=True)
class At:
    """Where a container is."""

    engine: docker.DockerClient
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    manager: docker.DockerClient
    names: Mapping[str, str]
    """Of the nodes, by id."""
    spec: RunSpec
    launch: Launch
    base: str
    """Image of what is no agent."""
    labels: Mapping[str, str]
    """Of all that is the run's."""
    doors: Doors
    ids: dict[str, str] = field(default_factory=dict)
    """Of images, by tag, that all nodes have: of these no engine asks a registry."""

    def create(self, container: Container, at: Placed) -> str:
        """Create the service of `container`; return its id."""
        image = self.ids.get(container.image, container.image)
        return swarm_executor.create(self.manager, replace(container, image=image), at)

    def named(self, what: str) -> str:
        """Name of an object of the run."""
        return name_of(self.spec.directory.run, what)

    def volume(self, what: str, target: str, *, read_only: bool = False) -> Volume:
        """A volume of the run, on each node where it is used."""
        return Volume(short(self.named(what)), target, read_only)

    def on(self, node: str) -> list[str]:
        """The devices of a node."""
        plan = self.spec.plan
        return [device.name for device in plan.devices if plan.placement[device.name] == node]

    def located(self, task: Mapping[str, Any]) -> At:
        """Where the container of a task is."""
        engine = self.doors.engines[task["NodeID"]]
        return At(engine, task["Status"]["ContainerStatus"]["ContainerID"])

    def running(
        self, expected: Mapping[str, int], parts: Mapping[str, str], earlier: Collection[str] = ()
    ) -> dict[str, list[dict[str, Any]]]:
        """See `swarm_executor.running`; `parts` are the names of the services."""
        return swarm_executor.running(
            self.manager,
            expected,
            lambda service: parts[service],
            self.names,
            earlier,
        )

    @contextmanager
    def asking(self, node: str) -> Iterator[None]:
        """Inside, the engine of `node` is asked. Raises HostError where it does not answer."""
        try:
            yield
        except docker_engine.ERRORS as error:
            self.doors.lost.add(node)
            name = self.names.get(node, node)
            raise HostError(f"the node {name} does not answer any more: {error}") from error

    def addresses(self, node: str) -> dict[str, str]:
        """On the bridge of `node`, by container."""
        found = executor.addresses(self.doors.engines[node], short(self.named("data")))
        return {container: address for container, (_, address) in found.items()}

    def serve(self, node: str) -> None:
        """Keep what serves the devices of `node` on the CPUs that are for it: all that runs there now
        and is neither a device nor a server of the run."""
        planned = next(one for one in self.spec.plan.nodes if one.id == node)
        limits = CpuLimits(cpus=cpuset(planned.infrastructure), weight=INFRASTRUCTURE_PER_CORE)
        engine, run = self.doors.engines[node], self.spec.directory.run
        others = {*(device.name for device in self.spec.plan.devices), BROKER, AGGREGATOR}
        for container in executor.containers(engine, run):
            if container["Labels"][PART_LABEL] not in others:
                executor.limit(engine, container["Id"], limits)


def by_itself(limits: CpuLimits) -> CpuLimits:
    """`limits` of a device that is in no group of the run's: its own weight, against all that is not of
    the run, is its part of what the group's would be."""
    if limits.weight is None:
        return limits
    weight = round(limits.weight * DEVICES_WEIGHT * _SINGLE / _OF_A_CORE)
    return replace(limits, weight=min(_MOST, weight))
