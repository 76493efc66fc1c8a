"""Experiment trackers: MLflow, Weights & Biases, TensorBoard (docs/guide/trackers.md).

    points   converts the records of a run to figures over device time
    facts    parameters and files of a run
    follow   reads the run directory as it grows, and sends it to a tracker
    mlflow, wandb, tensorboard   one `Tracker` each

`python -m testbed.tracking` follows one run in a separate process, so that a slow or failing tracker
does not disturb the run. To add a tracker, write a module with a class that implements `Tracker`, and
add a row to TRACKERS.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agents import extras
from testbed.errors import BadInputError

if TYPE_CHECKING:
    from testbed.tracking.facts import Facts
    from testbed.tracking.points import Point


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
