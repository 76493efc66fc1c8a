"""Run cells of a sweep: in this process, or in virtual time in parallel worker processes.

A worker (`python -m testbed.sweeps.worker PIPE`) receives paths of run directories that contain a
topology. For each directory, the worker runs the topology in virtual time, and answers with the fields
of a CellOutcome. The worker ends when the pipe is closed.
"""

from __future__ import annotations

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
from typing import IO, Any, NamedTuple, Self

from agents import events
from testbed.errors import TestbedError
from testbed.fidelity.validity import Judgement, Validity
from testbed.host import die_with_parent, run_module, subprocesses
from testbed.host.signals import interrupting, uninterrupted
from testbed.plan import Plan
from testbed.run import planning, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology
from testbed.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """How the run of a cell ended."""

    reason: str
    """Reason for the end of the run, as in the run's records; `failed` if the run did not reach its
    end."""
    error: str | None = None
    """Reason why the run failed; None if the run did not fail."""
    validity: dict[str, Any] = field(default_factory=dict)
    """Validity of the run, as in the manifest."""
    seconds: float = 0.0
    """Duration of the run in seconds of wall-clock time."""
    accuracy: float | None = None
    """Accuracy in the last evaluation, from 0 to 1; None if the run has no evaluation, or its task has
    no accuracy."""
    loss: float | None = None
    """Loss in the last evaluation; None if the run has no evaluation."""

    @classmethod
    def failure(cls, error: object) -> Self:
        return cls(reason="failed", error=str(error))


class _Watcher(View):
    """View that keeps only the last evaluation and the validity of the run."""

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
    """Run a cell in this process."""
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
        accuracy=None if last is None else last.accuracy,
        loss=None if last is None else last.loss,
    )


class WorkerPool:
    """Context manager of up to `count` worker processes.

    The workers end when the context ends, and when this process ends. A worker also ends when the thread
    that started it ends (`host.die_with_parent`).
    """

    def __init__(self, count: int, data_root: Path | None) -> None:
        self.count = count
        self._data_root = None if data_root is None else data_root.resolve()
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

    def submit(self, directory: Path) -> Future[CellOutcome]:
        """Run the cell in `directory`, which contains the cell's topology, as soon as a worker is
        free."""
        return self._threads.submit(self._run, directory)

    def close(self) -> None:
        """End all workers, even while they execute a run. Idempotent."""
        self._closed = True
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            subprocesses.end(worker.process)
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.pipe.close()
            worker.log.close()

    def _run(self, directory: Path) -> CellOutcome:
        worker = self._idle.pop() if self._idle else self._start()
        try:
            worker.pipe.send((directory, self._data_root))
            outcome = CellOutcome(**worker.pipe.recv())
        except (EOFError, OSError):
            subprocesses.end(worker.process)
            printed = subprocesses.last_lines(worker.log)
            return CellOutcome.failure(f"its process died ({worker.process.returncode})\n{printed}")
        self._idle.append(worker)
        return outcome

    def _start(self) -> _WorkerProcess:
        pipe, theirs = Pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the workers
        with theirs:
            process = subprocess.Popen(
                [*die_with_parent.prefix(), *run_module.command(__name__, str(theirs.fileno()))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends it
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # there is one worker per core
                pass_fds=[theirs.fileno()],
            )
        worker = _WorkerProcess(process, pipe, log)
        self._workers.append(worker)
        if self._closed:  # closed meanwhile, perhaps before this worker was in the list
            process.terminate()
        return worker


class _WorkerProcess(NamedTuple):
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: IO[bytes]


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    try:
        with interrupting(), suppress(EOFError):
            while True:
                path, data_root = pipe.recv()
                outcome = _outcome(RunDirectory(path), Options("virtual", data_root=data_root))
                pipe.send(asdict(outcome))
    except KeyboardInterrupt:
        sys.exit(130)


def _outcome(directory: RunDirectory, options: Options) -> CellOutcome:
    try:
        topology, plan = planning.plan_file(directory.topology, options)
    except TestbedError as error:
        return CellOutcome.failure(error)
    return execute(topology, plan, directory, options, lambda _: None)


if __name__ == "__main__":
    main()
