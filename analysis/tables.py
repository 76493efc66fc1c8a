"""The tables of several runs as files: those of each run in a folder of its own, and one of the runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from analysis import summary
from analysis.load import Run


def export_runs(
    runs: Iterable[Run], folder: str | Path, form: Literal["parquet", "csv"] = "parquet"
) -> Iterator[Path]:
    """Write `<folder>/<run>/<table>.<form>` for each run, one after the other, and then
    `<folder>/runs.<form>`: a row for each run, with the column `run` to find its tables by. The files,
    as they are written.

    Raises ValueError for another form, OSError where the files cannot be written.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        yield from run.export(Path(folder) / run.name, form)
        rows.append(_row(run))
    path = Path(folder) / f"runs.{form}"
    table = pd.DataFrame(rows)
    if form == "csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path, index=False)
    yield path


def _row(run: Run) -> dict[str, Any]:
    """What the run was, and what it came to (`summary.Headline`). `changes`: what a sweep has set."""
    manifest = run.manifest
    changes = manifest.get("changes")
    return {
        "run": run.name,
        "label": manifest.get("label"),
        "task": manifest.get("task"),
        "runtime": manifest.get("runtime"),
        "seed": manifest.get("seed"),
        "changes": None if changes is None else json.dumps(changes, default=str),
        "verdict": summary.verdict(run),
        **asdict(summary.headline(run)),
    }
