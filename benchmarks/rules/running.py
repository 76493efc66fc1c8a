"""Run the benchmark: choose each rule's step size under each condition, then compare the rules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from analysis import metrics
from analysis.load import Run, load
from benchmarks.rules.definition import Benchmark, Condition
from benchmarks.rules.results import Cell
from testbed import sweeps
from testbed.errors import RunFailedError
from testbed.run.options import Options
from testbed.sweeps import clusters, sweeping

Trials = Mapping[str, Iterable[float]]
"""Step sizes to run, by rule."""


class Runner:
    def __init__(
        self,
        benchmark: Benchmark,
        folder: Path,
        data_root: Path | None,
        say: Callable[[str], object],
        *,
        jobs: int | None = None,
        on: str = clusters.LOCAL,
    ) -> None:
        """`folder`: folder of the runs, with one folder per condition. `jobs`, `on`: as in
        `testbed sweep`."""
        self._benchmark, self._folder, self._say = benchmark, folder, say
        self._options = Options(data_root=data_root)
        self._jobs, self._on = jobs, on

    def run(self, condition: Condition, rules: Iterable[str]) -> list[Cell]:
        """Run `rules` under `condition`; return the cells of all runs. Finished runs are not repeated.

        Every rule has the same budget: the task's step sizes, and the two beside the best one, on the
        seed that chooses. The seeds that compare run with the best step size. Raises TestbedError.
        """
        seeds = self._benchmark.file.seeds
        given = self._benchmark.file.tasks[condition.task].steps
        cells = self._cells(condition, dict.fromkeys(rules, given), [seeds.tune])
        beside = {rule: neighbours(best.step) for rule, best in chosen(cells).items()}
        cells += self._cells(condition, beside, [seeds.tune])
        best = {rule: [cell.step] for rule, cell in chosen(cells).items()}
        return cells + self._cells(condition, best, seeds.compare)

    def _cells(self, condition: Condition, trials: Trials, seeds: Iterable[int]) -> list[Cell]:
        benchmark = self._benchmark
        runs = [(rule, step) for rule, steps in trials.items() for step in steps]
        variants = {f"{rule} {step:g}": benchmark.changes(condition, rule, step) for rule, step in runs}
        name = f"{condition.task}-{condition.fleet}-{condition.skew}"
        study = {
            "topology": benchmark.topology(condition.task).name,
            "variants": variants,
            "grid": {"seed": list(seeds)},
        }
        sweep = sweeps.from_mapping(study, name, benchmark.folder, self._options)
        self._say(f"{name}: {len(sweep.cells)} runs")
        folder = self._folder / name
        done = sweeping.run(sweep, self._options, folder, self._jobs, self._say, self._on)
        if failed := len(sweep.cells) - len(done):
            raise RunFailedError(f"{failed} of {len(sweep.cells)} runs of {name} failed")
        asked = {f"{rule} {step:g}": (rule, step) for rule, step in runs}
        found = []
        for directory in done:
            run = load(directory.path)
            rule, step = asked[str(run.manifest["variant"])]
            found.append(measured(run, benchmark, condition, rule, step))
        return found


def neighbours(step: float) -> tuple[float, float]:
    """Return the step sizes that are tried beside `step`: 0.033 and 0.33 beside 0.1."""
    return float(f"{step / 3:.2g}"), float(f"{step * 10 / 3:.2g}")


def chosen(cells: Iterable[Cell]) -> dict[str, Cell]:
    """Return the best cell of each rule, of cells with the same seed."""
    best: dict[str, Cell] = {}
    for cell in cells:
        if cell.rule not in best or cell.order < best[cell.rule].order:
            best[cell.rule] = cell
    return best


def measured(run: Run, benchmark: Benchmark, condition: Condition, rule: str, step: float) -> Cell:
    """Return the figures of `run`. It has reached the target if its final accuracy has."""
    target = benchmark.file.tasks[condition.task].target
    accuracy = metrics.final(run, "accuracy")
    has_reached = accuracy >= target
    cost = metrics.reached(run, target) if has_reached else metrics.observed(run)
    return Cell(
        version=benchmark.version,
        task=condition.task,
        fleet=condition.fleet,
        skew=condition.skew,
        rule=rule,
        step=step,
        seed=int(run.topology["seed"]),
        reached=has_reached,
        seconds=metrics.crossed(run, "accuracy", target) if has_reached else cost.time,
        updates=cost.updates,
        bytes=cost.bytes,
        joules=cost.energy,
        accuracy=accuracy,
        events=events_digest(run.path / "events.jsonl"),
    )


def events_digest(path: Path) -> str:
    """Return digits of the SHA-256 of a run's events. The first one, which has the date, is left out, so
    that runs in virtual time with the same events have the same digest."""
    with path.open("rb") as file:
        file.readline()
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
