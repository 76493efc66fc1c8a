"""The pool of a sweep on a cluster."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import sys
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from agents.texts import make_printable
from testbed.errors import HostError
from testbed.host.signals import uninterrupted
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.sweeps import needed_files
from testbed.sweeps.clusters import Cluster, Target, archive, connect, remote
from testbed.sweeps.worker import REFUSED, CellOutcome
from testbed.topology import Topology
from testbed.traits import is_simulated

_FOLDER = ".cluster"
"""Folder in the sweep's folder, for the duration of a sweep."""
_MOST_TEXT = 10_000
"""Characters of a text in an answer."""
_OVERHEAD = 2**20
"""Bytes of an answer beside its files."""


class ClusterPool:
    """At the end of the context, the cluster's jobs are ended. `folder`: the sweep's folder. `jobs`:
    maximum number of cells that are submitted at a time; None for what the cluster can do."""

    def __init__(self, target: Target, folder: Path, jobs: int | None) -> None:
        self._target = target
        self._folder = folder.resolve() / _FOLDER
        self._jobs = jobs
        self._sweep = secrets.token_hex(4)  # short, because Unix sockets have short paths
        self._shared = self._folder / self._sweep
        self._placing = ThreadPoolExecutor(1)
        self._cluster: Cluster | None = None

    def __enter__(self) -> Self:
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier call that was killed
        self._shared.mkdir(parents=True)
        try:
            self._cluster = connect(self._target, self._shared)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self.close()

    @property
    def count(self) -> int:
        """Maximum number of cells that may be submitted and not yet done."""
        capacity = self._connected.capacity()
        return capacity if self._jobs is None else min(self._jobs, capacity)

    def check(self, *, emulated: bool) -> None:
        """Raises HostError or BadInputError if the workers cannot run the cells. `emulated`: whether
        there are emulated cells."""
        self._connected.check(emulated=emulated)

    def idle_reason(self) -> str | None:
        """None if cells can run."""
        return self._connected.idle_reason()

    def submit(
        self, topology: Topology, directory: RunDirectory, options: Options
    ) -> Future[CellOutcome]:
        """`directory` contains the cell's topology, and at the end the results. The future has an
        exception if the worker is not fit for the sweep, or if the cluster failed."""
        runtime = str(options.runtime)
        emulated = not is_simulated(runtime)
        job = remote.CellJob(
            identity=remote.identity(),
            sweep=self._sweep,
            shared=str(self._shared),
            run=directory.run,
            inputs=archive.pack(directory.path, remote.MAX_INPUTS),
            runtime=runtime,
            emulated=emulated,
            oversubscribe=options.oversubscribe,
            data_root=None if options.data_root is None else str(options.data_root),
            needed=needed_files.find(topology, options.data_root),
            max_result=self._target.max_result,
        )
        ended: Future[CellOutcome] = Future()
        answered = self._connected.submit(msgspec.msgpack.encode(job), emulated=emulated)
        answered.add_done_callback(lambda done: self._receive(done, directory, ended))
        return ended

    def _receive(
        self, answered: Future[bytes], directory: RunDirectory, ended: Future[CellOutcome]
    ) -> None:
        try:
            self._placing.submit(self._finish, answered, directory, ended)
        except RuntimeError:  # closed
            ended.cancel()

    def _finish(
        self, answered: Future[bytes], directory: RunDirectory, ended: Future[CellOutcome]
    ) -> None:
        try:
            ended.set_result(self._outcome(answered, directory))
        except BaseException as error:  # noqa: BLE001  (the future raises it in the main thread)
            ended.set_exception(error)

    def _outcome(self, answered: Future[bytes], directory: RunDirectory) -> CellOutcome:
        """Put the results into `directory`. Raises HostError."""
        try:
            packed = answered.result()
        except CancelledError:
            raise HostError(
                f"{self._target.text} has dropped a cell: is the cluster still up?"
            ) from None
        except Exception as error:
            if why := self._connected.failure(error):
                return CellOutcome.failure(why)
            raise HostError(f"{self._target.text}: {error}") from error
        try:
            if type(packed) is not bytes or len(packed) > self._target.max_result + _OVERHEAD:
                raise ValueError("it is not bytes, or it is too large")
            answer = msgspec.msgpack.decode(packed, type=remote.CellAnswer)
            outcome = _checked(msgspec.convert(answer.outcome, CellOutcome))
            if outcome.reason == REFUSED:
                raise HostError(f"{self._target.text}: {outcome.error}")
            if outcome.error is None and answer.place is None and answer.files is None:
                raise ValueError("it has no records")
            self._place(answer, directory)
        except (ValueError, OSError, archive.TooLargeError) as error:  # msgspec's are ValueErrors
            return CellOutcome.failure(f"the answer of the worker cannot be used: {error}")
        return outcome

    def _place(self, answer: remote.CellAnswer, directory: RunDirectory) -> None:
        if answer.place is not None:
            found = self._shared / Path(answer.place).name / directory.run
            if found.is_symlink() or not found.is_dir():
                raise ValueError(f"{found} is not a folder")
            shutil.rmtree(directory.path)
            found.rename(directory.path)
        elif answer.files is not None:
            archive.unpack(answer.files, directory.path, self._target.max_result)

    def close(self) -> None:
        """Idempotent."""
        if self._cluster is not None:
            self._cluster.close()
        self._placing.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _connected(self) -> Cluster:
        if self._cluster is None:
            raise RuntimeError("not connected")
        return self._cluster


def _checked(outcome: CellOutcome) -> CellOutcome:
    """Make texts safe to print. Raises ValueError for impossible figures."""
    for name, value, most in (
        ("seconds", outcome.seconds, sys.float_info.max),
        ("accuracy", outcome.accuracy or 0.0, 1.0),
    ):
        if not 0 <= value <= most:
            raise ValueError(f"{name} is {value:g}, expected from 0 to {most:g}")
    values = dataclasses.asdict(outcome)
    json.dumps(values, allow_nan=False)  # raises ValueError
    return msgspec.convert(_printable(values), CellOutcome)


def _printable(value: Any) -> Any:
    """Remove control characters from texts, except ends of lines."""
    match value:
        case str():
            return make_printable(value, _MOST_TEXT, keep="\n")
        case dict():
            return {_printable(key): _printable(each) for key, each in value.items()}
        case list():
            return [_printable(each) for each in value]
    return value
