"""Runs the cells of a sweep that are not done yet, and keeps account of them in the sweep's folder.

`index.json` there has, by each cell's fingerprint, its run and how that ended. Runs in virtual time go
side by side, a process each; containers and local processes want the host's cores for themselves.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents import files
from testbed import topology
from testbed.errors import BadInputError
from testbed.host.signals import uninterrupted
from testbed.run import up
from testbed.run.live_runs import COMPLETE
from testbed.rundir.directory import RunDirectory, new_run_id
from testbed.sweep import Cell, Sweep
from testbed.sweep.worker import execute
from testbed.sweep.workers import Workers
from testbed.topology import Topology

ReportLine = Callable[[str], None]
StepTimes = dict[str, float | None]
"""Seconds of a step, by what its work is (`_work`)."""


@dataclass(slots=True)
class Index:
    """Which cells are done; written at every change."""

    folder: Path
    cells: dict[str, dict[str, Any]]
    """By fingerprint: `cell`, `run`, `outcome` (None while it runs), `error`."""

    @classmethod
    def read(cls, folder: Path) -> Index:
        path = folder / "index.json"
        try:
            return cls(folder, json.loads(path.read_text(encoding="utf-8"))["cells"])
        except FileNotFoundError:
            return cls(folder, {})
        except (ValueError, KeyError, TypeError) as error:
            raise BadInputError(f"{path} is no index of a sweep ({error}): remove it") from error

    def run_of(self, cell: Cell) -> RunDirectory | None:
        """The directory of the finished run of `cell`; None where there is none."""
        entry = self.cells.get(cell.fingerprint, {})
        directory = RunDirectory(self.folder / str(entry.get("run")))
        done = entry.get("outcome") in COMPLETE and directory.manifest.is_file()
        return directory if done else None

    def begin(self, cell: Cell, run: str) -> None:
        """`cell` is to be `run`; what an earlier attempt has left goes."""
        self.drop(cell)
        self._write(cell, run=run, outcome=None)

    def end(self, cell: Cell, outcome: str, error: str | None = None) -> None:
        result = {"error": error} if error else {}
        self._write(cell, run=self.cells[cell.fingerprint]["run"], outcome=outcome, **result)

    def drop(self, cell: Cell) -> None:
        """Forget an unfinished run of `cell`, and remove its directory."""
        entry = self.cells.pop(cell.fingerprint, None)
        if entry is None:
            return
        directory = self.folder / Path(str(entry["run"])).name
        if (directory / "manifest.json").is_file():  # else it is none of ours
            shutil.rmtree(directory, ignore_errors=True)
        self._save()

    def _write(self, cell: Cell, **entries: Any) -> None:
        changes = {change.path: change.value for change in cell.changes}
        self.cells[cell.fingerprint] = {"cell": cell.name, "changes": changes, **entries}
        self._save()

    def _save(self) -> None:
        with files.whole(self.folder / "index.json") as path:
            path.write_text(json.dumps({"cells": self.cells}, indent=2) + "\n", encoding="utf-8")


def run(
    sweep: Sweep,
    options: up.Options,
    folder: Path,
    jobs: int | None = None,
    report: ReportLine = lambda _: None,
) -> list[RunDirectory]:
    """Run what is not done of `sweep`, `jobs` at a time in virtual time (None: one per core); the
    directories of all that is. Call it from the main thread.

    A cell that fails is reported, and the others go on. When interrupted, the runs that were going are
    ended and removed; what is finished stays.
    """
    with _alone(folder):
        index = Index.read(folder)
        cells = list({cell.fingerprint: cell for cell in sweep.cells}.values())
        todo = [cell for cell in cells if index.run_of(cell) is None]
        if done := len(cells) - len(todo):
            report(f"{done} of {len(cells)} runs are there already, in {folder}")
        virtual = [cell for cell in todo if cell.plan.traits.simulated]
        tracker = _Tracker(index, len(todo), report)
        jobs = min(jobs or len(os.sched_getaffinity(0)), len(virtual))
        _simulate(virtual, _measured(cells, index), options, jobs, tracker)
        for cell in todo:
            if not cell.plan.traits.simulated:
                tracker.report(f"{cell.name} begins")
                _here(cell, options, tracker, lambda message: tracker.report(f"      {message}"), {})
        found = map(index.run_of, cells)
        return [directory for directory in found if directory is not None]


@dataclass(slots=True)
class _Tracker:
    """Tracker of cells that begin and end, which also reports them."""

    index: Index
    count: int
    """Of cells to run."""
    report: ReportLine
    _ended: int = 0

    def begin(self, cell: Cell) -> RunDirectory:
        """Make the run directory of `cell`."""
        run = new_run_id(cell.topology.name)
        self.index.begin(cell, run)
        directory = RunDirectory.create(self.index.folder, run)
        directory.write_manifest(run=run, label=cell.label, variant=cell.variant, changes=_plain(cell))
        return directory

    def end(self, cell: Cell, result: dict[str, Any]) -> None:
        self._ended += 1
        self.index.end(cell, result["outcome"], result.get("error"))
        self.report(f"{self._ended:4} of {self.count}  {cell.name}: {_words(result)}")


def _plain(cell: Cell) -> dict[str, Any]:
    return {change.path: change.value for change in cell.changes}


def _words(result: dict[str, Any]) -> str:
    if result["outcome"] == "failed":
        return f"failed: {result['error']}"
    accuracy, loss = result["accuracy"], result["loss"]
    quality = "never evaluated" if loss is None else f"loss {loss:.4g}"
    if accuracy is not None and accuracy == accuracy:
        quality = f"accuracy {accuracy:.1%}"
    doubts = "".join(f"\n      not valid: {reason}" for reason in result["doubts"])
    return f"{quality} ({result['seconds']:.1f} s){doubts}"


def _here(
    cell: Cell, options: up.Options, tracker: _Tracker, report: ReportLine, measured: StepTimes
) -> None:
    """Run `cell` in this process."""
    directory = tracker.begin(cell)
    try:
        result = execute(_timed(cell, measured), cell.plan, directory, options, report)
    except BaseException:
        with uninterrupted():
            tracker.index.drop(cell)
        raise
    tracker.end(cell, result)


def _simulate(
    cells: Sequence[Cell], measured: StepTimes, options: up.Options, jobs: int, tracker: _Tracker
) -> None:
    """Run `cells` in virtual time, side by side where `jobs` are more than one.

    Of those whose step has to be measured, the first of a task does so, and the others take its figure:
    measured anew for each, it would differ, and the runs would not compare.
    """
    seen = set(measured)
    now: list[Cell] = []
    later: list[Cell] = []
    for cell in cells:
        (later if _measures(cell) and _work(cell) in seen - measured.keys() else now).append(cell)
        seen.add(_work(cell))
    with Workers(jobs, options.data_root) as workers:
        for part in (now, later):
            if jobs > 1:
                _side_by_side(workers, part, tracker, measured)
            for cell in part if jobs == 1 else ():
                _here(cell, options, tracker, lambda _: None, measured)
            measured = _measured(now, tracker.index) | measured


def _side_by_side(
    workers: Workers, cells: Iterable[Cell], tracker: _Tracker, measured: StepTimes
) -> None:
    going: dict[Path, Cell] = {}

    def directories() -> Iterator[Path]:
        for cell in cells:
            directory = tracker.begin(cell)
            going[directory.path] = cell
            directory.topology.write_text(_timed(cell, measured).to_yaml(), encoding="utf-8")
            yield directory.path

    try:
        for path, result in workers.run(directories()):
            tracker.end(going.pop(path), result)
    finally:
        if going:
            with uninterrupted():
                workers.close()  # so that none writes to a directory that goes
                for cell in going.values():
                    tracker.index.drop(cell)


def _measures(cell: Cell) -> bool:
    """Whether virtual time has to measure how long a step of it takes here."""
    shares = any(d.cpu is not None and d.gflops is None for d in cell.plan.devices)
    return cell.plan.traits.simulated and shares and cell.topology.runtime.step_time is None


def _work(cell: Cell) -> str:
    """The same for cells whose step is the same work."""
    local = cell.plan.devices[0].local
    return repr((cell.topology.task.named, replace(local, lr=0.0, steps=None, epochs=None)))


def _measured(cells: Iterable[Cell], index: Index) -> StepTimes:
    """What finished runs of `cells` have measured."""
    done = [(cell, index.run_of(cell)) for cell in cells if _measures(cell)]
    return {
        _work(cell): topology.load(directory.topology).runtime.step_time
        for cell, directory in reversed(done)
        if directory is not None
    }


def _timed(cell: Cell, measured: StepTimes) -> Topology:
    """The topology of `cell`, with the time of a step that another cell has measured."""
    step_time = measured.get(_work(cell)) if _measures(cell) else None
    if step_time is None:
        return cell.topology
    runtime = cell.topology.runtime.model_copy(update={"step_time": step_time})
    return cell.topology.model_copy(update={"runtime": runtime})


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, no other process runs a sweep in `folder`. Raises BadInputError."""
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
