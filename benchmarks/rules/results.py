"""Results of the benchmark: figures of each run, and their files, one CSV per task."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agents.disk import files
from benchmarks.rules.definition import Condition
from testbed.errors import BadInputError

_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Figures of a run. If it has not reached the target, costs are those until its last evaluation, as
    lower bounds."""

    version: int
    """Version of the benchmark."""
    task: str
    fleet: str
    skew: str
    rule: str
    step: float
    """Step size."""
    seed: int
    reached: bool
    """Whether the accuracy in the last fifth of the run is at the target or above."""
    seconds: float
    """Device time (s) until the accuracy first was at the target."""
    updates: float
    """Number of updates until then."""
    bytes: float
    """Payload bytes of these updates."""
    joules: float
    """Energy of all devices until then."""
    accuracy: float
    """Mean accuracy (0 to 1) in the last fifth of the run."""
    events: str
    """Digits of the SHA-256 of the run's events (`events_digest`)."""
    torch: str
    """Version of PyTorch that trained. Another one may round otherwise, so that the events differ."""

    @property
    def condition(self) -> Condition:
        return Condition(self.task, self.fleet, self.skew)

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key: runs that reach the target come first, the fastest ahead; then the most accurate.
        Of equal ones the smallest step size is first."""
        return (not self.reached, self.seconds if self.reached else -self.accuracy, self.step)


_NAMES = [field.name for field in fields(Cell)]


@dataclass(frozen=True, slots=True)
class Results:
    """Cells of a task, with what the benchmark was when they were run."""

    cells: tuple[Cell, ...]
    digest: str
    """Digest of the benchmark (`Benchmark.digest`)."""
    written: str
    """Date on which the file was written."""


def write(results: Results, path: Path) -> None:
    text = io.StringIO()
    text.write(f"# digest {results.digest}\n# {results.written}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_NAMES)
    for cell in sorted(
        results.cells, key=lambda cell: (cell.condition, cell.rule, cell.seed, cell.step)
    ):
        writer.writerow([_text(getattr(cell, name)) for name in _NAMES])
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(path) as written:
        written.write_text(text.getvalue(), encoding="utf-8")


def read(path: Path) -> Results | None:
    """Read results; None if there is no file. Raises BadInputError."""
    try:
        digest, written, *lines = files.read(path, _MAX_BYTES).decode().splitlines()
        rows = csv.DictReader(lines)
        if rows.fieldnames != _NAMES:
            raise ValueError(f"it has other columns than {', '.join(_NAMES)}")
        cells = tuple(map(_cell, rows))
        return Results(cells, digest.removeprefix("# digest "), written.removeprefix("# "))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path} has no results of the benchmark ({error}): remove it") from error


def _cell(row: dict[str, str]) -> Cell:
    return Cell(
        version=int(row["version"]),
        task=row["task"],
        fleet=row["fleet"],
        skew=row["skew"],
        rule=row["rule"],
        step=float(row["step"]),
        seed=int(row["seed"]),
        reached={"yes": True, "no": False}[row["reached"]],
        seconds=float(row["seconds"]),
        updates=float(row["updates"]),
        bytes=float(row["bytes"]),
        joules=float(row["joules"]),
        accuracy=float(row["accuracy"]),
        events=row["events"],
        torch=row["torch"],
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def complete(cells: Iterable[Cell], seeds: Iterable[int], rules: Iterable[str]) -> set[Condition]:
    """Return the conditions under which all `rules` have a cell with each of `seeds`."""
    wanted = {(rule, seed) for rule in rules for seed in seeds}
    found: dict[Condition, set[tuple[str, int]]] = {}
    for cell in cells:
        found.setdefault(cell.condition, set()).add((cell.rule, cell.seed))
    return {condition for condition, pairs in found.items() if wanted <= pairs}
