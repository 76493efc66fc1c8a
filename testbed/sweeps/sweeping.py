"""Run the cells of a sweep that are not done yet.

`index.json` in the sweep's folder has one entry per cell, by the cell's fingerprint: the run, and how it
ended. The folder also keeps the sweep's file and topology (`keep_sweep`). If a cell has several finished
runs, one of them counts, and the others are moved to the folder `earlier`.

Runs in virtual time are executed in parallel, in one process each. Other runs are executed one after the
other, because each of them needs the host's cores for itself; on a cluster, a host runs one emulated
cell at a time. If a run is not valid, it is repeated after the other runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agents.disk import files
from agents.events import COMPLETE
from agents.texts import quantity
from testbed import console
from testbed.errors import BadInputError
from testbed.fidelity.validity import Validity
from testbed.host.processes import uninterrupted
from testbed.plan import Plan
from testbed.plan.costs import step_time, step_work_key, with_step_time
from testbed.plan.machines import Measurements
from testbed.run import preparing
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.sweeps import LOCK, Sweep, SweepCell, clusters, keep_sweep
from testbed.sweeps.clusters.remote import ClusterPool
from testbed.sweeps.worker import CellOutcome, CellPool, WorkerPool, execute
from testbed.topology import Virtual

_MAX_BYTES = 256 * 2**20
ReportLine = Callable[[str], object]
MeasuredCosts = dict[str, Virtual]
"""Measurements of earlier runs, for runs in virtual time. `_step_key` and `_protocol_key` make the
keys."""
_PROTOCOL = ("mask_time", "share_time", "answer_time")
_IDLE_SECONDS = 5.0
"""Seconds without the end of a cell, after which a reason for the delay is reported."""


@dataclass(slots=True)
class Index:
    """Index of the cells that are done or running, as in `index.json`. Each change is saved
    immediately."""

    folder: Path
    cells: dict[str, dict[str, Any]]
    """Entries of the cells, by fingerprint.

    Each entry has the keys `cell`, `changes`, `run`, and `outcome` (None while the run is executed).
    Three further keys exist only in some entries:

    - `error`: the error with which the run failed.
    - `tries`: the number of ended runs, if the cell has been repeated.
    - `instead_of`: the entry of the earlier run, while the cell is repeated. The earlier run counts
      until the repeat has ended.
    """

    @classmethod
    def read(cls, folder: Path) -> Index:
        path = folder / "index.json"
        try:
            cells = files.from_json(files.read(path, _MAX_BYTES))["cells"]
            if not all(isinstance(entry, dict) for entry in cells.values()):
                raise TypeError("a cell is not a mapping")
            return cls(folder, cells)
        except FileNotFoundError:
            return cls(folder, {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInputError(f"{path} is not the index of a sweep ({error}): remove it") from error

    def finished_run(self, cell: SweepCell) -> RunDirectory | None:
        entry = self.cells.get(cell.fingerprint, {})
        directory = self._directory(entry)
        done = entry.get("outcome") in COMPLETE and directory.manifest.is_file()
        return directory if done else None

    def tries(self, cell: SweepCell) -> int:
        """Number of ended runs. The cell must be done."""
        return int(self.cells[cell.fingerprint].get("tries", 1))

    def must_repeat(self, cell: SweepCell, repeats: int) -> bool:
        """A cell has to be repeated if it is done, its run is not valid, and it has been repeated fewer
        than `repeats` times."""
        directory = self.finished_run(cell)
        if directory is None or cell.plan.traits.simulated or self.tries(cell) > repeats:
            return False
        return (directory.read_manifest().get("validity") or {}).get("valid") is False

    def recover(self) -> None:
        """The original runs of interrupted repeats count again."""
        for fingerprint in [key for key, entry in self.cells.items() if "instead_of" in entry]:
            self.drop(fingerprint)

    def begin(self, cell: SweepCell) -> RunDirectory:
        """Make a run directory. If the cell is done, its finished run is kept. Otherwise its unfinished
        run is removed."""
        done = self.finished_run(cell) is not None
        if not done:
            self.drop(cell.fingerprint)
        directory = RunDirectory.new(self.folder, cell.topology.name)
        changes = {change.path: change.value for change in cell.changes}
        entry = {"cell": cell.name, "changes": changes, "run": directory.run, "outcome": None}
        if done:
            entry["instead_of"] = self.cells[cell.fingerprint]
        self.cells[cell.fingerprint] = entry
        self._save()
        directory.write_manifest(
            run=directory.run, label=cell.label, variant=cell.variant, changes=changes
        )
        return directory

    def end(self, cell: SweepCell, result: CellOutcome) -> None:
        """Record how the run of `cell` ended.

        If the run is a repeat, and does not fail, it replaces the earlier run. If the repeat fails, the
        earlier run still counts. The run that does not count is moved to the folder `earlier`.
        """
        entry = self.cells[cell.fingerprint] | {"outcome": result.reason}
        if result.error is not None:
            entry["error"] = result.error
        if (before := entry.pop("instead_of", None)) is not None:
            tries = before.get("tries", 1) + 1
            entry, other = (entry, before) if entry["outcome"] in COMPLETE else (before, entry)
            entry["tries"] = tries
            earlier = self.folder / "earlier"
            earlier.mkdir(exist_ok=True)
            self._directory(other).path.rename(earlier / str(other["run"]))
            self._directory(entry).write_manifest(repeats=tries - 1)
        self.cells[cell.fingerprint] = entry
        self._save()

    def drop(self, fingerprint: str) -> None:
        """Delete the unfinished run's directory, too."""
        entry = self.cells.pop(fingerprint, None)
        if entry is None:
            return
        if "instead_of" in entry:
            self.cells[fingerprint] = entry["instead_of"]
        directory = self._directory(entry)
        if directory.manifest.is_file():  # else it is not a run directory
            shutil.rmtree(directory.path, ignore_errors=True)
        self._save()

    def _directory(self, entry: dict[str, Any]) -> RunDirectory:
        return RunDirectory(self.folder / Path(str(entry.get("run"))).name)

    def _save(self) -> None:
        with files.atomic_write(self.folder / "index.json") as path:
            path.write_text(json.dumps({"cells": self.cells}, indent=2) + "\n", encoding="utf-8")


def run(
    sweep: Sweep,
    options: Options,
    folder: Path,
    jobs: int | None = None,
    report: ReportLine = lambda _: None,
    on: str = clusters.LOCAL,
    measured: Mapping[str, Virtual] = MappingProxyType({}),
) -> list[RunDirectory]:
    """Run the cells of `sweep` that are not done. Return the directories of all cells that are done
    afterwards.

    `jobs`: number of parallel runs in virtual time; None for one per core. On a cluster, `jobs` is the
    maximum number of cells that are submitted at a time; None for as many as keep all workers busy.
    `on`: cluster that runs the cells (`clusters.parse`). `measured`: durations to use in place of
    measurements, by the names of cells. Call this function from the main thread.

    Raises HostError, before anything is run, if this host does not meet the requirements of a cell.
    Raises HostError if a worker of a cluster is not fit for the sweep, or if the cluster fails. If a
    cell fails, the failure is reported, and the other cells continue. At the end, runs that are not
    valid are repeated, as often as `sweep` allows. On an interrupt, unfinished runs are ended and
    removed, and finished runs are kept.
    """
    with _sweep_lock(folder):
        index = Index.read(folder)
        index.recover()
        cells = _each_once(sweep.cells, report)
        for hint in dict.fromkeys(hint for cell in cells for hint in cell.topology.fleet.hints):
            report(hint)
        todo = [cell for cell in cells if index.finished_run(cell) is None]
        if done := len(cells) - len(todo):
            report(f"{done} of {quantity(len(cells), 'run')} done already, in {folder}")
        target = clusters.parse(on)
        to_repeat = [cell for cell in cells if index.must_repeat(cell, sweep.repeat_invalid)]
        if target is None or not (todo or to_repeat):
            cluster = None
            for cell in {cell.plan.runtime: cell for cell in todo}.values():
                preparing.check_host(cell.topology, cell.plan)
        else:
            cluster = ClusterPool(target, folder, jobs)
        virtual = [cell for cell in todo if cell.plan.traits.simulated]
        emulated = [cell for cell in todo if not cell.plan.traits.simulated]
        runner = _Runner(index, options, report, len(todo), _measured_costs(cells, index, measured))
        with cluster or nullcontext():
            if cluster is not None:
                cluster.check(emulated=bool(emulated or to_repeat))
            keep_sweep(sweep, folder)
            runner.simulate(virtual, jobs, cluster)
            runner.emulate(emulated, cluster)
            while again := [cell for cell in cells if index.must_repeat(cell, sweep.repeat_invalid)]:
                runner.count += len(again)
                for cell in again:
                    tries = f"try {index.tries(cell) + 1} of at most {sweep.repeat_invalid + 1}"
                    report(f"{cell.name} is repeated, because its run is not valid: {tries}")
                    if cluster is None:
                        runner.run_in_process(cell, lambda message: report(f"      {message}"))
                if cluster is not None:
                    runner.emulate(again, cluster)
        found = map(index.finished_run, cells)
        return [directory for directory in found if directory is not None]


def _each_once(cells: Iterable[SweepCell], report: ReportLine) -> list[SweepCell]:
    """If several cells are the same run, keep only the first cell, and report the others."""
    first: dict[str, SweepCell] = {}
    told: set[tuple[str, str]] = set()
    for cell in cells:
        same = first.setdefault(cell.fingerprint, cell)
        if (pair := (cell.label, same.label)) not in told and cell.label != same.label:
            told.add(pair)
            report(f"{cell.label} is the same run as {same.label}: it runs once, as {same.label}")
    return list(first.values())


def _summary(result: CellOutcome) -> str:
    if result.error is not None:
        return f"failed: {result.error}"
    accuracy, loss = result.accuracy, result.loss
    quality = "never evaluated" if loss is None else f"loss {loss:.4g}"
    if accuracy is not None:
        quality = f"accuracy {accuracy:.1%}"
    validity = Validity.from_dict(result.validity)
    doubts = [f"\n      not valid: {reason}" for reason in validity.reasons]
    doubts += [f"\n      not judged: {what}" for what in validity.unjudged]
    return f"{quality} ({result.seconds:.1f} s){''.join(doubts)}"


@dataclass(slots=True)
class _Runner:
    index: Index
    options: Options
    report: ReportLine
    count: int
    """Number of cells to run."""
    measured: MeasuredCosts
    _ended: int = 0
    _begun: float = field(default_factory=time.monotonic)

    def simulate(
        self, cells: Sequence[SweepCell], jobs: int | None, cluster: ClusterPool | None
    ) -> None:
        """Run `cells` in virtual time on `cluster`; None for this host. On this host, `jobs` cells run
        in parallel; None for one per core.

        If the step time of a task has to be measured, the first cell of the task measures it, and the
        other cells use the result. Separate measurements would differ, so that the runs could not be
        compared. The costs of an exchange between clients are shared in the same way.

        Cells that measure run first and one at a time, because a step takes up to a fifth longer while
        other runs use the host.
        """
        measuring: dict[str, SweepCell] = {}
        for cell in cells:
            for work in _costs_to_measure(cell):
                if work not in self.measured:
                    measuring.setdefault(work, cell)
        first = {cell.fingerprint: cell for cell in measuring.values()}
        alone = list(first.values())
        others = [cell for cell in cells if cell.fingerprint not in first]
        count = min(jobs or len(os.sched_getaffinity(0)), len(cells))
        with nullcontext(cluster) if cluster else closing(WorkerPool(count)) as workers:
            for part in (*([cell] for cell in alone), others):
                if cluster or count > 1:
                    self._side_by_side(workers, part)
                else:
                    for cell in part:
                        self.run_in_process(cell, lambda _: None)
                self.measured = _measured_costs(alone, self.index) | self.measured

    def emulate(self, cells: Sequence[SweepCell], cluster: ClusterPool | None) -> None:
        """`cluster`: None for this host, one after the other."""
        if cluster is not None:
            self._side_by_side(cluster, cells)
            return
        for cell in cells:
            self.report(f"{cell.name} begins")
            self.run_in_process(cell, lambda message: self.report(f"      {message}"))

    def run_in_process(self, cell: SweepCell, report: ReportLine) -> None:
        directory = self.index.begin(cell)
        try:
            result = execute(cell.topology, self._timed_plan(cell), directory, self.options, report)
        except BaseException:
            with uninterrupted():
                self.index.drop(cell.fingerprint)
            raise
        self._end(cell, result)

    def _side_by_side(self, workers: CellPool, cells: Iterable[SweepCell]) -> None:
        """Each cell starts when a worker is free."""
        root = self.options.data_root
        options = replace(self.options, data_root=None if root is None else root.resolve())
        waiting = iter(cells)
        unfinished: dict[str, SweepCell] = {}
        running: dict[Future[CellOutcome], SweepCell] = {}
        reported: str | None = None
        try:
            while True:
                for cell in islice(waiting, max(0, workers.count - len(running))):
                    directory = self.index.begin(cell)
                    unfinished[cell.fingerprint] = cell
                    preparing.write_inputs(cell.topology, self._timed_plan(cell), directory)
                    ready = replace(options, runtime=cell.plan.runtime)
                    running[workers.submit(cell.topology, directory, ready)] = cell
                if not running:
                    return
                done = wait(running, _IDLE_SECONDS, return_when=FIRST_COMPLETED).done
                reason = None if done else workers.idle_reason()
                if reason is not None and reason != reported:
                    self.report(reason)
                reported = reason
                for ended in done:
                    cell = running.pop(ended)
                    del unfinished[cell.fingerprint]
                    self._end(cell, ended.result())
        finally:
            if unfinished:
                with uninterrupted():
                    workers.close()  # first, so that none writes to a directory that is removed
                    for fingerprint in unfinished:
                        self.index.drop(fingerprint)

    def _end(self, cell: SweepCell, result: CellOutcome) -> None:
        self._ended += 1
        with uninterrupted():
            self.index.end(cell, result)
        left = console.time_left(time.monotonic() - self._begun, self._ended, self.count)
        following = f"; {left}" if left else ""
        self.report(f"{self._ended:4} of {self.count}  {cell.name}: {_summary(result)}{following}")

    def _timed_plan(self, cell: SweepCell) -> Plan:
        """Use the durations that another cell has measured."""
        virtual = cell.plan.virtual
        for work in _costs_to_measure(cell):
            if (other := self.measured.get(work)) is None:
                continue
            if work == _protocol_key(cell):
                virtual = virtual.with_defaults((name, getattr(other, name)) for name in _PROTOCOL)
            elif (step := step_time(other)) is not None:
                virtual = with_step_time(virtual, step)
        return cell.plan if virtual == cell.plan.virtual else cell.plan.with_measurements(virtual)


def _costs_to_measure(cell: SweepCell) -> Iterator[str]:
    """Yield one key for each duration that `cell` has to measure on this host, for a run in virtual
    time."""
    plan = cell.plan
    if not plan.traits.simulated:
        return
    if plan.measures_steps:
        yield _step_key(cell)
    lacks = None in [getattr(plan.virtual, name) for name in _PROTOCOL]
    if cell.topology.has_exchange and plan.simulates_packets and lacks:
        yield _protocol_key(cell)


def _protocol_key(cell: SweepCell) -> str:
    """Equal for cells with equal costs of the exchange between clients."""
    return repr((_task(cell), cell.topology.task.frozen, cell.topology.secure))


def _task(cell: SweepCell) -> tuple[Any, ...]:
    code = cell.topology.user_code
    return cell.topology.task.named, None if code is None else code.digest


def _step_key(cell: SweepCell) -> str:
    """Equal for cells whose training steps do the same work."""
    return repr((_task(cell), step_work_key(cell.plan.devices[0].local)))


def _measured_costs(
    cells: Iterable[SweepCell], index: Index, given: Mapping[str, Virtual] = MappingProxyType({})
) -> MeasuredCosts:
    """`given`: by the names of cells; these win over what finished runs have measured."""
    measuring = [cell for cell in cells if any(_costs_to_measure(cell))]
    done = [(cell, index.finished_run(cell)) for cell in measuring]
    known = {
        work: given[cell.name]
        for cell in reversed(measuring)
        if cell.name in given
        for work in _costs_to_measure(cell)
    }
    return {
        work: Measurements.read(directory.path).virtual
        for cell, directory in reversed(done)
        if directory is not None
        for work in _costs_to_measure(cell)
    } | known


@contextmanager
def _sweep_lock(folder: Path) -> Iterator[None]:
    """No other process runs a sweep in this folder meanwhile. Raises BadInputError if another process
    has the lock, or if `folder` is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise BadInputError(
            f"cannot write to {folder} ({error.strerror}); name another folder with --runs"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(f"another sweep runs in {folder}: wait until it has ended") from None
        yield
