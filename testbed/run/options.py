"""Options of a run that are not in the topology."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run, from the command line or from Python."""

    runtime: str | None = None
    """Runtime to use in place of the topology's; None to use the topology's."""
    oversubscribe: bool = False
    """Whether devices may request more CPU than the host has."""
    data_root: Path | None = None
    """Folder of the datasets; None to download them."""
    resume: bool = False
    """Whether to resume an earlier run. The resumed run uses the directory of the earlier run."""
    dashboard: int | None = None
    """Port of the dashboard, 0 for any free port; None for no dashboard."""
    metrics: int | None = None
    """Port of the Prometheus metrics, 0 for any free port; None for no metrics."""
    track: tuple[str, ...] = ()
    """Experiment trackers (`testbed.tracking`) that get the run's records."""
    nodes: Path | None = None
    """File that describes the machines to plan for; None for the existing machines."""
    verbose: bool = False
    """Whether clients log each round."""
