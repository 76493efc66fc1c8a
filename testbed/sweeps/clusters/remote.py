"""Cells on a cluster: jobs and answers as bytes, a cell on a worker, and the pool of the sweep."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import platform
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

import msgspec

from agents.texts import make_printable
from testbed import bundle
from testbed.errors import HostError
from testbed.host.processes import uninterrupted
from testbed.run import provenance
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.sweeps.clusters import Cluster, Target, connect
from testbed.sweeps.worker import (
    REFUSED,
    CellOrder,
    CellOutcome,
    NeededFile,
    WorkerPool,
    find_needed,
    local_data_root,
)
from testbed.topology import Topology, units
from testbed.traits import is_simulated

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class TooLargeError(Exception):
    pass


def pack_folder(folder: Path, most: int) -> bytes:
    """Return a zip file. Raises TooLargeError if the regular files have more than `most` bytes."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    _check(sum(path.stat().st_size for path in found), most)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in found:
            archive.writestr(str(path.relative_to(folder)), path.read_bytes())
    return packed.getvalue()


def unpack_folder(packed: bytes, folder: Path, most: int) -> None:
    """Raises TooLargeError if the content has more than `most` bytes, and ValueError if `packed` is
    damaged or a file's name leads out of `folder`."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            _check(sum(entry.file_size for entry in archive.infolist()), most)
            for entry in archive.infolist():
                if entry.flag_bits & 1 or entry.compress_type not in _METHODS:
                    raise ValueError(f"{entry.filename!r} is encrypted, or compressed in another way")
                name = PurePosixPath(entry.filename)
                if name.is_absolute() or ".." in name.parts or "\\" in entry.filename:
                    raise ValueError(f"the name {entry.filename!r} leads out of the folder")
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as file:
                    content = file.read(entry.file_size + 1)  # the entry may be larger than it claims
                if len(content) != entry.file_size:
                    raise ValueError(f"{entry.filename!r} has another size than its entry")
                path.write_bytes(content)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise ValueError(f"damaged zip file: {error}") from error


def _check(size: int, most: int) -> None:
    if size > most:
        raise TooLargeError(f"{units.format_size(size)}, expected at most {units.format_size(most)}")


# Run a cell on a worker of a cluster.
#
# A job and its answer are bytes: msgpack with the fields of `CellJob` and `CellAnswer`. Nothing in them
# is unpickled.
#
# The worker runs each attempt in a new folder. If the worker sees the sweep's folder, the new folder is
# in the sweep's folder, and the results stay there. Otherwise the new folder is on the worker's disk,
# and the answer contains the results. So an attempt whose worker was lost cannot disturb another
# attempt.

MAX_INPUTS = 64 * 2**20
"""Bytes of the topology and the user's own code, which are sent to a worker."""
_IDLE_SECONDS = 60.0
"""Seconds without a cell after which a sweep's processes are ended."""
_LOCK_SECONDS = 1.0
"""Seconds between two attempts to get the host's lock for emulated cells."""
_HOST_LOCK = "\0testbed emulated cell"
"""Name of the abstract Unix socket that a host's only emulated cell holds. The kernel removes the socket
when its process ends."""


class CellJob(msgspec.Struct, frozen=True):
    identity: str
    """`identity` of the machine that runs the sweep."""
    sweep: str
    """Identifier of this call of the sweep."""
    shared: str
    """Absolute path of a folder in the sweep's folder. A worker on which this folder exists writes the
    results into it."""
    run: str
    inputs: bytes
    """Run directory with the topology, from `pack_folder`."""
    runtime: str
    emulated: bool
    """Whether the runtime emulates devices, so that a host can run only one cell at a time."""
    oversubscribe: bool
    data_root: str | None
    """Folder on the machine that runs the sweep."""
    needed: tuple[NeededFile, ...]
    max_result: int
    """Maximum bytes, if the answer contains the results."""


class CellAnswer(msgspec.Struct, frozen=True):
    outcome: dict[str, Any]
    """Fields of a CellOutcome."""
    place: str | None = None
    """Folder in `CellJob.shared` that contains the run directory; None if the answer contains the run
    directory, or if there is none."""
    files: bytes | None = None
    """The run directory, from `pack_folder`; None if it is in `place`, or if there is none."""


@functools.cache
def identity() -> str:
    """Versions that must be the same on all machines of a sweep: those of the testbed, its source files,
    and Python."""
    digest = hashlib.sha256()
    packages = Path(bundle.__file__).parent, bundle.AGENTS, bundle.ROOT / "analysis"
    for package in packages:
        for path in sorted(package.rglob("*")):
            name = path.relative_to(package)
            if path.suffix in (".py", ".yaml") and not str(name).startswith("_bundled"):
                content = path.read_bytes()
                digest.update(f"{package.name}/{name}\0{len(content)}\0".encode() + content)
    version = provenance.versions()["edge-fl-testbed"]
    python = ".".join(platform.python_version_tuple()[:2])
    return f"testbed {version} (source {digest.hexdigest()[:8]}) with Python {python}"


def mismatch(worker: str, other: str, mine: str) -> str:
    """`other`: identity of `worker`."""
    return f"{worker} has {other}, this machine has {mine}: install the same versions on both"


def run(
    job: bytes,
    worker: str,
    scratch: Path | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> bytes:
    """Run in a process of its own. Return the CellAnswer.

    `worker`: for error messages. `scratch`: folder for temporary files. `is_cancelled`: returns whether
    nobody waits for the answer.
    """
    # First, because another version may have other fields.
    theirs = str(msgspec.msgpack.decode(job).get("identity"))
    if theirs != identity():
        return _answer(CellOutcome(reason=REFUSED, error=mismatch(worker, identity(), theirs)))
    order = msgspec.msgpack.decode(job, type=CellJob)
    shared = Path(order.shared)
    is_shared = shared.is_dir() and shared.stat().st_uid == os.getuid() and os.access(shared, os.W_OK)
    attempt = Path(tempfile.mkdtemp(prefix="try-", dir=shared if is_shared else scratch))
    try:
        outcome = _execute(order, attempt, is_cancelled)
        if outcome.error is not None:
            name = worker if outcome.reason == REFUSED else f"{worker}:"
            error = f"{name} {outcome.error}"
            return _answer(CellOutcome(reason=outcome.reason, error=error))
        if is_shared:
            return _answer(outcome, place=attempt.name)
        try:
            return _answer(outcome, files=pack_folder(attempt / order.run, order.max_result))
        except TooLargeError as error:
            advice = "raise it with ?result=SIZE after the address, or use a folder that the workers see"
            message = f"{worker}: the results have {error}: {advice}"
            return _answer(CellOutcome.failure(message))
    finally:
        if not is_shared:
            shutil.rmtree(attempt, ignore_errors=True)


def failure(reason: str) -> bytes:
    return _answer(CellOutcome.failure(reason))


def _answer(outcome: CellOutcome, place: str | None = None, files: bytes | None = None) -> bytes:
    return msgspec.msgpack.encode(CellAnswer(asdict(outcome), place, files))


def _execute(order: CellJob, attempt: Path, is_cancelled: Callable[[], bool]) -> CellOutcome:
    directory = RunDirectory.create(attempt, order.run)
    unpack_folder(order.inputs, directory.path, MAX_INPUTS)
    root = None if order.data_root is None else Path(order.data_root)
    options = Options(order.runtime, order.oversubscribe, local_data_root(root))
    with (
        _only_on_host(is_cancelled) if order.emulated else nullcontext(),
        _processes(order.sweep, emulating=order.emulated) as processes,
    ):
        return processes.run(CellOrder(directory.path, options, order.needed), is_cancelled)


@contextmanager
def _only_on_host(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """No other worker of this host runs an emulated cell in the meantime."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        while not is_cancelled():
            try:
                lock.bind(_HOST_LOCK)
                break
            except OSError:
                time.sleep(_LOCK_SECONDS)
        yield


class _SweepProcesses:
    def __init__(self, *, emulating: bool) -> None:
        self.pool = WorkerPool(0, emulating=emulating)
        self.running = 0
        self.used = time.monotonic()
        """Monotonic time at which the last cell ended."""


_guard = threading.Lock()
_sweeps: dict[tuple[str, bool], _SweepProcesses] = {}
"""By the sweep's identifier, and whether they emulate."""


@contextmanager
def _processes(sweep: str, *, emulating: bool) -> Iterator[WorkerPool]:
    """Processes that are idle afterwards are kept for the next cell."""
    key = sweep, emulating
    with _guard:
        mine = _sweeps.setdefault(key, _SweepProcesses(emulating=emulating))
        mine.running += 1
    try:
        yield mine.pool
    finally:
        with _guard:
            mine.running -= 1
            mine.used = time.monotonic()
        timer = threading.Timer(_IDLE_SECONDS, _close_idle, (key,))
        timer.daemon = True
        timer.start()


def _close_idle(key: tuple[str, bool]) -> None:
    with _guard:
        mine = _sweeps.get(key)
        if mine is None or mine.running or time.monotonic() - mine.used < _IDLE_SECONDS:
            return
        del _sweeps[key]
    mine.pool.close()


def close(sweep: str) -> None:
    """Running cells are ended, too."""
    with _guard:
        ended = [_sweeps.pop(key) for key in [*_sweeps] if key[0] == sweep]
    for mine in ended:
        mine.pool.close()


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
        job = CellJob(
            identity=identity(),
            sweep=self._sweep,
            shared=str(self._shared),
            run=directory.run,
            inputs=pack_folder(directory.path, MAX_INPUTS),
            runtime=runtime,
            emulated=emulated,
            oversubscribe=options.oversubscribe,
            data_root=None if options.data_root is None else str(options.data_root),
            needed=find_needed(topology, options.data_root),
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
            answer = msgspec.msgpack.decode(packed, type=CellAnswer)
            outcome = _checked(msgspec.convert(answer.outcome, CellOutcome))
            if outcome.reason == REFUSED:
                raise HostError(f"{self._target.text}: {outcome.error}")
            if outcome.error is None and answer.place is None and answer.files is None:
                raise ValueError("it has no records")
            self._place(answer, directory)
        except (ValueError, OSError, TooLargeError) as error:  # msgspec's are ValueErrors
            return CellOutcome.failure(f"the answer of the worker cannot be used: {error}")
        return outcome

    def _place(self, answer: CellAnswer, directory: RunDirectory) -> None:
        if answer.place is not None:
            found = self._shared / Path(answer.place).name / directory.run
            if found.is_symlink() or not found.is_dir():
                raise ValueError(f"{found} is not a folder")
            shutil.rmtree(directory.path)
            found.rename(directory.path)
        elif answer.files is not None:
            unpack_folder(answer.files, directory.path, self._target.max_result)

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
