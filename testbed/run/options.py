"""Options of a run that are not in the topology."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """From the command line or from Python."""

    runtime: str | None = None
    oversubscribe: bool = False
    """Whether devices may request more CPU than the host has."""
    data_root: Path | None = None
    """None to download the datasets."""
    resume: bool = False
    """Whether to resume an earlier run. The resumed run uses the directory of the earlier run."""
    dashboard: int | None = None
    """0 for any free port; None for no dashboard."""
    metrics: int | None = None
    """0 for any free port; None for no metrics."""
    track: tuple[str, ...] = ()
    """Experiment trackers (`testbed.tracking`) that get the run's records."""
    nodes: Path | None = None
    """File that describes the machines; None for the existing machines."""
    verbose: bool = False
