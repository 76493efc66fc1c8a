"""Runs sweeps of the topologies in topologies/papers, and reads what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from analysis.load import Run, load
from testbed import sweeps
from testbed.errors import RunFailedError
from testbed.run.up import Options
from testbed.sweeps import sweeping

TOPOLOGIES = Path(__file__).parents[2] / "topologies" / "papers"


class Setting(NamedTuple):
    """What tells a run of a sweep from the others."""

    variant: str
    lr: float
    """Of `task.local`."""
    seed: int


class Bench:
    def __init__(self, folder: Path, data_root: Path | None, say: Callable[[str], None]) -> None:
        """`folder`: of the runs, a folder in it for each sweep; runs that it holds are not repeated."""
        self._folder = folder
        self._options = Options(data_root=data_root)
        self._say = say
        self._began = time.monotonic()
        self.runs = 0
        """Done so far, in all."""

    def run(self, name: str, study: Mapping[str, Any]) -> dict[Setting, Run]:
        """The runs of a sweep, described as in its file. Raises TestbedError, also if a run fails."""
        read = sweeps.of(study, name, TOPOLOGIES, self._options)
        self._say(f"{name}: {len(read.cells)} runs")
        done = sweeping.run(read, self._options, self._folder / name, report=self._say)
        if failed := len(read.cells) - len(done):
            raise RunFailedError(f"{failed} of {len(read.cells)} runs of {name} failed")
        self.runs += len(done)
        found = [load(directory.path) for directory in done]
        return {_setting(run): run for run in found}

    @property
    def elapsed(self) -> str:
        """Such as `3 min 10 s`."""
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        return f"{minutes} min {seconds} s"


def _setting(run: Run) -> Setting:
    variant = run.manifest["variant"]
    return Setting(variant, run.topology["task"]["local"]["lr"], run.topology["seed"])
