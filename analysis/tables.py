"""Export of several runs as files: the tables of each in its own folder, and a table of the runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pyarrow import parquet

from analysis import columns, summary
from analysis.load import Run


def export_runs(
    runs: Iterable[Run], folder: str | Path, form: Literal["parquet", "csv"] = "parquet"
) -> Iterator[Path]:
    """Write `<folder>/<run>/<table>.<form>` for each run, and then `<folder>/runs.<form>`.

    `runs.<form>` has one row per run; `run` is the name of its folder. Files are yielded when they are
    written. Raises ValueError for another `form`, and OSError if a file cannot be written.
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
        parquet.write_table(columns.with_metadata("runs", table), path)
    yield path


def _row(run: Run) -> dict[str, Any]:
    """Settings and results (`summary.Headline`). `changes`: settings that a sweep has changed, as
    JSON."""
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
