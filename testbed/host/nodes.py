"""A machine among several that devices are placed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    id: str
    name: str
    """Its host name; with a number after it where others have the same."""
    cores: int
    memory: int
    """Bytes, in use or not."""
    labels: Mapping[str, str] = field(default_factory=dict)
    engine: str = ""
    """Version of its engine."""
    core: float | None = None
    """How fast one of its cores is, in cores of this machine; None: not known, and as fast."""
    cpus: tuple[int, ...] = ()
    """Numbers of its CPUs that a run may use; none: not known, and counted from 0."""
    here: bool = False
    """Whether it is this machine, on which broker and aggregator are."""
