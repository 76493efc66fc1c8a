"""What the parts of one run on a Swarm share: its nodes, their engines, and what runs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docker

from testbed.plan.agent_configs import RunSpec
from testbed.runtimes import executor, swarm_executor
from testbed.runtimes.containers import Launch
from testbed.runtimes.doors import Doors
from testbed.runtimes.launch import name_of
from testbed.runtimes.services import Volume, short


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
        self, expected: Mapping[str, int], parts: Mapping[str, str]
    ) -> dict[str, list[dict[str, Any]]]:
        """See `swarm_executor.running`; `parts` are the names of the services."""
        return swarm_executor.running(
            self.manager,
            expected,
            lambda service: parts[service],
            lambda node: self.names.get(node, node),
        )

    def addresses(self, node: str) -> dict[str, str]:
        """On the bridge of `node`, by container."""
        found = executor.addresses(self.doors.engines[node], short(self.named("data")))
        return {container: address for container, (_, address) in found.items()}
