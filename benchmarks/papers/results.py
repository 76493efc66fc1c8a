"""Result of an experiment's runs, and its file: docs/papers/NAME.json."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from agents.disk import files
from analysis.load import Run
from analysis.manifest import verdict
from analysis.metrics import crossed, final
from testbed.errors import BadInputError

_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Figures of a run; NaN for those that it lacks."""

    variant: str
    lr: float
    seed: int
    accuracy: float
    """Accuracy, from 0 to 1: mean over the last fifth of the time; `loss` likewise."""
    loss: float
    untrained_accuracy: float
    untrained_loss: float
    reached: float
    """Device time (s) to the experiment's target; infinite if the run never reached it."""
    ended: float
    """Device time (s) of the last evaluation."""
    fall: float
    """Largest fall of the accuracy (0 to 1) from one evaluation to the next."""
    updates: int
    seconds: float
    """Wall-clock time in seconds."""
    manifest: str
    """First digits of its manifest's SHA-256."""
    valid: bool = True
    """Whether devices had what was requested, by the run's verdict; always true in virtual time."""


@dataclass(frozen=True, slots=True)
class Result:
    cells: tuple[Cell, ...]
    date: str
    cores: int

    def by_seed(self, variant: str, lr: float, figure: Callable[[Cell], float]) -> dict[int, float]:
        """Seed -> `figure` of the run of `variant` with that step size."""
        alike = [cell for cell in self.cells if (cell.variant, cell.lr) == (variant, lr)]
        return {cell.seed: figure(cell) for cell in sorted(alike, key=lambda cell: cell.seed)}

    def of_seed(self, variant: str, seed: int, figure: Callable[[Cell], float]) -> dict[float, float]:
        """Step size -> `figure` of the run of `variant` with that seed."""
        alike = [cell for cell in self.cells if (cell.variant, cell.seed) == (variant, seed)]
        return {cell.lr: figure(cell) for cell in sorted(alike, key=lambda cell: cell.lr)}

    @property
    def hours(self) -> float:
        """Sum of the wall-clock times of all runs."""
        return sum(cell.seconds for cell in self.cells) / 3600


def of_runs(cells: tuple[Cell, ...]) -> Result:
    """Make the result of runs that were made here, today."""
    return Result(cells, datetime.now(UTC).date().isoformat(), os.cpu_count() or 1)


def measured(run: Run, target: float | None) -> Cell:
    """Compute the figures of `run`; `target`: an accuracy from 0 to 1."""
    evaluations, local = run.evaluations, run.topology["task"]["local"]
    accuracies = evaluations["accuracy"]
    return Cell(
        variant=str(run.manifest.get("variant") or ""),
        lr=float(local["lr"]),
        seed=int(run.topology["seed"]),
        accuracy=final(run, "accuracy"),
        loss=final(run, "loss"),
        untrained_accuracy=float(accuracies.iloc[0]),
        untrained_loss=float(evaluations["loss"].iloc[0]),
        reached=math.nan if target is None else crossed(run, "accuracy", target),
        ended=float(evaluations["at"].max()),
        fall=max((before - after for before, after in pairwise(accuracies)), default=0.0),
        updates=len(run.updates),
        seconds=sum(float(seconds) for seconds in run.manifest.get("timings", {}).values()),
        manifest=hashlib.sha256((run.path / "manifest.json").read_bytes()).hexdigest()[:12],
        valid=verdict(run.manifest) in ("valid", "simulated"),
    )


def write(result: Result, path: Path) -> None:
    cells = [{key: _written(value) for key, value in asdict(cell).items()} for cell in result.cells]
    lines = ",\n".join(json.dumps(cell, allow_nan=False) for cell in cells)
    head = json.dumps({"date": result.date, "cores": result.cores})[:-1]
    with files.atomic_write(path) as written:
        written.write_text(f'{head}, "cells": [\n{lines}\n]}}\n', encoding="utf-8")


def read(path: Path) -> Result | None:
    """Read a result; None if there is no file. Raises BadInputError."""
    try:
        kept = files.from_json(files.read(path, _MAX_BYTES))
        return Result(
            tuple(Cell(**{key: _read(value) for key, value in cell.items()}) for cell in kept["cells"]),
            str(kept["date"]),
            int(kept["cores"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{path} is not a result of papers ({error}): remove it") from error


def _written(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return round(value, 6) if isinstance(value, float) else value


def _read(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
