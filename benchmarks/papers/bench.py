"""Run an experiment: the sweep in its file.

The first seed chooses each rule's step size; the other seeds compare the rules, also with step sizes
that are nearly as good. For a claim on tolerance, three seeds run the whole grid. Finished runs in the
experiment's folder are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.load import load
from benchmarks.papers import honest, judging, results
from benchmarks.papers.experiments import MEASURES, TOLERATED, Experiment
from benchmarks.papers.results import Cell, Result
from testbed import sweeps
from testbed.errors import BadInputError, RunFailedError
from testbed.run.options import Options
from testbed.sweeps import sweeping
from testbed.topology import yamlfile

SWEEPS = Path(__file__).parents[2] / "topologies" / "papers" / "sweeps"
LR = "task.local.lr"


class Bench:
    def __init__(
        self,
        folder: Path,
        data_root: Path | None,
        say: Callable[[str], None],
        *,
        files: Path = SWEEPS,
        jobs: int | None = None,
    ) -> None:
        """`folder`: folder of the runs, with one folder per experiment. `files`: folder of the sweeps.
        `jobs`: number of parallel runs; None: one per core."""
        self._folder, self._files, self._jobs = folder, files, jobs
        self._options = Options(data_root=data_root)
        self._say = say

    def run(self, experiment: Experiment) -> Result:
        """Run the experiment. Raises TestbedError, also if a run fails."""
        study, grid = self._study(experiment)
        first, *others = grid["seed"]
        whole = any(claim.figure == "tolerance" for claim in experiment.claims)
        found = self._tuned(experiment, study, grid["seed"][: honest.SEEDS] if whole else [first])
        chosen = results.of_runs(tuple(cell for cell in found if cell.seed == first))
        near = {variant: judging.steps(experiment, chosen, variant) for variant in study["variants"]}
        if others:
            found += self._cells(experiment, study, near, others, experiment.runtime)
        return results.of_runs(tuple({(c.variant, c.lr, c.seed): c for c in found}.values()))

    def _tuned(
        self, experiment: Experiment, study: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[Cell]:
        """Run `seeds` until each rule's best step size with the first seed is inside its grid. If there
        are several seeds, also until with each of them the largest tolerated step size is."""
        given = tuple(study["grid"][LR])
        found: list[Cell] = []
        wanted = dict.fromkeys(study["variants"], given)
        while wanted:
            found += self._cells(experiment, study, wanted, seeds, "virtual")
            done, wanted = results.of_runs(tuple(found)), {}
            for variant in study["variants"]:
                tried = [done.of_seed(variant, s, MEASURES[experiment.figure].choice) for s in seeds]
                further = [honest.step_to_try(tried[0], len(given))]
                if len(seeds) > 1:
                    further += [honest.step_beyond(one, len(given), TOLERATED) for one in tried]
                if (step := next((step for step in further if step is not None), None)) is not None:
                    wanted[variant] = (step,)
        return found

    def so_far(self, experiment: Experiment) -> Result | None:
        """Return the result of the finished runs of the sweep, as its file is now, with all step sizes
        that were tried; None if there are none. Raises BadInputError."""
        study, grid = self._study(experiment)
        index = sweeping.Index.read(self._folder / experiment.name)
        tried = {entry["changes"][LR] for entry in index.cells.values()}
        if not tried:
            return None
        runtimes = sorted({"virtual", experiment.runtime})
        read = self._sweep(experiment, study, study["variants"], tried, grid["seed"], runtimes)
        done = [run for run in map(index.finished_run, read.cells) if run is not None]
        cells = [results.measured(load(run.path), experiment.target) for run in done]
        return results.of_runs(tuple(cells)) if cells else None

    def _study(self, experiment: Experiment) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Read the sweep from its file; return it and its grid. Raises BadInputError."""
        path = self._files / experiment.file
        study = yamlfile.read(path).data
        grid = study.get("grid", {})
        for key in ("seed", LR):
            if not grid.get(key):
                raise BadInputError(f"{path}: grid has no {key}, expected a list such as [1, 2, 3, 4]")
        if list(grid["seed"]) != sorted(grid["seed"]):
            raise BadInputError(
                f"{path}: grid.seed: expected ascending, as the first chooses step sizes"
            )
        return study, grid

    def _cells(
        self,
        experiment: Experiment,
        study: Mapping[str, Any],
        steps: Mapping[str, tuple[float, ...]],
        seeds: Iterable[int],
        runtime: str,
    ) -> list[Cell]:
        """Run `steps` (variant -> step sizes) with each of `seeds`, all in one sweep; return their
        figures."""
        tried = sorted({step for own in steps.values() for step in own})
        read = self._sweep(experiment, study, steps, tried, seeds, [runtime])
        wanted = tuple(cell for cell in read.cells if _step(cell) in steps[cell.variant])
        read = replace(read, cells=wanted)
        self._say(f"{experiment.name}: {len(read.cells)} runs")
        done = sweeping.run(read, self._options, self._folder / experiment.name, self._jobs, self._say)
        if failed := len(read.cells) - len(done):
            raise RunFailedError(f"{failed} of {len(read.cells)} runs of {experiment.name} failed")
        return [results.measured(load(run.path), experiment.target) for run in done]

    def _sweep(
        self,
        experiment: Experiment,
        study: Mapping[str, Any],
        variants: Iterable[str],
        steps: Iterable[float],
        seeds: Iterable[int],
        runtimes: Iterable[str],
    ) -> sweeps.Sweep:
        """Return that part of `study` as a sweep."""
        given = {LR: list(steps), "seed": list(seeds), "runtime.name": list(runtimes)}
        part = {
            **study,
            "variants": {variant: study["variants"][variant] for variant in variants},
            "grid": {**study["grid"], **given},
        }
        return sweeps.from_mapping(part, experiment.name, self._files, self._options)


def _step(cell: sweeps.SweepCell) -> float:
    """Return the step size of the cell."""
    return float({change.path: change.value for change in cell.changes}[LR])
