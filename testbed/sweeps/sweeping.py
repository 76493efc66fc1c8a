"""Runs the cells of a sweep that are not done yet, and keeps an index of them in the sweep's folder.

`index.json` there has, by each cell's fingerprint, its run and how that ended. Runs in virtual time are
parallel, a process each; containers and local processes need the host's cores for themselves. A run that
is not valid is repeated, after the others; what does not count of these runs is in the folder `earlier`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from agents.disk import files
from agents.events import COMPLETE
from agents.texts import quantity
from testbed import console
from testbed.errors import BadInputError
from testbed.fidelity.validity import Validity
from testbed.host.signals import uninterrupted
from testbed.plan import Plan
from testbed.plan.costs import step_time, step_work, timed
from testbed.plan.measured import Measured
from testbed.run import planning, preparing
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.sweeps import Cell, Sweep
from testbed.sweeps.worker import CellOutcome, Workers, execute
from testbed.topology import Virtual

_MAX_BYTES = 256 * 2**20
"""Of `index.json`."""
ReportLine = Callable[[str], object]
MeasuredCosts = dict[str, Virtual]
"""Of the runs that measured on this host what virtual time needs, by `_step_work`, `_protocol_work`."""
_PROTOCOL = ("mask_time", "share_time", "answer_time")


@dataclass(slots=True)
class Index:
    """Which cells are done, in `index.json`, which is written at every change."""

    folder: Path
    cells: dict[str, dict[str, Any]]
    """By fingerprint: `cell`, `changes`, `run`, `outcome` (None while it runs), `error`. Of a cell that
    was repeated: `tries`, how many runs of it have ended. While it is repeated: `instead_of`, the entry
    that counts until then."""

    @classmethod
    def read(cls, folder: Path) -> Index:
        path = folder / "index.json"
        try:
            cells = files.from_json(files.read(path, _MAX_BYTES))["cells"]
            if not all(isinstance(entry, dict) for entry in cells.values()):
                raise TypeError("a cell is no map")
            return cls(folder, cells)
        except FileNotFoundError:
            return cls(folder, {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInputError(f"{path} is no index of a sweep ({error}): remove it") from error

    def run_of(self, cell: Cell) -> RunDirectory | None:
        """The directory of the finished run of `cell`; None where there is none."""
        entry = self.cells.get(cell.fingerprint, {})
        directory = self._directory(entry)
        done = entry.get("outcome") in COMPLETE and directory.manifest.is_file()
        return directory if done else None

    def tries(self, cell: Cell) -> int:
        """How many runs of `cell` have ended, of a cell that is done."""
        return int(self.cells[cell.fingerprint].get("tries", 1))

    def to_repeat(self, cell: Cell, repeats: int) -> bool:
        """Whether `cell` is done, but its run is not valid, and was not repeated `repeats` times yet."""
        directory = self.run_of(cell)
        if directory is None or cell.plan.traits.simulated or self.tries(cell) > repeats:
            return False
        return (directory.read_manifest().get("validity") or {}).get("valid") is False

    def recover(self) -> None:
        """Drop repetitions that were cut short: the runs that they were to replace count again."""
        for fingerprint in [key for key, entry in self.cells.items() if "instead_of" in entry]:
            self.drop(fingerprint)

    def begin(self, cell: Cell) -> RunDirectory:
        """A run directory for `cell`, beside the one that it has if it is done; what another attempt has
        left is removed."""
        done = self.run_of(cell) is not None
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

    def end(self, cell: Cell, result: CellOutcome) -> None:
        """Note how the run of `cell` ended. Of a repetition and the run before it, the repetition counts
        unless it failed; the other is moved to the folder `earlier`."""
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
        """Forget the cell's unfinished run, and remove its directory."""
        entry = self.cells.pop(fingerprint, None)
        if entry is None:
            return
        if "instead_of" in entry:
            self.cells[fingerprint] = entry["instead_of"]
        directory = self._directory(entry)
        if directory.manifest.is_file():  # else it is none of ours
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
) -> list[RunDirectory]:
    """Run the cells of `sweep` that are not done, `jobs` at a time in virtual time (None: one per core);
    return the directories of all that are done then. Call it from the main thread.

    Raises HostError before all if this host would refuse one of the cells. A cell that fails is
    reported, and the others go on. After them, runs that are not valid are repeated, as often as `sweep`
    allows. When interrupted, unfinished runs are ended and removed; what is finished stays.
    """
    with _alone(folder):
        index = Index.read(folder)
        index.recover()
        cells = _each_once(sweep.cells, report)
        for hint in dict.fromkeys(
            hint for cell in cells for hint in (*cell.topology.hints, *cell.plan.hints)
        ):
            report(hint)
        todo = [cell for cell in cells if index.run_of(cell) is None]
        for plan in {cell.plan.runtime: cell.plan for cell in todo}.values():
            planning.check_host(plan)
        if done := len(cells) - len(todo):
            report(f"{done} of {quantity(len(cells), 'run')} there already, in {folder}")
        virtual = [cell for cell in todo if cell.plan.traits.simulated]
        runner = _Runner(index, options, report, len(todo), _measured(cells, index))
        runner.simulate(virtual, min(jobs or len(os.sched_getaffinity(0)), len(virtual)))
        for cell in todo:
            if not cell.plan.traits.simulated:
                report(f"{cell.name} begins")
                runner.run_here(cell, lambda message: report(f"      {message}"))
        while again := [cell for cell in cells if index.to_repeat(cell, sweep.repeat_invalid)]:
            runner.count += len(again)
            for cell in again:
                tries = f"try {index.tries(cell) + 1} of at most {sweep.repeat_invalid + 1}"
                report(f"{cell.name} begins again, as its run is not valid: {tries}")
                runner.run_here(cell, lambda message: report(f"      {message}"))
        found = map(index.run_of, cells)
        return [directory for directory in found if directory is not None]


def _each_once(cells: Iterable[Cell], report: ReportLine) -> list[Cell]:
    """Of cells that are the same run the first one. Reports whose runs have no row of their own."""
    first: dict[str, Cell] = {}
    told: set[tuple[str, str]] = set()
    for cell in cells:
        same = first.setdefault(cell.fingerprint, cell)
        if (pair := (cell.label, same.label)) not in told and cell.label != same.label:
            told.add(pair)
            report(f"{cell.label} asks for the same run as {same.label}: it is done once, as that")
    return list(first.values())


def _summary(result: CellOutcome) -> str:
    if result.error is not None:
        return f"failed: {result.error}"
    accuracy, loss = result.accuracy, result.loss
    quality = "never evaluated" if loss is None else f"loss {loss:.4g}"
    if accuracy is not None and accuracy == accuracy:
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
    """Of cells to run."""
    measured: MeasuredCosts
    _ended: int = 0
    _begun: float = field(default_factory=time.monotonic)

    def simulate(self, cells: Sequence[Cell], jobs: int) -> None:
        """Run `cells` in virtual time, side by side where `jobs` are more than one.

        Of the cells whose step has to be measured, the first of a task is measured, and the others take
        its figure: measured anew for each, it would differ, and the runs would not compare. So it is
        with what secure aggregation costs. Those that measure go first and one by one: beside other runs
        a step takes up to a fifth more.
        """
        measuring: dict[str, Cell] = {}
        for cell in cells:
            for work in _works(cell):
                if work not in self.measured:
                    measuring.setdefault(work, cell)
        first = {cell.fingerprint: cell for cell in measuring.values()}
        alone = list(first.values())
        others = [cell for cell in cells if cell.fingerprint not in first]
        with Workers(jobs, self.options.data_root) as workers:
            for part in (*([cell] for cell in alone), others):
                if jobs > 1:
                    self._side_by_side(workers, part)
                for cell in part if jobs == 1 else ():
                    self.run_here(cell, lambda _: None)
                self.measured = _measured(alone, self.index) | self.measured

    def run_here(self, cell: Cell, report: ReportLine) -> None:
        """Run `cell` in this process."""
        directory = self.index.begin(cell)
        try:
            result = execute(cell.topology, self._timed(cell), directory, self.options, report)
        except BaseException:
            with uninterrupted():
                self.index.drop(cell.fingerprint)
            raise
        self._end(cell, result)

    def _side_by_side(self, workers: Workers, cells: Iterable[Cell]) -> None:
        """Run `cells`; a cell begins when a worker is free."""
        waiting = iter(cells)
        unfinished: dict[str, Cell] = {}
        running: dict[Future[CellOutcome], Cell] = {}
        try:
            while True:
                for cell in islice(waiting, workers.count - len(running)):
                    directory = self.index.begin(cell)
                    unfinished[cell.fingerprint] = cell
                    preparing.write(cell.topology, self._timed(cell), directory)
                    running[workers.submit(directory.path)] = cell
                if not running:
                    return
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    cell = running.pop(ended)
                    del unfinished[cell.fingerprint]
                    self._end(cell, ended.result())
        finally:
            if unfinished:
                with uninterrupted():
                    workers.close()  # so that none writes to a directory that is removed
                    for fingerprint in unfinished:
                        self.index.drop(fingerprint)

    def _end(self, cell: Cell, result: CellOutcome) -> None:
        self._ended += 1
        with uninterrupted():
            self.index.end(cell, result)
        left = console.time_left(time.monotonic() - self._begun, self._ended, self.count)
        following = f"; {left}" if left else ""
        self.report(f"{self._ended:4} of {self.count}  {cell.name}: {_summary(result)}{following}")

    def _timed(self, cell: Cell) -> Plan:
        """The plan of `cell`, with what another cell has measured."""
        virtual = cell.plan.virtual
        for work in _works(cell):
            if (other := self.measured.get(work)) is None:
                continue
            if work == _protocol_work(cell):
                virtual = virtual.filled((name, getattr(other, name)) for name in _PROTOCOL)
            elif (step := step_time(other)) is not None:
                virtual = timed(virtual, step)
        return cell.plan if virtual == cell.plan.virtual else cell.plan.with_measured(virtual)


def _works(cell: Cell) -> Iterator[str]:
    """What has to be measured on this host for `cell`, in virtual time."""
    plan = cell.plan
    if not plan.traits.simulated:
        return
    if plan.measures_steps:
        yield _step_work(cell)
    lacks = None in [getattr(plan.virtual, name) for name in _PROTOCOL]
    if cell.topology.secure is not None and plan.packets and lacks:
        yield _protocol_work(cell)


def _protocol_work(cell: Cell) -> str:
    """The same for cells in which secure aggregation costs the same."""
    return repr((_task(cell), cell.topology.task.frozen, cell.topology.secure))


def _task(cell: Cell) -> tuple[Any, ...]:
    code = cell.topology.own_code
    return cell.topology.task.named, None if code is None else code.digest


def _step_work(cell: Cell) -> str:
    """The same for cells whose step is the same work."""
    return repr((_task(cell), step_work(cell.plan.devices[0].local)))


def _measured(cells: Iterable[Cell], index: Index) -> MeasuredCosts:
    """What finished runs of `cells` have measured."""
    done = [(cell, index.run_of(cell)) for cell in cells if any(_works(cell))]
    return {
        work: Measured.read(directory.path).virtual
        for cell, directory in reversed(done)
        if directory is not None
        for work in _works(cell)
    }


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within it no other process runs a sweep in `folder`. Raises BadInputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise BadInputError(
            f"cannot write to {folder} ({error.strerror}); name another folder with --runs"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(f"another sweep runs in {folder}: wait for its end") from None
        yield
