"""Processes that run cells of a sweep in virtual time, side by side (`testbed.sweep.worker`)."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from testbed.host import die_with_parent, subprocesses
from testbed.host.signals import uninterrupted


class Workers:
    """A context manager. None of them outlives it, nor this process. Use it from the main thread."""

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
        """Run the run directories, each taken when a worker is free; each with the worker's answer, in
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
        words = worker.close()
        return {"outcome": "failed", "error": f"its process died ({worker.process.returncode})\n{words}"}


@dataclass(slots=True)
class _Worker:
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [*die_with_parent.prefix(), sys.executable, "-m", "testbed.sweep.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,  # a Ctrl-C of the terminal reaches us alone, and we end it
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # there is one for each core
        )

    @property
    def answers(self) -> IO[bytes]:
        assert self.process.stdout is not None  # noqa: S101  (asked for above)
        return self.process.stdout

    def send(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None  # noqa: S101
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it has died, and the end of its answers says so

    def close(self) -> str:
        """End it; its last words."""
        subprocesses.end(self.process)
        words = subprocesses.last_lines(self.log)
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                stream.close()
        return words
