"""A node: one of several machines on which devices are placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
