"""What a user chooses for a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses for a run beside its topology."""

    runtime: str | None = None
    """Overrides the topology's runtime."""
    oversubscribe: bool = False
    data_root: Path | None = None
    resume: bool = False
    """Continue an earlier run in its directory."""
    dashboard: int | None = None
    """The port of the page to show it on, 0 for a free one; None: no page."""
    metrics: int | None = None
    """The same for the Prometheus metrics."""
    track: tuple[str, ...] = ()
    """Experiment trackers (`testbed.tracking`) that are told of it."""
    nodes: Path | None = None
    """File that describes the machines to plan for; None: those that there are."""
    verbose: bool = False
    """Have clients log each round."""
