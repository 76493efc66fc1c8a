"""Find and load finished runs. The module does not import what starts runs, which takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import reading_run
from testbed.rundir.directory import RunDirectory, find_run

if TYPE_CHECKING:
    from analysis.load import Run as Result


def read(path: Path) -> Result:
    """Raises BadInputError."""
    from analysis import load

    with reading_run(path):
        return load.load(path)


def locate(run: str, runs: Path) -> RunDirectory:
    """Errors are those of `testbed.run.live_runs.locate`."""
    if (found := find_run(run, runs)) is not None:
        return found
    from testbed.run import live_runs

    return live_runs.locate(run, runs)
