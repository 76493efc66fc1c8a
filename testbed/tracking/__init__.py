"""Experiment trackers: MLflow, Weights & Biases, TensorBoard (docs/guide/trackers.md).

    following   reads the run directory as it grows, and sends its facts and figures to a tracker
    mlflow, wandb, tensorboard   one `Tracker` each

`python -m testbed.tracking` follows one run in a separate process, so that a slow or failing tracker
does not disturb the run. To add a tracker, write a module with a class that implements `Tracker`, and
add a row to TRACKERS.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agents import extras
from testbed.errors import BadInputError, RunFailedError
from testbed.host import programs

if TYPE_CHECKING:
    from testbed.rundir.directory import RunDirectory
    from testbed.tracking.following import Facts, Point


class Tracker(Protocol):
    """Methods are called in the order below, and may raise any exception: the run does not depend on
    trackers."""

    def begin(self, facts: Facts) -> None:
        """Receive what is known before the first record. Replace an earlier upload of the same run."""

    def log(self, points: Sequence[Point]) -> None:
        """Receive figures in the order of device time."""

    def end(self, outcome: str, files: Sequence[Path]) -> str:
        """`outcome`: as in the manifest. `files`: to keep. Return a text that says where the run is
        found."""


@dataclass(frozen=True, slots=True)
class TrackerKind:
    module: str
    class_name: str
    package: str
    """Optional package (agents/extras.py)."""


TRACKERS: dict[str, TrackerKind] = {
    "mlflow": TrackerKind("testbed.tracking.mlflow", "MlflowTracker", "mlflow"),
    "wandb": TrackerKind("testbed.tracking.wandb", "WandbTracker", "wandb"),
    "tensorboard": TrackerKind("testbed.tracking.tensorboard", "TensorboardTracker", "tensorboard"),
}


def check(names: Sequence[str]) -> None:
    """Raise BadInputError for an unknown tracker, or one whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise BadInputError(f"unknown tracker {name!r}, expected one of {', '.join(TRACKERS)}")
        if message := extras.missing(TRACKERS[name].package):
            raise BadInputError(message)
        if name == "mlflow" and not _has_store():
            raise BadInputError(
                "MLFLOW_TRACKING_URI is not set to an MLflow server, and mlflow-skinny has no database: "
                f"export MLFLOW_TRACKING_URI=http://HOST:PORT, or {sys.executable} -m pip install mlflow"
            )


def _has_store() -> bool:
    """True if MLflow has a place to write to: a server, files, or a database that it can create here."""
    named = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").is_dir()
    return bool(named) or importlib.util.find_spec("sqlalchemy") is not None


def tracker(name: str, run: Path) -> Tracker:
    """Raises whatever the import of the tracker's package raises."""
    kind = TRACKERS[name]
    made: Tracker = getattr(importlib.import_module(kind.module), kind.class_name)(run)
    return made


# Trackers in separate processes, for a live run or a finished one.

_PATIENCE_SECONDS = 30.0
"""Time of the trackers after the end of the run to send the remaining figures."""


@contextmanager
def tracking_run(
    names: Sequence[str], directory: RunDirectory, cpus: str, report: Callable[[str], None]
) -> Iterator[None]:
    """Send the run while the `with` block runs, by a process per tracker on the cpuset `cpus` (empty:
    any). After the block, all have `_PATIENCE_SECONDS` together. `report` gets the result of each."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for name in names:
            output = stack.enter_context(_log(directory, name).open("wb"))
            processes[name] = subprocess.Popen(
                [*programs.tied_prefix(cpus), *_command(name, directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it: it is ended in order below
            )
        try:
            yield
        finally:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            for name, process in processes.items():
                report(
                    f"{name}: {_finish_tracker(name, process, directory, deadline - time.monotonic())}"
                )


def _finish_tracker(
    name: str, process: subprocess.Popen[bytes], directory: RunDirectory, seconds: float
) -> str:
    """Wait at most `seconds`, then end the process. Return a text on its result."""
    from testbed.host import processes
    from testbed.rundir.directory import last_log_lines

    again = f"`testbed export {directory.run} --to {name}` sends the run again"
    try:
        code = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return f"not finished within {_PATIENCE_SECONDS:.0f} s of the end of the run; {again}"
    finally:
        processes.end(process)
    log = _log(directory, name)
    last = (last_log_lines(log, 1) or [f"see {log}"])[-1]
    return last if code == 0 else f"{last}; {again}. See {log}"


def send_run(name: str, directory: RunDirectory, *, model: bool) -> str:
    """Return when the run is over, with a text that says where it is found. Raises RunFailedError."""
    from testbed.rundir.directory import last_log_lines

    command = [*_command(name, directory), *(["model"] if model else [])]
    with _log(directory, name).open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    last = (last_log_lines(_log(directory, name), 1) or [""])[-1]
    if done.returncode:
        raise RunFailedError(f"sending the run to {name} failed: {last}. See {_log(directory, name)}")
    return last


def _command(name: str, directory: RunDirectory) -> list[str]:
    return programs.command("testbed.tracking", name, str(directory.path))


def _log(directory: RunDirectory, name: str) -> Path:
    return directory.log(f"tracker-{name}")
