"""The list of runs: what the end of a run's records tells, and how the list is sorted and searched."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from analysis.columns import COLUMNS
from testbed.api import running
from testbed.rundir.listing import LatestFigures, latest_figures, list_runs, select_rows, text_row
from tests.analysis.conftest import EVENTS, MANIFEST, write_run
from tests.running import Testbed


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs, the second of which got further."""
    for name, lines, outcome in (("a", EVENTS[:7], "failed"), ("b", EVENTS, "after")):
        (tmp_path / name).mkdir()
        entries: dict[str, Any] = {"rule": "fedbuff", "task": "digits", "outcome": outcome}
        write_run(tmp_path / name, lines, "name: t\n", MANIFEST | entries)
    return tmp_path


def test_last_records_are_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert latest_figures(path) == LatestFigures()
    path.write_text("\n".join(EVENTS) + '\n{"event":"evalu')  # still being written
    assert latest_figures(path) == LatestFigures(at=10.0, accuracy=0.8, loss=1.1)
    many = [line for line in EVENTS if '"update"' in line] * 300  # more than the first look takes in
    path.write_text("\n".join([*EVENTS[:7], *many]) + "\n")
    assert latest_figures(path) == LatestFigures(at=8.0, accuracy=0.85, loss=0.9)
    path.write_text("\0" * 1000 + "\n{}\n")
    assert latest_figures(path) == LatestFigures()


def test_list_is_formatted_sorted_and_searched(runs: Path, testbed: Testbed) -> None:
    rows = list_runs(runs)
    first, second = map(text_row, rows)
    assert (first["outcome"], first["accuracy"], first["duration"]) == ("failed", "85.0%", "5.0 s")
    assert (second["outcome"], second["accuracy"]) == ("time is up", "80.0%")
    assert [row.run for row in select_rows(rows, "duration")] == ["a", "b"]
    assert [row.run for row in select_rows(rows, matching="FedBuff time")] == ["b"]
    said = testbed("runs", "--runs", runs, "--sort", "accuracy")
    names = [line.split()[0] for line in said.out.splitlines()]
    assert [name for name in names if name in ("a", "b")] == ["b", "a"]
    assert testbed("runs", "--runs", runs, "--find", "nothing").out.startswith("None of 2 runs")
    assert testbed("runs", "--runs", runs, "--sort", "colour").code == 2


def test_subfolder_of_runs_is_named_below_the_list(runs: Path, testbed: Testbed) -> None:
    """For example a sweep's folder; the page lists its runs."""
    study = runs / "runs" / "study"
    study.mkdir(parents=True)
    for name in "ab":
        (runs / name).rename(study / name)
    said = testbed("runs", "--runs", study.parent)
    assert said.out.splitlines() == [
        f"No runs in {study.parent}. Next: testbed up TOPOLOGY",
        f"Runs of study: testbed runs --runs {study}",
    ]
    assert len(testbed("runs", "--runs", study).out.splitlines()) == 3
    with running.page(["study"], runs=study.parent, on_progress=(told := list[str]()).append):
        address = told[0].partition(" ")[2]
        with urllib.request.urlopen(address) as answer:  # noqa: S310  (our own)
            assert re.findall(r"run\?run=(\w+)", answer.read().decode()) == ["b", "a"]


def test_folder_of_runs_is_exported(runs: Path, testbed: Testbed, tmp_path: Path) -> None:
    said = testbed("export", runs, "--format", "csv", "--to", tmp_path / "out")
    assert not said.code, said.err
    assert (tmp_path / "out" / "b" / "updates.csv").is_file()
    rows = (tmp_path / "out" / "runs.csv").read_text().splitlines()
    assert len(rows) == 2  # heading, and the one that has come to its end
    assert rows[1].startswith("b,")
    assert said.out.splitlines() == [
        f"{tmp_path}/out/b: {len(COLUMNS) - 1} tables",
        f"{tmp_path}/out: 1 table",
        f'Next: pandas.read_csv("{tmp_path}/out/runs.csv")',
    ]
