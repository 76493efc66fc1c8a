"""Worker processes that run cells of a sweep in virtual time, side by side.

A worker (`python -m testbed.sweeps.worker`) reads a request per line from standard input, JSON with
`directory` (a run directory with its topology in it) and `data` (folder of datasets, or null), runs it
in virtual time, and answers with a line: what `execute` returns. It ends with its input.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

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


class _Watcher(View):
    """Keeps the last evaluation, and the validity of the run."""

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
) -> dict[str, Any]:
    """Run it: `outcome`, `seconds` of wall time, `accuracy` and `loss` of the last evaluation, and
    `validity`, as in the manifest; or the outcome `failed`, and the `error`."""
    watcher = _Watcher(report)
    begin = time.monotonic()
    try:
        ended = up.run(topology, plan, directory, options, watcher)
    except (TestbedError, OSError) as error:
        return {"outcome": "failed", "error": str(error)}
    last = watcher.evaluation
    return {
        "outcome": ended.reason,
        "validity": watcher.validity.as_dict(),
        "seconds": round(time.monotonic() - begin, 2),
        "accuracy": None if last is None else last.accuracy,
        "loss": None if last is None else last.loss,
    }


class Workers:
    """Up to `count` workers, as a context manager: none of them outlives it, nor this process.

    Use it from the main thread.
    """

    def __init__(self, count: int, data_root: Path | None) -> None:
        self._count = count
        self._data = None if data_root is None else str(data_root.resolve())
        self._idle: list[_Worker] = []
        self._busy: dict[Path, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self.close()

    def run(self, directories: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Run `directories`, each taken when a worker is free: yields each with the worker's answer, in
        the order in which they end."""
        waiting = iter(directories)
        with selectors.DefaultSelector() as selector:
            while True:
                while len(self._busy) < self._count and (path := next(waiting, None)) is not None:
                    worker = self._begin(path)
                    selector.register(worker.answers, selectors.EVENT_READ, path)
                if not self._busy:
                    return
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    yield key.data, self._end(key.data)

    def close(self) -> None:
        """End all of them, also in mid-run. Idempotent."""
        workers = [*self._idle, *self._busy.values()]
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.close()
        self._idle, self._busy = [], {}

    def _begin(self, path: Path) -> _Worker:
        worker = self._idle.pop() if self._idle else _Worker()
        self._busy[path] = worker
        worker.send({"directory": str(path), "data": self._data})
        return worker

    def _end(self, path: Path) -> dict[str, Any]:
        worker = self._busy.pop(path)
        if line := worker.answers.readline():
            self._idle.append(worker)
            answer: dict[str, Any] = json.loads(line)
            return answer
        printed = worker.close()
        error = f"its process died ({worker.process.returncode})\n{printed}"
        return {"outcome": "failed", "error": error}


@dataclass(slots=True)
class _Worker:
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [*die_with_parent.prefix(), *run_module.command("testbed.sweeps.worker")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,  # a Ctrl-C of the terminal reaches us alone, and we end it
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # there is one for each core
        )

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None  # noqa: S101  (a pipe, see above)
        return self.process.stdout

    def send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None  # noqa: S101
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it has died, and the end of its answers shows it

    def close(self) -> str:
        """End it; the last lines that it printed."""
        subprocesses.end(self.process)
        printed = subprocesses.last_lines(self.log)
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                stream.close()
        return printed


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    directory = RunDirectory(Path(request["directory"]))
    options = Options("virtual", data_root=request["data"] and Path(request["data"]))
    try:
        topology, plan = planning.plan_file(directory.topology, options)
    except TestbedError as error:
        return {"outcome": "failed", "error": str(error)}
    return execute(topology, plan, directory, options, lambda _: None)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        with interrupting():
            for line in iter(sys.stdin.readline, ""):
                answers.write(json.dumps(_answer(json.loads(line))) + "\n")
                answers.flush()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
