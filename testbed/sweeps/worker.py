"""Run cells of a sweep: in this process, or in worker processes.

A worker (`python -m testbed.sweeps.worker PIPE`) receives `CellOrder`s. For each order, the worker runs
the topology in the order's run directory, and answers with the fields of a CellOutcome. The worker ends
when the pipe is closed.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol, Self

from agents import events
from testbed.errors import TestbedError
from testbed.fidelity.validity import Judgement, Validity
from testbed.host import die_with_parent, run_module, signals, subprocesses
from testbed.host.signals import uninterrupted
from testbed.plan import Plan
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.sweeps import files
from testbed.sweeps.files import NeededFile
from testbed.topology import Topology
from testbed.view import View


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
    """The workers end when the context ends, and when this process ends. A worker also ends when the
    thread that started it ends (`host.die_with_parent`).

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self.close()

    def submit(
        self, topology: Topology, directory: RunDirectory, options: Options
    ) -> Future[CellOutcome]:
        return self._threads.submit(self.run, CellOrder(directory.path, options))

    def idle_reason(self) -> None:
        """Return None: the processes can always run cells."""

    def close(self) -> None:
        """Runs are ended, too. Idempotent."""
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
            printed = "" if self._closed else subprocesses.last_lines(worker.log)
            return CellOutcome.failure(f"its process died ({worker.process.returncode})\n{printed}")
        self._idle.append(worker)
        return outcome

    def _end(self, worker: _WorkerProcess) -> None:
        subprocesses.end(worker.process, _CLEANUP_SECONDS if self._emulating else None)

    def _start(self) -> _WorkerProcess:
        pipe, theirs = Pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the workers
        one_core = {} if self._emulating else {"OMP_NUM_THREADS": "1"}  # there is one worker per core
        with theirs:
            process = subprocess.Popen(
                [*die_with_parent.prefix(), *run_module.command(__name__, str(theirs.fileno()))],
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
    signals.interrupt_once()
    try:
        with suppress(EOFError):
            while True:
                order: CellOrder = pipe.recv()
                pipe.send(asdict(_outcome(order)))
    except KeyboardInterrupt:
        signals.ignore()
        sys.exit(130)


def _outcome(order: CellOrder) -> CellOutcome:
    if lack := files.problem_of_needed(order.needed, order.options.data_root):
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
