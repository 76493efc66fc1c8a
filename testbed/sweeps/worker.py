"""Run cells of a sweep: in this process, or in worker processes.

A worker (`python -m testbed.sweeps.worker PIPE`) receives `CellOrder`s. For each order, the worker runs
the topology in the order's run directory, and answers with the fields of a CellOutcome. The worker ends
when the pipe is closed.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, Self

import msgspec

from agents import events
from agents.disk import files
from agents.disk.files import Checksum
from testbed.data import data_files, datasets
from testbed.errors import TestbedError
from testbed.fidelity.validity import Judgement, Validity
from testbed.host import processes, programs
from testbed.host.processes import uninterrupted
from testbed.plan import Plan
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology
from testbed.view import View

# Files that a cell reads and that are not sent to a worker of a cluster: the data, and the files that
# the topology names. Each worker has them on its own disk, or on a shared file system.
#
# The worker compares their checksums with the checksums of the files of the machine that runs the sweep.

_CHUNK = 2**20


class NeededFile(msgspec.Struct, frozen=True):
    path: str
    """Absolute path; for a file in the data root, relative to it."""
    in_data_root: bool
    checksum: int


def find_needed(topology: Topology, data_root: Path | None) -> tuple[NeededFile, ...]:
    """`data_root`: folder of the datasets. Data that is downloaded from the hub is left out. Raises
    BadInputError, OSError."""
    found = [_needed(Path(path), None) for path in _named_files(topology)]
    chosen = datasets.source(topology)
    if isinstance(chosen, datasets.Columns):
        with datasets.located_errors(topology):
            splits = data_files.local_splits(chosen.data, data_root)
        root = None if chosen.data.path is not None else data_root
        found += [_needed(path, root) for path in (splits.files if splits else ())]
    return tuple(found)


def problem_of_needed(needed: Iterable[NeededFile], data_root: Path | None) -> str | None:
    """`data_root`: as in `find_needed`, on this machine."""
    for one in needed:
        if one.in_data_root and data_root is None:
            return (
                "has no data: copy the data to the same folder there, or start the worker with "
                "TESTBED_DATA=FOLDER"
            )
        path = (data_root or Path()) / one.path if one.in_data_root else Path(one.path)
        try:
            same = _checksum(path.resolve()) == one.checksum
        except OSError as error:
            return f"cannot read {path} ({error.strerror}): copy the file to that folder there"
        if not same:
            return f"has another content in {path} than this machine: copy the file there"
    return None


def local_data_root(data_root: Path | None) -> Path | None:
    """The folder `data_root` if this machine has it, otherwise the folder in the environment variable
    TESTBED_DATA, if it exists."""
    if data_root is not None and data_root.is_dir():
        return data_root
    own = os.environ.get("TESTBED_DATA")
    return Path(own) if own and Path(own).is_dir() else None


def _named_files(topology: Topology) -> Iterator[str]:
    """The user's code is left out, because it is sent to the worker, and so are data files, because the
    data's format says which are read."""
    keys = topology.model_dump(mode="json", exclude={"code": True, "task": {"data"}})
    # Reading a topology makes all paths in it absolute.
    yield from sorted({text for text in _strings(keys) if text[:1] == "/" and os.path.isfile(text)})  # noqa: PTH113


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _needed(path: Path, root: Path | None) -> NeededFile:
    name = str(path.absolute() if root is None else path.relative_to(root))
    return NeededFile(name, root is not None, _checksum(path.resolve()))


def _checksum(path: Path) -> int:
    stat = path.stat()
    return _content_checksum(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=10_000)
def _content_checksum(path: Path, _size: int, _modified: int) -> int:
    found = Checksum()
    with files.open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.intdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    reason: str
    """Reason in the run's records; `failed` if the run did not reach its end; `refused` if the worker
    lacks what the run needs."""
    error: str | None = None
    """None if the run did not fail."""
    validity: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Wall-clock time."""
    accuracy: float | None = None
    """Last evaluation, from 0 to 1; None if the run has no evaluation, or its task has no accuracy."""
    loss: float | None = None
    """Last evaluation; None if there is none."""

    @classmethod
    def failure(cls, error: object) -> Self:
        return cls(reason="failed", error=str(error))


class _Watcher(View):
    """Keeps only the last evaluation and the validity of the run."""

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self.evaluation: events.Evaluated | None = None
        self.validity = Validity()

    def progress(self, message: str) -> None:
        self._report(message)

    def record(self, record: events.Record) -> None:
        if isinstance(record, events.Evaluated):
            self.evaluation = record

    def judged(self, judgement: Judgement) -> None:
        self.validity = judgement.validity


def execute(
    topology: Topology,
    plan: Plan,
    directory: RunDirectory,
    options: Options,
    report: Callable[[str], object],
) -> CellOutcome:
    watcher = _Watcher(report)
    begin = time.monotonic()
    try:
        ended = up.run(topology, plan, directory, options, watcher)
    except (TestbedError, OSError) as error:
        return CellOutcome.failure(error)
    last = watcher.evaluation
    return CellOutcome(
        reason=ended.reason,
        validity=watcher.validity.as_dict(),
        seconds=round(time.monotonic() - begin, 2),
        accuracy=None if last is None or math.isnan(last.accuracy) else last.accuracy,
        loss=None if last is None or not math.isfinite(last.loss) else last.loss,
    )


@dataclass(frozen=True, slots=True)
class CellOrder:
    directory: Path
    """Run directory with the topology."""
    options: Options
    needed: tuple[NeededFile, ...] = ()
    """Files to check before the run."""


class CellPool(Protocol):
    """Processes of this machine, or a cluster."""

    @property
    def count(self) -> int:
        """Cells that may be submitted and not yet done."""

    def submit(
        self, topology: Topology, directory: RunDirectory, options: Options
    ) -> Future[CellOutcome]:
        """The run starts as soon as a worker is free. `directory` contains the cell's topology.
        `options.runtime` is the runtime's name."""

    def idle_reason(self) -> str | None:
        """None if cells can run."""

    def close(self) -> None:
        """Runs that are not done are ended, too. Idempotent."""


class WorkerPool:
    """The workers end when the pool is closed, and when this process ends. A worker also ends when the
    thread that started it ends (`host.programs`).

    `emulating`: whether the cells are emulated. Then a worker has more time to clean up when it is
    ended, and the libraries in it may use several cores.
    """

    def __init__(self, count: int, *, emulating: bool = False) -> None:
        self.count = count
        self._emulating = emulating
        self._threads = ThreadPoolExecutor(max(1, count))
        self._workers: list[_WorkerProcess] = []
        self._idle: list[_WorkerProcess] = []
        self._closed = False

    def submit(
        self, topology: Topology, directory: RunDirectory, options: Options
    ) -> Future[CellOutcome]:
        return self._threads.submit(self.run, CellOrder(directory.path, options))

    def idle_reason(self) -> None:
        """Return None: the processes can always run cells."""

    def close(self) -> None:
        """Runs are ended, too. Idempotent."""
        with uninterrupted():
            self._closed = True
            for worker in self._workers:
                worker.process.terminate()
            for worker in self._workers:
                self._end(worker)
            self._threads.shutdown(cancel_futures=True)
            for worker in self._workers:
                worker.pipe.close()
                worker.log.close()

    def run(self, order: CellOrder, is_cancelled: Callable[[], bool] = lambda: False) -> CellOutcome:
        """The worker process is ended as soon as `is_cancelled` returns true."""
        worker = self._idle.pop() if self._idle else self._start()
        try:
            worker.pipe.send(order)
            while not worker.pipe.poll(_CANCEL_SECONDS):
                if is_cancelled():
                    self._end(worker)
            outcome = CellOutcome(**worker.pipe.recv())
        except (EOFError, OSError):
            self._end(worker)
            printed = "" if self._closed else processes.last_lines(worker.log)
            return CellOutcome.failure(f"its process died ({worker.process.returncode})\n{printed}")
        self._idle.append(worker)
        return outcome

    def _end(self, worker: _WorkerProcess) -> None:
        processes.end(worker.process, _CLEANUP_SECONDS if self._emulating else None)

    def _start(self) -> _WorkerProcess:
        pipe, theirs = Pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the workers
        one_core = {} if self._emulating else {"OMP_NUM_THREADS": "1"}  # there is one worker per core
        with theirs:
            process = subprocess.Popen(
                [*programs.tied_prefix(), *programs.command(__name__, str(theirs.fileno()))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends it
                env={**os.environ, **one_core},
                pass_fds=[theirs.fileno()],
            )
        worker = _WorkerProcess(process, pipe, log)
        self._workers.append(worker)
        if self._closed:  # closed meanwhile, perhaps before this worker was in the list
            process.terminate()
        return worker


_CANCEL_SECONDS = 0.5
_CLEANUP_SECONDS = 60.0
"""Seconds that a worker gets to remove the containers of an emulated run."""


class _WorkerProcess(NamedTuple):
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: IO[bytes]


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    processes.interrupt_once()
    try:
        with suppress(EOFError):
            while True:
                order: CellOrder = pipe.recv()
                pipe.send(asdict(_outcome(order)))
    except KeyboardInterrupt:
        processes.ignore_signals()
        sys.exit(130)


def _outcome(order: CellOrder) -> CellOutcome:
    if lack := problem_of_needed(order.needed, order.options.data_root):
        return CellOutcome(reason=REFUSED, error=lack)
    directory = RunDirectory(order.directory)
    try:
        topology, plan = preparing.plan_file(directory.topology, order.options)
    except TestbedError as error:
        return CellOutcome.failure(error)
    return execute(topology, plan, directory, order.options, lambda _: None)


REFUSED = "refused"
"""Reason in the outcome of a cell whose worker lacks what the run needs."""

if __name__ == "__main__":
    main()
