"""A node: one of several machines on which devices are placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of several machines on which devices are placed."""

    id: str
    """Id of the node in the Swarm."""
    name: str
    """Host name. A number is appended if several nodes have the same name."""
    cores: int
    """Number of cores."""
    memory: int
    """Total memory in bytes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the Swarm's administrator has set."""
    engine: str = ""
    """Version of the node's Docker engine; empty if unknown."""
    core: float | None = None
    """Speed of a core of the node, relative to a core of this machine; None if unknown. An unknown speed
    is assumed to be 1."""
    cpus: tuple[int, ...] = ()
    """Numbers of the CPUs that a run may use; empty if unknown. Unknown numbers are assumed to count
    from 0."""
    here: bool = False
    """Whether the node is this machine, which runs broker and aggregator."""
