"""Many runs: a sweep from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.texts import quantity
from testbed.api import results
from testbed.api.running import read
from testbed.api.topology_input import data_root, plain
from testbed.errors import BadInputError, RunFailedError
from testbed.run.options import Options
from testbed.traits import RUNTIMES, is_simulated, refuse_simulated

if TYPE_CHECKING:
    import pandas as pd

    from analysis.agreement import Agreement
    from analysis.load import Run as Result
    from testbed.sweeps import Sweep


@dataclass(frozen=True)
class SweepResult:
    folder: Path
    """Of the run directories, and the index by which the next call finds what is done."""
    paths: tuple[Path, ...]
    """The directories of the runs that are done, in the order of the sweep."""
    failed: int
    """How many are not."""
    target: float | None
    """The accuracy whose cost `table` gives, as the sweep names it; None: it names none."""

    @cached_property
    def runs(self) -> tuple[Result, ...]:
        """Those that are done, as tables, all at once. Raises BadInputError where one is damaged."""
        return tuple(map(read, self.paths))

    def table(self, target: float | None = None) -> pd.DataFrame:
        """What an accuracy of `target` (None: the sweep's, else the highest that all runs of a task
        reached) cost each configuration, over its seeds: what `testbed compare` prints, as numbers.

        A row for each, with the fields of `analysis.comparison.Row`; of an interval such as `time`
        (s) the columns `time_mean`, `time_low` and `time_high`.
        """
        import pandas as pd

        tasks = results.compare([*map(results.read_slim, self.paths)], target or self.target)
        table = pd.json_normalize([asdict(row) for rows in tasks for row in rows], sep="_")
        return table.drop(columns=table.filter(regex="_count$").columns)


def sweep(
    study: str | Path | Mapping[str, Any],
    *,
    runtime: str | None = None,
    jobs: int | None = None,
    data: str | Path | None = None,
    oversubscribe: bool = False,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
    name: str | None = None,
) -> SweepResult:
    """Run a sweep, a file or a mapping with its keys, and wait for its end; what is done already is not
    run again.

    `topology` in a mapping is a path from the working directory. `name` (None: the file's; a mapping's
    is `sweep`) is that of the folder in `runs`. In virtual time `jobs` runs go side by side (None: one
    per core), emulated ones one after the other. `on_progress` is called with a line for each. A run
    that fails does not stop the others. Ctrl-C in the main thread ends the runs that go on, and keeps
    what is done. Raises BadInputError.
    """
    from testbed import sweeps
    from testbed.sweeps import sweeping

    options = Options(runtime, oversubscribe, data_root(data))
    if isinstance(study, Mapping):
        name, told = name or "sweep", name or "sweep"
        planned = sweeps.of(plain(study), name, Path(), options)
    else:
        told = str(study)
        planned = sweeps.load(Path(study), options)
    folder = Path(runs) / (name or planned.name)
    on_progress(f"{told}: {quantity(len(planned.cells), 'run')}, into {folder}")
    done = sweeping.run(planned, options, folder, jobs, on_progress)
    failed = len({cell.fingerprint for cell in planned.cells}) - len(done)
    return SweepResult(folder, tuple(one.path for one in done), failed, planned.target)


@dataclass(frozen=True, slots=True)
class AgreeResult:
    agreement: Agreement
    """Ranks, times and Kendall's tau-b."""
    target: float
    """The accuracy whose time ranks."""
    runtime: str
    """The real one."""
    real: tuple[Result, ...]
    """Its runs."""
    folder: Path


def agree(
    study: str | Path,
    *,
    runtime: str = "auto",
    jobs: int | None = None,
    data: str | Path | None = None,
    oversubscribe: bool = False,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
) -> AgreeResult:
    """Run a sweep's file in virtual time and in the real `runtime`: whether both rank its configurations
    alike. The others as of `sweep`. Raises BadInputError, RunFailedError where a run failed."""
    from analysis import agreement, comparison
    from testbed import sweeps

    refuse_simulated(runtime)
    file, root = Path(study), data_root(data)
    simulator = next(filter(is_simulated, RUNTIMES))
    both = [Options(simulator, data_root=root), Options(runtime, oversubscribe, root)]
    studies = [sweeps.load(file, options) for options in both]  # and all that is wrong with either
    labels = [cell.label for cell in studies[0].cells]
    if len(set(labels)) < 2:
        raise BadInputError(
            f"{file} has one configuration, {labels[0]}, and so nothing to rank: "
            "add variants, or a grid of more than seeds"
        )
    cells = [cell.topology for cell in studies[0].cells]
    if len({(cell.task.name, repr(cell.task.data), cell.evaluate.on) for cell in cells}) > 1:
        raise BadInputError(
            f"{file} has several tasks, or datasets, and accuracies on them do not compare: "
            "make a sweep for each"
        )
    folder = Path(runs) / studies[0].name
    virtual, real = (
        _accurate(file, planned, options, folder, jobs, on_progress)
        for planned, options in zip(studies, both, strict=True)
    )
    target = studies[0].target or comparison.common_target([*virtual, *real])
    if target is None:
        least = comparison.percent(comparison.TARGETS[0])
        raise BadInputError(f"{file}: no run reached an accuracy of {least}: add a `target` below it")
    found = agreement.agreement(agreement.times(labels, virtual, real, target))
    return AgreeResult(found, target, studies[1].cells[0].plan.runtime, tuple(real), folder)


def _accurate(
    file: Path,
    study: Sweep,
    options: Options,
    folder: Path,
    jobs: int | None,
    report: Callable[[str], object],
) -> list[Result]:
    """The run of each cell of `study`, in order. Raises BadInputError where none has an accuracy."""
    from testbed.sweeps import sweeping

    runtime = study.cells[0].plan.runtime
    report(f"{file}: {quantity(len(study.cells), 'run')} ({runtime}), into {folder}")
    done = sweeping.run(study, options, folder, jobs, report)
    if missing := len({cell.fingerprint for cell in study.cells}) - len(done):
        failed = quantity(missing, "run")
        raise RunFailedError(f"{failed} failed; `testbed agree {file}` makes what is left")
    index = sweeping.Index.read(folder)
    found = [read(one.path) for one in map(index.run_of, study.cells) if one is not None]
    if not any(run.evaluations["accuracy"].notna().any() for run in found):
        raise BadInputError(f"{file}: no run has a test accuracy, by which it could be ranked")
    return found
