"""Run directories with damaged files, to every command that reads one: cut off, emptied, overwritten,
with values of other types, unreadable, gone; or a pipe, a folder, a loop of links in a file's place."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from testbed import simulate
from testbed.cli.main import app
from testbed.dashboard.board import Board
from testbed.dashboard.feed import Feed
from testbed.errors import TestbedError, from_os_error
from testbed.rundir.directory import RunDirectory
from testbed.watching import fullscreen
from testbed.watching.prometheus import RunCollector
from tests.fuzz.harness import Read
from tests.fuzz.mutations import VALUES, change_text, damage, replace_value

TOPOLOGY = """
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


def whole_run(folder: Path) -> Path:
    """A run directory that has all files that there can be, made in virtual time."""
    run = simulate(TOPOLOGY, runs=folder)
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


def _damage_run(path: Path, draw: random.Random) -> None:
    """Damage one file of the run directory `path`."""
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
        with contextlib.suppress(OSError, ValueError, IndexError, RecursionError):
            how(file, draw)


def _bytes(file: Path, draw: random.Random) -> None:
    file.write_bytes(damage(file.read_bytes(), draw))


def _emptied(file: Path, draw: random.Random) -> None:
    file.write_bytes(b"")


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
        lines[number] = json.dumps(replace_value(json.loads(lines[number]), draw))
        file.write_text("\n".join(lines) + "\n")
    elif file.suffix == ".json":
        file.write_text(json.dumps(replace_value(json.loads(text), draw)))
    elif file.suffix == ".yaml":
        file.write_bytes(change_text(text, draw))
    else:
        file.write_text(json.dumps(draw.choice(VALUES)))


DAMAGES: Sequence[Callable[[Path, random.Random], None]] = (
    *[_bytes] * 4, _emptied, _missing, _pipe, _folder, _loop, _endless, _unreadable, _deep, _shuffled,
    *[_other_value] * 10,
)  # fmt: skip


def _page(path: Path) -> None:
    """Render the dashboard page of the directory."""
    feed = Feed(path)
    Board([feed]).refresh(at_once=True)
    if feed.error:
        raise TestbedError(f"{path}: {feed.error}")  # the page shows it beside the run


def _metrics(path: Path) -> None:
    list(RunCollector(RunDirectory(path)).collect())


def _watch(path: Path) -> None:
    fullscreen.watch(RunDirectory(path), Console(file=io.StringIO()))


def _command(*arguments: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        given = [
            text.replace("RUN", str(path)).replace("FOLDER", str(path.parent)) for text in arguments
        ]
        app([*given], standalone_mode=False)

    return run


_COMMANDS: Sequence[Callable[[Path], None]] = (
    _command("runs", "--runs", "FOLDER"),
    _command("logs", "RUN"),
    _command("compare", "RUN", "--json"),
    _command("export", "RUN", "--to", "FOLDER/tables"),
    _command("pack", "RUN", "--to", "FOLDER/run.zip", "--with", "models", "--with", "inputs"),
    _command("replay", "RUN"),
    _command("pause", "RUN", "far"),
    _command("down", "RUN"),
    _command("up", "--resume", "RUN", "--runtime", "virtual"),
    _watch,
    _metrics,
)
_DRAWING: Sequence[Callable[[Path], None]] = (
    _command("report", "RUN", "--to", "FOLDER/report.html"),
    _command("compare", "RUN", "--figure", "FOLDER/figure.png"),
    _page,
)
"""Commands that take seconds."""


@contextmanager
def run_directories(folder: Path) -> Iterator[Read]:
    whole = whole_run(folder / "whole")

    def read(draw: random.Random) -> object:
        path = folder / "runs" / whole.name
        shutil.copytree(whole, path, symlinks=True)
        try:
            for _ in range(draw.choice([1, 1, 1, 2])):
                _damage_run(path, draw)
            draw.choice(_DRAWING if draw.random() < 0.05 else _COMMANDS)(path)
        except OSError as error:  # as in `cli.main`
            raise from_os_error(error) from error
        finally:
            shutil.rmtree(folder / "runs")
        return None

    yield read
