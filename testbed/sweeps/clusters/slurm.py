"""Cells as jobs of Slurm, one job per cell, submitted with submitit.

submitit writes pickled results. They are not read: a job writes its answer to a file of its own, and
`squeue` says which jobs have ended. So Slurm's accounting is not needed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import submitit

from agents.disk import files
from testbed.errors import BadInputError, HostError
from testbed.rundir.directory import last_log_lines
from testbed.sweeps.clusters import Target, remote

_CAPACITY = 256
"""Jobs that are submitted at a time by default."""
_TRIES = 3
"""Jobs per cell, if jobs end without an answer."""
_TIME = "01:00:00"
"""Default time limit of a job."""
_END_SECONDS = 60
"""Seconds before the time limit at which Slurm asks a job to end."""
_POLL_SECONDS = 0.5
_QUEUE_SECONDS = 5.0
_GRACE_SECONDS = 10.0
"""Seconds for which a job without an answer must be missing from the queue before it counts as lost. A
shared file system may show its answer late."""
_CLOSE_SECONDS = 90
"""Seconds to wait until cancelled jobs have ended."""
_LOG_LINES = 8
_MAX_ANSWER = 2**20
"""Bytes. The results are in the shared folder, not in the answer."""


class LostJobError(Exception):
    """All jobs of a cell ended without an answer."""


@dataclass(slots=True, eq=False)
class _CellJobs:
    packed: bytes
    """Argument of `remote.run`."""
    emulated: bool
    answered: Future[bytes] = field(default_factory=Future)
    tries: int = 0
    id: str = ""
    """Id of the last job."""
    missing_since: float | None = None
    """Monotonic time since when the last job is missing from the queue."""


class SlurmCluster:
    """`sbatch`, `squeue` and `scancel` reach it from this machine."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._folder = folder / "slurm"
        self._folder.mkdir()
        # The name finds the jobs, even one whose submission was interrupted.
        self._name = f"testbed-{folder.name}"
        if "job-name" in target.settings or "job_name" in target.settings:
            raise BadInputError(f"--on {target.text}: job-name: the testbed names its jobs itself")
        ends = {"time": _TIME, "signal": f"TERM@{_END_SECONDS}"}
        settings = ends | target.settings | {"job-name": self._name}
        self._executors = {
            emulated: self._executor(settings | ({"exclusive": ""} if emulated else {}))
            for emulated in (False, True)
        }
        self._guard = threading.Lock()
        self._jobs: list[_CellJobs] = []
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="slurm", daemon=True)
        self._watcher.start()

    def _executor(self, settings: dict[str, str]) -> submitit.SlurmExecutor:
        try:
            made = submitit.SlurmExecutor(folder=self._folder)
        except RuntimeError as error:
            raise HostError(f"--on {self._target.text}: {error}") from error
        # submitit has its own value for the same name with underscores.
        flags = {name.replace("-", "_"): value or True for name, value in settings.items()}
        made.update_parameters(nodes=1, ntasks_per_node=1, additional_parameters=flags)
        return made

    def check(self, *, emulated: bool) -> None:
        """Do nothing: a node is known when its job runs, and checked then."""

    def submit(self, job: bytes, *, emulated: bool) -> Future[bytes]:
        one = _CellJobs(job, emulated)
        with self._guard:
            self._start(one)
            self._jobs.append(one)
        return one.answered

    def failure(self, error: BaseException) -> str | None:
        return str(error) if isinstance(error, LostJobError) else None

    def capacity(self) -> int:
        return _CAPACITY

    def idle_reason(self) -> None:
        """Return None: Slurm's queue says why jobs wait."""

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._watcher.join()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._queued() and time.monotonic() < deadline:
            subprocess.run(["scancel", f"--name={self._name}"], check=False, capture_output=True)
            time.sleep(_POLL_SECONDS)

    def _start(self, one: _CellJobs) -> None:
        """Raises BadInputError if Slurm rejects the job."""
        one.tries += 1
        one.missing_since = None
        try:
            job = self._executors[one.emulated].submit(_run, one.packed, str(self._folder))
        except Exception as error:
            text = str(getattr(error, "stderr", None) or error).strip()
            raise BadInputError(f"--on {self._target.text}: sbatch failed: {text}") from error
        one.id = job.job_id

    def _watch(self) -> None:
        """An error ends all jobs: nobody would see their answers."""
        try:
            self._look_for_answers()
        except Exception as error:  # noqa: BLE001  (in a thread)
            with self._guard:
                for one in self._jobs:
                    one.answered.set_exception(LostJobError(f"{type(error).__name__}: {error}"))

    def _look_for_answers(self) -> None:
        asked = time.monotonic()
        while not self._closed.wait(_POLL_SECONDS):
            queued = None
            if time.monotonic() - asked > _QUEUE_SECONDS:
                queued, asked = self._queued(), time.monotonic()
            with self._guard:
                jobs = [*self._jobs]
            for one in jobs:
                if self._look(one, queued):
                    with self._guard:
                        self._jobs.remove(one)

    def _look(self, one: _CellJobs, queued: set[str] | None) -> bool:
        """Return whether the cell has ended. `queued`: ids of the jobs that have not ended; None if
        unknown."""
        path = _answer_path(self._folder, one.id)
        with suppress(FileNotFoundError):
            try:
                one.answered.set_result(files.read(path, _MAX_ANSWER))
            except FileNotFoundError:
                raise
            except OSError as error:
                one.answered.set_exception(LostJobError(str(error)))
            return True
        if queued is None:
            return False
        if one.id in queued:
            one.missing_since = None
            return False
        now = time.monotonic()
        one.missing_since = one.missing_since or now
        if now - one.missing_since < _GRACE_SECONDS:
            return False
        try:
            if one.tries < _TRIES:
                self._start(one)
                return False
            raise LostJobError(self._reason(one))
        except (LostJobError, BadInputError) as error:
            one.answered.set_exception(error)
        return True

    def _queued(self) -> set[str] | None:
        """None if Slurm does not answer."""
        command = ["squeue", "--noheader", f"--name={self._name}", "--format=%i"]
        try:
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            return None
        return set(done.stdout.split())

    def _reason(self, one: _CellJobs) -> str:
        text = f"{one.tries} Slurm jobs ended without an answer, the last is job {one.id}"
        lines: Sequence[str] = ()
        with suppress(OSError):
            lines = last_log_lines(self._folder / f"{one.id}_0_log.err", _LOG_LINES)
        return "\n    ".join([text, *lines])


def _answer_path(folder: Path, job: str) -> Path:
    return folder / f"{job}.answer"


def _run(packed: bytes, folder: str) -> None:
    """Run a cell in this job. If Slurm ends the job before the cell has ended, no answer is written. The
    cell is then repeated, unless the job has reached its time limit."""
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    job = os.environ["SLURM_JOB_ID"]
    name = f"job {job} on {socket.gethostname()}"
    answer = remote.run(packed, name, is_cancelled=lambda: bool(received))
    if received:
        if time.time() < float(os.environ.get("SLURM_JOB_END_TIME", "inf")) - 2 * _END_SECONDS:
            return
        answer = remote.failure(f"{name}: the job reached its time limit: raise it with time=HH:MM:SS")
    with files.atomic_write(_answer_path(Path(folder), job)) as path:
        path.write_bytes(answer)
