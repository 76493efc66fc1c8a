"""Gives damaged inputs to one reader after another, in a process with limits, and judges what comes out.

What may come out is a value with finite numbers, or an error of ours that names the place and has no
control characters and no secrets. Anything else is a fault: another exception, more CPU time, waiting or
memory than an input may take, a file outside of the folder, a process that is left.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from testbed.errors import TestbedError

CPU_SECONDS, WAITING_SECONDS, MEMORY = 10, 120, 2**30
"""What one input may take: seconds on the CPU, seconds by the clock, bytes of memory."""
SECRET = "correct-horse-battery-staple"
"""Content of the file `../outside/secret`, which no error may quote."""
_LONGEST = 10_000
"""Maximum number of characters of an error."""
_FRAMES = -4
"""The last frames of a traceback are printed."""
_GONE_SECONDS = 10.0
"""Seconds for processes to end after their reader."""

Read = Callable[[random.Random], object]
"""Make an input by drawing, have the product read it, and return the value that comes out."""


@dataclass(frozen=True)
class Door:
    """A reader of bytes from strangers."""

    open: Callable[[Path], AbstractContextManager[Read]]
    """Make the reader. Inputs, and all that it writes, are in the folder, which is also the working
    directory."""
    place: str
    """Regular expression: each error names the place like this."""
    errors: tuple[type[Exception], ...] = (TestbedError,)
    """Errors that the reader may raise."""


class Outcome(NamedTuple):
    """What came out for one input."""

    seed: int
    kind: Literal["value", "refused", "fault"]
    text: str
    seconds: float
    """CPU time."""
    memory: int
    """Largest growth of memory, in bytes."""


_NONE = Outcome(0, "value", "", 0.0, 0)


@dataclass
class Report:
    """What came out at a door."""

    door: str
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of outcomes by kind."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of refusals by reason, without numbers and quotations."""
    faults: list[Outcome] = field(default_factory=list)
    slowest: Outcome = _NONE
    largest: Outcome = _NONE

    def add(self, one: Outcome) -> None:
        self.outcomes[one.kind] += 1
        if one.kind == "refused":
            self.reasons[re.sub(r"'[^']*'|\S*[\d/]\S*", "…", one.text.splitlines()[0])[:80]] += 1
        if one.kind == "fault":
            self.faults.append(one)
        self.slowest = max(self.slowest, one, key=lambda each: each.seconds)
        self.largest = max(self.largest, one, key=lambda each: each.memory)

    def kinds_of_faults(self) -> dict[str, list[Outcome]]:
        """Return the faults by the line that raised and the kind of error."""
        found: dict[str, list[Outcome]] = {}
        for one in self.faults:
            lines = [line for line in one.text.splitlines() if line.strip()]
            at = next((line for line in reversed(lines) if line.startswith('  File "')), "")
            first = lines[0] if at == "" or not lines[0].startswith("Traceback") else lines[-1]
            found.setdefault(f"{first.partition(':')[0]} {at}", []).append(one)
        return found

    def __str__(self) -> str:
        slow, large, count = self.slowest, self.largest, self.outcomes
        return (
            f"{self.door:12} {count.total():7,} inputs: {count['value']:,} values, {count['refused']:,} "
            f"refused for {len(self.reasons):,} reasons, {count['fault']:,} faults; "
            f"slowest {slow.seconds:.2f} s (--seed {slow.seed}), "
            f"most memory {large.memory / 2**20:.0f} MiB (--seed {large.seed})"
        )


def run(
    name: str, door: Door, seed: int, *, count: int | None = None, seconds: float = math.inf
) -> Report:
    """Give the door inputs with the seeds from `seed` on: `count` of them, or as many as fit into
    `seconds`."""
    report, deadline = Report(name), time.monotonic() + seconds
    last = math.inf if count is None else seed + count
    while seed < last and time.monotonic() < deadline:
        with tempfile.TemporaryDirectory(prefix="testbed-fuzz-") as folder:
            receiver, sender = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.get_context("fork").Process(
                target=_serve, args=(door, Path(folder), seed, last, deadline, sender)
            )
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                process.start()  # since Python 3.12, a fork beside threads (of pytest-xdist) warns
            sender.close()
            is_open = False
            with suppress(EOFError):
                is_open = receiver.recv()
                while True:
                    outcome: Outcome = receiver.recv()
                    report.add(outcome)
                    seed = outcome.seed + 1
            process.join()
            receiver.close()
            if process.exitcode:
                log = (Path(folder) / "log").read_text(errors="replace")[-4000:]
                why = f"its process ended with exit code {process.exitcode}\n{log}"
                report.add(Outcome(seed, "fault", why, math.inf, 0))
                if not is_open:
                    break
                seed += 1  # it ended in an input: go on with the next one
    return report


def _serve(
    door: Door, folder: Path, seed: int, last: float, deadline: float, results: Connection
) -> None:
    """Judge inputs, and send their outcomes. Entry point of the process of a door."""
    inside, outside = folder / "inside", folder / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_text(f"{SECRET}\n")
    os.chdir(inside)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    for name in ("fsync", "fdatasync"):  # the disk's time is not what is tested
        setattr(os, name, lambda _: None)
    log = (folder / "log").open("wb")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log, all_threads=False)
    torch.set_num_threads(1)  # a fork has none of the threads of its parent
    faulthandler.dump_traceback_later(WAITING_SECONDS, exit=True, file=log)
    faulthandler.register(signal.SIGXCPU, log, all_threads=False, chain=True)
    with warnings.catch_warnings(action="ignore"), door.open(inside) as read:
        results.send(True)
        for number in itertools.count(seed):
            if number >= last or time.monotonic() > deadline:
                break
            faulthandler.dump_traceback_later(WAITING_SECONDS, exit=True, file=log)
            results.send(_judge(door, read, number, folder))
        faulthandler.cancel_dump_traceback_later()


def _judge(door: Door, read: Read, seed: int, folder: Path) -> Outcome:
    files, processes = _files(folder), _children()
    begin, memory = time.process_time(), _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest memory so far
    _set_limit(resource.RLIMIT_CPU, math.ceil(begin) + CPU_SECONDS)
    _set_limit(resource.RLIMIT_AS, _memory("VmSize") + 2 * MEMORY)
    kind: Literal["value", "refused", "fault"]
    try:
        _check_numbers(read(random.Random(seed)))
        kind, text = "value", ""
    except door.errors as error:
        kind, text = "refused", str(error)
        if wrong := _wrong(text, door.place):
            kind, text = (
                "fault",
                f"{wrong}: {text[:1000]!r}\n{traceback.format_exc(_FRAMES, chain=False)}",
            )
    except BaseException:  # noqa: BLE001  (what is looked for)
        kind, text = "fault", traceback.format_exc(_FRAMES, chain=False)
    _set_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    spent, grown = time.process_time() - begin, _memory("VmHWM") - memory
    if grown > MEMORY:
        kind, text = "fault", f"it took {grown / 2**20:.0f} MiB of memory\n{text}"
    if (found := _files(folder)) != files:
        kind, text = "fault", f"files outside of its folder: {sorted(found ^ files)}\n{text}"
    end = time.monotonic() + _GONE_SECONDS
    while (left := _children() - processes) and time.monotonic() < end:
        time.sleep(0.02)
    if left:
        kind, text = "fault", f"processes are left: {left}\n{text}"
    return Outcome(seed, kind, text, spent, grown)


def _wrong(text: str, place: str) -> str:
    """Return what is wrong with the text of an error; empty if nothing is."""
    if not all(each.isprintable() or each == "\n" for each in text):
        return "characters that are not printable"
    if SECRET in text:
        return "a secret"
    if len(text) > _LONGEST:
        return f"{len(text):,} characters"
    return "" if re.search(place, text) else "no place"


def _check_numbers(value: Any) -> None:
    """Raise ValueError if a number in the value is not finite."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"a value has the number {value}")
    elif isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise ValueError("an array has a number that is not finite")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _check_numbers([getattr(value, one.name) for one in dataclasses.fields(value)])
    elif isinstance(value, Mapping):
        _check_numbers([*value.values()])
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for one in value:
            _check_numbers(one)


def _files(folder: Path) -> set[tuple[str, int]]:
    """Return the files beside the reader's folder, with their sizes."""
    return {
        (str(path.relative_to(folder)), path.lstat().st_size if path.is_file() else 0)
        for place in (folder, folder / "outside")
        for path in place.iterdir()
        if path.name not in ("cache", "log")
    }


def _children() -> set[int]:
    found: set[int] = set()
    for one in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found.update(map(int, one.read_text().split()))
    return found


def _memory(name: str) -> int:
    """Return a figure of this process's memory in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def _set_limit(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
