"""Damaged run directories, given to every command that reads one.

    python -m tests.fuzz_directories --count 1000 [--seed 1]

Each is a copy of a whole run with one or two of its files damaged: cut off, emptied, overwritten, with
values of other types, unreadable, gone; or a pipe, a folder, a loop of links in its place. A command may
refuse it, and has to end within five seconds of CPU time (twenty of the clock), without a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed import simulate
from testbed.cli.main import app
from testbed.dashboard.board import Board
from testbed.dashboard.feed import Feed
from testbed.errors import TestbedError
from testbed.rundir.directory import RunDirectory
from testbed.watching import watch
from testbed.watching.prometheus import RunCollector

_LIMITS = {signal.ITIMER_PROF: 5.0, signal.ITIMER_REAL: 20.0}
"""Seconds that a command may take: on the CPU, and by the clock without the time in which it could have
run, but other programs had the CPU."""
_SCHEDULED = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a CPU, and of waiting for one, of the thread that reads it."""
_SLOW, _SELDOM = ("report", "figure"), 5
"""Commands that draw: they get every fifth directory."""
_TOPOLOGY = """
name: fuzz
seed: 7
task: {name: digits-logreg, partition: {scheme: dirichlet, alpha: 0.5}, local: {steps: 5, batch_size: 8}}
rule: {name: fedbuff, buffer_size: 3}
durability: recording
devices:
  - {name: fast, count: 2, timing: 200ms, power: {train: 5W}}
  - {name: far, timing: 500ms, link: {up: 10mbit, down: 50mbit, rtt: 8ms}}
scenario: [{at: 1s, crash: far, restart_after: 500ms}, {at: 2s, set: far, link: {up: 1mbit}}]
evaluate: {every: 1s}
stop: {after: 4s}
"""
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "\0",
    [], {}, [None], {"a": 1}, [[[]]], "9" * 5000, [{}], {"": {}},
)  # fmt: skip
"""Replacements for any value of a JSON file."""


class HangError(Exception):
    """A command took longer than it may."""


def whole_run(folder: Path) -> Path:
    """A run directory that has all files that there can be, made in virtual time."""
    run = simulate(_TOPOLOGY, runs=folder)
    path = run.path
    (path / "logs").mkdir(exist_ok=True)
    (path / "logs" / "aggregator.log").write_text("begun\nended\n")
    samples: list[dict[str, Any]] = [
        {"device": name, "at": 100.0 + t, "cpu": 0.1 * t, "memory": 1000, "sent": t, "received": t}
        for t in range(5)
        for name in ("fast-1", "far")
    ]
    samples.append({"device": "far", "at": 99.0, "probe": {"up": 1e7, "down": 5e7, "rtt": 0.008}})
    (path / "telemetry.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    figure = {"asked": 1.0, "got": 0.9, "error": -10.0}
    fidelity = {"format": 1, "devices": {"far": {"group": "far", "up": figure, "probes": 1}}}
    (path / "fidelity.json").write_text(json.dumps(fidelity))
    directory = RunDirectory(path)
    directory.write_manifest(
        controller={"pid": 2**22 - 1, "started": 1.0},  # not this process, which lives
        monotonic_zero=1.7e9,
        validity={"valid": False, "reasons": ["r"], "unjudged": []},
    )
    return path


def damage(path: Path, draw: random.Random) -> str:
    """Damage one file of the run directory `path`; what was done, in words."""
    kinds = (
        "manifest.json",
        "events.jsonl",
        "telemetry.jsonl",
        "fidelity.json",
        "topology.yaml",
        "inputs.bin",
    )
    others = sorted(p.relative_to(path).as_posix() for p in path.glob("*/*") if p.is_file())
    file = path / draw.choice([*kinds, *kinds, *others])
    how = draw.choice(DAMAGES)
    if file.is_file():  # else it was damaged before
        with contextlib.suppress(OSError, ValueError, IndexError):
            how(file, draw)
    return f"{how.__name__.strip('_')} {file.relative_to(path)}"


def _truncated(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data) or 1)])


def _emptied(file: Path, draw: random.Random) -> None:
    file.write_bytes(b"")


def _binary(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    begin = draw.randrange(len(data) or 1)
    data[begin : begin + draw.randrange(1, 200)] = draw.randbytes(draw.randrange(1, 200))
    file.write_bytes(data)


def _flipped(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(draw.randrange(1, 20)):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def _missing(file: Path, draw: random.Random) -> None:
    file.unlink()


def _pipe(file: Path, draw: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _loop(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.symlink_to(file)


def _endless(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _unreadable(file: Path, draw: random.Random) -> None:
    """Reading gives an I/O error to anybody, root included."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def _deep(file: Path, draw: random.Random) -> None:
    opening = draw.choice(["[", '{"a":', "- ", "{a: "])
    file.write_text(opening * draw.choice([900, 100_000]))


def _shuffled(file: Path, draw: random.Random) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    draw.shuffle(lines)
    file.write_bytes(b"".join(lines))


def _other_value(file: Path, draw: random.Random) -> None:
    """A value somewhere has another type, or is huge."""
    text = file.read_text()
    if file.suffix == ".jsonl":
        lines = text.splitlines()
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(_mutated(json.loads(lines[number]), draw))
        file.write_text("\n".join(lines) + "\n")
    elif file.suffix == ".json":
        file.write_text(json.dumps(_mutated(json.loads(text), draw)))
    else:
        file.write_text(json.dumps(draw.choice(_VALUES)))


def _mutated(value: Any, draw: random.Random) -> Any:
    """`value` with one value in it replaced, or left out."""
    inner = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))
        if isinstance(value, list)
        else []
    )
    if not inner or draw.random() < 0.05:
        return draw.choice(_VALUES)
    key = draw.choice(inner)
    if draw.random() < 0.1:
        del value[key]
    elif draw.random() < 0.4:
        value[key] = draw.choice(_VALUES)
    else:
        value[key] = _mutated(value[key], draw)
    return value


DAMAGES: Sequence[Callable[[Path, random.Random], None]] = (
    _truncated, _emptied, _binary, _flipped, _missing, _pipe, _folder, _loop, _endless, _unreadable,
    _deep, _shuffled, *[_other_value] * 10,
)  # fmt: skip


def _page(path: Path) -> None:
    """Render the dashboard page of the directory."""
    feed = Feed(path)
    Board([feed]).refresh(at_once=True)
    if feed.error:
        raise TestbedError(feed.error)


def _metrics(path: Path) -> None:
    list(RunCollector(RunDirectory(path)).collect())


def _watch(path: Path) -> None:
    watch.watch(RunDirectory(path), Console(file=io.StringIO()))


def _command(*arguments: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        given = [
            text.replace("RUN", str(path)).replace("FOLDER", str(path.parent)) for text in arguments
        ]
        app([*given], standalone_mode=False)

    return run


COMMANDS: dict[str, Callable[[Path], None]] = {
    "runs": _command("runs", "--runs", "FOLDER"),
    "logs": _command("logs", "RUN"),
    "report": _command("report", "RUN", "--to", "FOLDER/report.html"),
    "compare": _command("compare", "RUN", "--json"),
    "export": _command("export", "RUN", "--to", "FOLDER/tables"),
    "pack": _command("pack", "RUN", "--to", "FOLDER/run.zip", "--with", "models", "--with", "inputs"),
    "replay": _command("replay", "RUN"),
    "pause": _command("pause", "RUN", "far"),
    "down": _command("down", "RUN"),
    "resume": _command("up", "--resume", "RUN", "--runtime", "virtual"),
    "figure": _command("compare", "RUN", "--figure", "FOLDER/figure.png"),
    "watch": _watch,
    "page": _page,
    "metrics": _metrics,
}


def outcome(run: Callable[[Path], None], path: Path) -> tuple[str, str]:
    """Outcome: `done`, `refused`, `traceback` or `hang`; and the error's text."""
    begin = _unhindered()

    def late(number: int, _: object) -> None:
        left = _LIMITS[signal.ITIMER_REAL] - (_unhindered() - begin)
        if number == signal.SIGPROF or left <= 0:
            raise HangError
        signal.setitimer(signal.ITIMER_REAL, left)

    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, late)
    for timer, seconds in _LIMITS.items():
        signal.setitimer(timer, seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(path)
    except (TestbedError, OSError) as error:  # these the command line turns into messages
        return "refused", str(error)
    except HangError:
        return "hang", traceback.format_exc()
    except Exception:  # noqa: BLE001  (what is looked for)
        return "traceback", traceback.format_exc()
    finally:
        for timer in _LIMITS:
            signal.setitimer(timer, 0)
    return "done", ""


def _unhindered() -> float:
    """Seconds by the clock, less those in which this thread waited for a CPU."""
    return time.monotonic() - int(_SCHEDULED.read_text().split()[1]) / 1e9


def fuzz(
    count: int, seed: int, commands: Sequence[str] = tuple(COMMANDS)
) -> tuple[Counter[str], list[str]]:
    """Damage a run `count` times; how often each command came to what, and what should not have been."""
    found, bad = Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = whole_run(folder / "whole")
        for number in range(seed, seed + count):
            draw = random.Random(number)
            path = folder / "runs" / whole.name
            shutil.copytree(whole, path, symlinks=True)
            done = [damage(path, draw) for _ in range(draw.choice([1, 1, 1, 2]))]
            for command in commands:
                if command in _SLOW and number % _SELDOM:
                    continue
                kind, text = outcome(COMMANDS[command], path)
                found[f"{command} {kind}"] += 1
                if kind not in ("done", "refused"):
                    bad.append(f"--seed {number}: {command}, {' and '.join(done)}: {kind}\n{text}")
            shutil.rmtree(folder / "runs")
    return found, bad


def run_by_hand(
    fuzz: Callable[[int, int], tuple[Counter[str], list[str]]], what: str, count: int
) -> None:
    """Run the fuzzer with the command line's options, by default `count` times; print a summary, and
    exit with 1 on a failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    faulthandler.enable()
    begin = time.monotonic()
    found, bad = fuzz(given.count, given.seed)
    for text in bad:
        print(text)
    for key in sorted(found):
        print(f"{found[key]:7} {key}")
    print(f"{given.count} {what}, {time.monotonic() - begin:.0f} s, {len(bad)} that should not be")
    sys.exit(bool(bad))


if __name__ == "__main__":
    run_by_hand(fuzz, "directories", 1000)
