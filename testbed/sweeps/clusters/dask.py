"""Cells on the workers of a Dask cluster.

Dask repeats a task whose worker was lost, as often as the scheduler's `allowed-failures` says. A worker
runs emulated cells if it was started with `--resources engine=1`.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import Client, KilledWorker, Worker, get_worker

from testbed.errors import BadInputError, HostError
from testbed.sweeps.clusters import Target, remote

_PORT = 8786
"""Port of a scheduler, if the address has none."""
_CONNECT_SECONDS = 15
_CLOSE_SECONDS = 75
"""Seconds to wait until the workers have ended their processes."""
_REFRESH_SECONDS = 2.0
"""Seconds between two requests for the number of workers."""
_MIN_CAPACITY = 16
"""Number of jobs that are submitted even if there are no workers. A cluster that adapts the number of
its workers to the jobs then starts workers."""
_ENGINE = "engine"
"""Resource of workers that run emulated cells."""


class DaskCluster:
    def __init__(self, target: Target, folder: Path) -> None:
        if target.settings:
            raise BadInputError(f"--on {target.text}: {next(iter(target.settings))}: expected result")
        self._target = target
        self._sweep = folder.name
        host, colon, port = target.address.rpartition(":")
        place = target.address if colon and port.isdigit() and host else f"{target.address}:{_PORT}"
        self._address = f"{'tcp' if target.scheme == 'dask' else target.scheme}://{place}"
        try:
            self._client = Client(self._address, timeout=_CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise HostError(
                f"--on {target.text}: no Dask scheduler answers at {self._address} ({error}): start one "
                f"with `dask scheduler`, and workers with `dask worker {self._address}`"
            ) from error
        self._virtual = self._client.get_executor(pure=False)
        self._emulating = self._client.get_executor(pure=False, resources={_ENGINE: 1})
        self._needs_engine = False
        self._workers: dict[str, int] = {}
        self._asked = float("-inf")
        self._closed = False

    def check(self, *, emulated: bool) -> None:
        self._needs_engine = emulated
        found = self._client.run(_describe, on_error="return")
        for worker, told in found.items():
            if isinstance(told, BaseException):
                lack = f"no such version of the testbed ({type(told).__name__}: {told})"
                raise HostError(remote.mismatch(worker, lack, remote.identity()))
            if told["identity"] != remote.identity():
                raise HostError(remote.mismatch(worker, str(told["identity"]), remote.identity()))
        if emulated and found and not any(told["engine"] for told in found.values()):
            raise BadInputError(
                f"--on {self._target.text}: no worker runs emulated cells. On each host with an engine, "
                f"start one with: dask worker {self._address} --resources {_ENGINE}=1"
            )

    def submit(self, job: bytes, *, emulated: bool) -> Future[bytes]:
        executor = self._emulating if emulated else self._virtual
        answered: Future[bytes] = executor.submit(_run, job)
        return answered

    def failure(self, error: BaseException) -> str | None:
        if isinstance(error, KilledWorker):
            count = error.allowed_failures + 1
            lost = "1 worker was lost" if count == 1 else f"{count} workers were lost"
            last = error.last_worker.address
            return f"{lost} while running it, the last was {last}: see the logs of the workers"
        return None

    def capacity(self) -> int:
        if time.monotonic() - self._asked > _REFRESH_SECONDS:
            self._workers, self._asked = self._client.nthreads(), time.monotonic()
        return max(_MIN_CAPACITY, 2 * sum(self._workers.values()))

    def idle_reason(self) -> str | None:
        if not self._client.nthreads():
            return f"{self._address} has no workers: waiting for one"
        if self._needs_engine:
            told = self._client.run(_describe, on_error="ignore")
            self._needs_engine = not any(one["engine"] for one in told.values())
        if self._needs_engine:
            return f"no worker of {self._address} has --resources {_ENGINE}=1: waiting for one"
        return None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(Exception):  # the scheduler may be gone
            self._virtual.shutdown(wait=False)
            self._emulating.shutdown(wait=False)
            if self._client.status == "running":
                self._client.run(_close, self._sweep, on_error="ignore", callback_timeout=_CLOSE_SECONDS)
        with suppress(Exception):
            self._client.close(timeout=_CONNECT_SECONDS)


def _describe(dask_worker: Worker) -> dict[str, Any]:
    engine = dask_worker.state.total_resources.get(_ENGINE, 0) >= 1
    return {"identity": remote.identity(), "engine": engine}


def _run(job: bytes) -> bytes:
    worker = get_worker()
    key = worker.get_current_task()

    def is_cancelled() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state in ("cancelled", "released", "forgotten")

    name = f"worker {worker.address}"
    return remote.run(job, name, Path(worker.local_directory), is_cancelled)


async def _close(sweep: str) -> None:
    await asyncio.to_thread(remote.close, sweep)
