"""Experiment trackers that are told of a run: MLflow, Weights & Biases, TensorBoard.

docs/guide/trackers.md is the users' page.

    points   records of a run → figures over device time; pure
    facts    parameters and files of a run
    follow   reads the run directory as it grows, and tells a tracker
    mlflow, wandb, tensorboard   a `Tracker` each

`python -m testbed.tracking` follows one run in a process of its own: a tracker that is slow, or fails,
lags behind the files and does not reach the run. To add one: a module with a class `Tracker`, and a row
in TRACKERS.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from testbed.errors import BadInputError
from testbed.tracking.facts import Facts
from testbed.tracking.points import Point


class Tracker(Protocol):
    """Is told of one run, in this order. May raise anything: nothing of the run depends on it."""

    def begin(self, facts: Facts) -> None:
        """What is known of the run before its first record. What an earlier call has told of the same
        run gives way to this."""

    def log(self, points: Sequence[Point]) -> None:
        """Figures, in the order of device time."""

    def end(self, outcome: str, files: Sequence[Path]) -> str:
        """Why the run ended, as its manifest has it, and files to keep; where to find it all."""


@dataclass(frozen=True, slots=True)
class Kind:
    module: str
    package: str
    """What it imports, as Python does."""
    extra: str
    """Of our package, which installs it."""


TRACKERS: dict[str, Kind] = {
    "mlflow": Kind("testbed.tracking.mlflow", "mlflow", "mlflow"),
    "wandb": Kind("testbed.tracking.wandb", "wandb", "wandb"),
    "tensorboard": Kind("testbed.tracking.tensorboard", "tensorboard", "tensorboard"),
}


def check(names: Sequence[str]) -> None:
    """Raise BadInputError where there is no such tracker, or its package is not installed here."""
    for name in names:
        if name not in TRACKERS:
            raise BadInputError(f"no tracker is called {name!r}, expected {', '.join(TRACKERS)}")
        kind = TRACKERS[name]
        if importlib.util.find_spec(kind.package) is None:
            raise BadInputError(
                f"{name} is not installed here: {sys.executable} -m pip install "
                f"'edge-fl-testbed[{kind.extra}]'"
            )
        if name == "mlflow" and not _has_store():
            raise BadInputError(
                "MLFLOW_TRACKING_URI names no MLflow server, and mlflow-skinny has no database: "
                f"export MLFLOW_TRACKING_URI=http://HOST:PORT, or {sys.executable} -m pip install mlflow"
            )


def _has_store() -> bool:
    """Whether MLflow has something to write to: a server, files, or the database that it makes here."""
    named = os.environ.get("MLFLOW_TRACKING_URI") or Path("mlruns").is_dir()
    return bool(named) or importlib.util.find_spec("sqlalchemy") is not None


def tracker(name: str, run: Path) -> Tracker:
    """The tracker of that name, for the run in the directory `run`. Raises what importing it raises."""
    found: Tracker = importlib.import_module(TRACKERS[name].module).Tracker(run)
    return found
