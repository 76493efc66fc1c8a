"""Run a cell on a worker of a cluster.

A job and its answer are bytes: msgpack with the fields of `CellJob` and `CellAnswer`. Nothing in them is
unpickled.

The worker runs each attempt in a new folder. If the worker sees the sweep's folder, the new folder is in
the sweep's folder, and the results stay there. Otherwise the new folder is on the worker's disk, and the
answer contains the results. So an attempt whose worker was lost cannot disturb another attempt.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from testbed import bundle
from testbed.run import provenance
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.sweeps import needed_files
from testbed.sweeps.clusters import archive
from testbed.sweeps.needed_files import NeededFile
from testbed.sweeps.worker import REFUSED, CellOrder, CellOutcome, WorkerPool

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
    """Run directory with the topology, from `archive.pack`."""
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
    """The run directory, from `archive.pack`; None if it is in `place`, or if there is none."""


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
            return _answer(outcome, files=archive.pack(attempt / order.run, order.max_result))
        except archive.TooLargeError as error:
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
    archive.unpack(order.inputs, directory.path, MAX_INPUTS)
    root = None if order.data_root is None else Path(order.data_root)
    options = Options(order.runtime, order.oversubscribe, needed_files.local_data_root(root))
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
