"""Files of a live run: readers of files that grow, and users' commands to the controller."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents import events
from agents.disk import files
from testbed.errors import BadInputError, RunFailedError, TestbedError
from testbed.rundir.directory import RunDirectory
from testbed.traits import is_simulated

JUST_NOW = 2**20
"""Bytes at the end of `events.jsonl` that have its latest records: a run writes less in a few tenths of
a second."""


class _GrowingFile:
    def __init__(self, path: Path, last: int | None = None) -> None:
        """`last`: lines that begin before so many bytes at the end are skipped."""
        self.path, self._offset = path, 0
        if last is not None:
            with suppress(FileNotFoundError), files.open_regular(path) as file:
                file.seek(max(0, path.stat().st_size - last))
                if file.tell():
                    file.readline()
                self._offset = file.tell()

    def read(self, most: int = -1) -> list[str]:
        """Complete lines in the next `most` bytes of the file (−1 for all bytes). An incomplete line is
        left for the next call."""
        lines = b""
        with suppress(FileNotFoundError), files.open_regular(self.path) as file:
            file.seek(self._offset)
            lines = file.read(most).rpartition(b"\n")[0]
        if not lines:
            return []
        self._offset += len(lines) + 1
        return lines.decode(errors="replace").split("\n")


def last_start(path: Path) -> events.RunStarted | None:
    """Start of the run's newest leg. Only the last MiB of `events.jsonl`, the file `path`, is
    searched. The result is None if the leg has not started yet, or if too many records follow its
    start."""
    for line in reversed(_GrowingFile(path, JUST_NOW).read()):
        if f'"{events.RunStarted.event}"' in line:
            with suppress(ValueError):
                record = events.from_line(line)
                if isinstance(record, events.RunStarted):
                    return record
    return None


class RecordFollower:
    """Reads a growing `events.jsonl`."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """`last`: number of bytes before the end of the file at which to start reading."""
        self.path = path
        self._lines = _GrowingFile(path, last)

    def read(self, most: int = -1) -> list[events.Record]:
        """Records added since the last call. An incomplete line is left for the next call.

        `most` is the maximum number of bytes to read, or −1 for all. It must be larger than the longest
        line. Raises ValueError, with the file's name, if a line is not a record.
        """
        try:
            records = [events.from_line(line) for line in self._lines.read(most)]
        except ValueError as error:
            raise ValueError(f"{self._lines.path}: {error}") from error
        return [record for record in records if record is not None]


class Samples:
    """Reads a growing `telemetry.jsonl`."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """`last`: number of bytes before the end of the file at which to start reading."""
        self._lines = _GrowingFile(path, last)
        self.zero: float | None = None
        """Unix time at which the clock of the samples read so far was 0; None if unknown."""

    def read(self) -> list[dict[str, Any]]:
        """New samples, each with `device` and `at`. Other lines are skipped.

        `at` is a time in seconds on the host's monotonic clock. Times of an earlier leg are
        converted to the clock of the newest leg.
        """
        samples: list[dict[str, Any]] = []
        for line in self._lines.read():
            with suppress(ValueError):
                match files.from_json(line):
                    case {"device": str(), "at": int() | float() as at} as sample:
                        if abs(at) <= events.LARGEST:
                            samples.append(sample)
                    case {"monotonic_zero": int() | float() as zero} if abs(zero) <= events.LARGEST:
                        for sample in samples:
                            sample["at"] += (zero if self.zero is None else self.zero) - zero
                        self.zero = zero
        return samples


# Users' commands to the controller of a live run, passed as small files in a folder.
#
# Any user who may write into the run's `work/` may give commands. Other users have no access to that
# folder.

_ANSWER_TIMEOUT_SECONDS = 30.0
"""Limit for the answer to each command."""
_LOOK_SECONDS = 0.02


def send_command(run: RunDirectory, *orders: dict[str, Any]) -> None:
    """Carry out `orders` one after the other.

    Raises BadInputError if the run cannot take orders, or if the controller refuses an order. If an
    order is refused, the other orders are still carried out. Raises RunFailedError if the controller
    does not answer.
    """
    folder = run.orders
    if run.controller() is None:
        raise BadInputError(f"{run.run} is not running. See: testbed runs")
    if is_simulated(run.read_manifest().get("runtime")):
        raise BadInputError(f"{run.run} is in virtual time, where only the scenario changes devices")
    if not folder.is_dir():
        raise BadInputError(f"{run.run} has not started its devices yet: repeat the command later")
    sender = secrets.token_hex(8)
    waiting = {folder / f"{sender}-{place:06}.order": order for place, order in enumerate(orders)}
    for path, order in waiting.items():
        with files.atomic_write(path) as partial:
            partial.write_text(json.dumps(order), encoding="utf-8")
    try:
        answers = [_await_answer(path.with_suffix(".answer")) for path in waiting]
    except TimeoutError:
        for path in waiting:
            path.unlink(missing_ok=True)
        raise RunFailedError(
            f"the controller of {run.run} does not answer: see testbed logs {run.run} controller, or "
            f"end the run with testbed down {run.run}"
        ) from None
    if problem := next(filter(None, answers), None):
        raise BadInputError(problem)


def _await_answer(path: Path) -> str | None:
    """Return the reason why the order failed; None if it was carried out. Raises TimeoutError."""
    deadline = time.monotonic() + _ANSWER_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            problem: str | None = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
            return problem
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError


class CommandFolder:
    """The controller's side of the folder: reads commands and writes answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def serve(self, execute: Callable[[dict[str, Any]], None]) -> None:
        """If `execute` raises a TestbedError, the answer to the command is the message of that error."""
        with os.scandir(self._folder) as entries:
            commands = sorted(entry.path for entry in entries if entry.name.endswith(".order"))
        for path in map(Path, commands):
            problem = None
            try:
                execute(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue  # its sender has withdrawn it
            except TestbedError as error:
                problem = str(error)
            with files.atomic_write(path.with_suffix(".answer")) as partial:
                partial.write_text(json.dumps(problem), encoding="utf-8")
                path.unlink(missing_ok=True)
