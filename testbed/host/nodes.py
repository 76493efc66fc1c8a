"""Nodes: several machines on which devices are placed, of the Docker Swarm that this machine's engine
manages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from testbed.errors import HostError

if TYPE_CHECKING:
    import docker

NOT_A_MANAGER = "this machine's engine manages no Swarm"
MAKE_ONE = "docker swarm init"
LEAST_ENGINE = 20, 10
"""Lowest version whose services can have capabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of several machines on which devices are placed."""

    id: str
    """Id in the Swarm."""
    name: str
    """Host name. A number is appended if several nodes have the same name."""
    cores: int
    memory: int
    """Total bytes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Set by the Swarm's administrator."""
    engine: str = ""
    """Version of Docker; empty if unknown."""
    core: float | None = None
    """Speed of a core, relative to a core of this machine. An unknown speed is assumed to be 1."""
    cpus: tuple[int, ...] = ()
    """CPUs that a run may use; empty if unknown, and then assumed to count from 0."""
    here: bool = False
    """Whether the node is this machine, which runs broker and aggregator."""


def manages_swarm(info: Mapping[str, Any]) -> bool:
    """`info`: from `docker info`."""
    return bool(info.get("Swarm", {}).get("ControlAvailable"))


def swarm_nodes(client: docker.DockerClient) -> list[Node]:
    """Return those that accept work now: first this machine, then the others by name. Raises
    HostError."""
    from testbed.host import docker_engine  # imports the Docker SDK, which takes half a second

    try:
        info = client.info()
        if not manages_swarm(info):
            raise HostError(f"{NOT_A_MANAGER}. To make it a manager: {MAKE_ONE}")
        found = ready_nodes(client.api.nodes(), info["Swarm"]["NodeID"])
    except docker_engine.ERRORS as error:
        raise HostError(f"the Docker engine could not list the nodes of its Swarm: {error}") from error
    # Engines report only the number of CPUs. Which CPUs a run may use is known only for this machine.
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return [replace(node, cpus=cpus, cores=len(cpus)) if node.here else node for node in found]


def local_swarm_nodes() -> list[Node]:
    """Return those that accept work now. Raises HostError."""
    from testbed.host import docker_engine

    with closing(docker_engine.connect()) as client:
        return swarm_nodes(client)


def ready_nodes(found: list[dict[str, Any]], own: str) -> list[Node]:
    """`found`: in the engine's format. `own`: id of this node."""
    ready = [
        Node(
            id=one["ID"],
            name=one["Description"]["Hostname"],
            cores=one["Description"]["Resources"]["NanoCPUs"] // 10**9,
            memory=one["Description"]["Resources"]["MemoryBytes"],
            labels=one["Spec"].get("Labels") or {},
            engine=one["Description"]["Engine"]["EngineVersion"],
            here=one["ID"] == own,
        )
        for one in found
        if one["Status"]["State"] == "ready" and one["Spec"]["Availability"] == "active"
    ]
    return _with_unique_names(sorted(ready, key=lambda node: (not node.here, node.name, node.id)))


def _with_unique_names(found: list[Node]) -> list[Node]:
    names = [node.name for node in found]
    counts: dict[str, int] = {}
    apart = []
    for node in found:
        counts[node.name] = counts.get(node.name, 0) + 1
        number = f"-{counts[node.name]}" if names.count(node.name) > 1 else ""
        apart.append(replace(node, name=f"{node.name}{number}"))
    return apart
