"""Run the benchmark: choose each rule's step size under each condition, then compare the rules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from analysis import metrics
from analysis.load import Run, load
from benchmarks.rules.definition import Benchmark, Condition
from benchmarks.rules.results import Cell
from testbed import sweeps
from testbed.errors import RunFailedError
from testbed.host.processes import uninterrupted
from testbed.run.options import Options
from testbed.sweeps import clusters, sweeping

Trial = tuple[str, float, int]
"""Rule, step size and seed of a run."""
Keep = Callable[[list[Cell]], object]


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

    def run(
        self,
        condition: Condition,
        rules: Iterable[str],
        known: Iterable[Cell] = (),
        keep: Keep = lambda _: None,
    ) -> list[Cell]:
        """Run `rules` under `condition`; return the cells of all runs. Finished runs are not repeated,
        nor those of the cells `known`. `keep` is called with the cells of finished runs, also when this
        is interrupted.

        Every rule has the same budget: the task's step sizes, and the two beside the best one, on the
        seed that chooses. The seeds that compare run with the best step size. Raises TestbedError.
        """
        seeds = self._benchmark.file.seeds
        given = self._benchmark.file.tasks[condition.task].steps
        cells = {(cell.rule, cell.step, cell.seed): cell for cell in known}

        def add(trials: Iterable[Trial]) -> list[Cell]:
            trials = list(trials)
            if missing := [trial for trial in trials if trial not in cells]:
                for cell in self._cells(condition, missing, keep):
                    cells[cell.rule, cell.step, cell.seed] = cell
            return [cells[trial] for trial in trials]

        tuned = add((rule, step, seeds.tune) for rule in rules for step in given)
        best = chosen(tuned)
        tuned += add((rule, step, seeds.tune) for rule in rules for step in neighbours(best[rule].step))
        best = chosen(tuned)
        compared = add((rule, best[rule].step, seed) for rule in rules for seed in seeds.compare)
        return [*tuned, *compared]

    def _cells(self, condition: Condition, trials: list[Trial], keep: Keep) -> list[Cell]:
        benchmark = self._benchmark
        asked = {f"{rule} {step:g} #{seed}": (rule, step, seed) for rule, step, seed in trials}
        variants = {
            name: {**benchmark.changes(condition, rule, step), "seed": seed}
            for name, (rule, step, seed) in asked.items()
        }
        name = condition.name
        study = {"topology": benchmark.topology(condition.task).name, "variants": variants}
        sweep = sweeps.from_mapping(study, name, benchmark.folder, self._options)
        self._say(f"{name}: {len(sweep.cells)} runs")
        folder = self._folder / name
        found: list[Cell] = []
        try:
            sweeping.run(sweep, self._options, folder, self._jobs, self._say, self._on)
        finally:
            with uninterrupted():
                index = sweeping.Index.read(folder)
                for cell in sweep.cells:
                    if (directory := index.finished_run(cell)) is not None:
                        rule, step, _ = asked[cell.variant]
                        run = load(directory.path)
                        found.append(measured(run, benchmark, condition, rule, step))
                keep(found)
        if failed := len(trials) - len(found):
            raise RunFailedError(f"{failed} of {len(trials)} runs of {name} failed")
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
        joules=cost.others["energy"],
        accuracy=accuracy,
        events=events_digest(run.path / "events.jsonl"),
        torch=str(run.manifest["versions"]["torch"]),
    )


def events_digest(path: Path) -> str:
    """Return digits of the SHA-256 of a run's events. The first one, which has the date, is left out, so
    that runs in virtual time with the same events have the same digest."""
    with path.open("rb") as file:
        file.readline()
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
