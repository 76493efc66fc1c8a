from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from agents import events
from analysis import summary
from analysis.load import load
from tests.analysis.conftest import EVENTS, MANIFEST, with_records


def test_headline_by_hand(directory: Path) -> None:
    by_hand = summary.Headline(
        rule="fedbuff",
        versions=3,
        updates=3,
        duration=10.0,
        accuracy=0.8,
        loss=1.1,
        best_accuracy=0.85,
        ended="after",
    )
    assert str(summary.headline(load(directory))) == str(by_hand)  # as text, NaN equals NaN


def test_diverged_task_without_accuracy_counts_as_evaluated(directory: Path) -> None:
    run = load(directory)
    run.evaluations["accuracy"] = nan
    run.evaluations.loc[run.evaluations.index[1:], "loss"] = nan
    assert summary.headline(run).quality == "loss nan: the model diverged"
    run.evaluations["loss"] = nan
    assert summary.headline(run).quality == "no loss reported"
    never = replace(run, evaluations=run.evaluations[:0])
    assert summary.headline(never).quality == "never evaluated"


def test_dropped_updates_are_counted(directory: Path) -> None:
    """Duplicates are not counted: the directory's record of one names it as such."""
    assert summary.headline(load(directory)).applied == "3 updates in 3 versions"
    late = events.UpdateRejected(10.0, "slow", "in the rule's buffer when the run ended")
    run = with_records(directory, late, late)
    assert summary.headline(run).applied == "3 updates in 3 versions, 2 dropped"


def test_device_whose_updates_were_all_dropped_is_named(directory: Path) -> None:
    run = with_records(
        directory, events.UpdateRejected(10.0, "absent", "staleness 9, expected at most 3")
    )
    told = "No update of absent was used. The last one: staleness 9, expected at most 3"
    assert summary.unused_devices(run) == told


@pytest.mark.parametrize(
    ("entries", "verdict"),
    [
        ({}, "simulated"),
        ({"cpus": {"devices": "1"}}, "not judged"),  # it failed before its clock went
        ({"cpus": {"devices": "1"}, "validity": {"valid": True}}, "valid"),
        ({"cpus": {"devices": "1"}, "validity": {"valid": False}}, "not valid"),
        ({"cpus": {"devices": "1"}, "validity": {"valid": None}}, "not judged"),
    ],
)
def test_verdict_from_the_manifest(
    directory: Path, entries: dict[str, object], verdict: summary.Verdict
) -> None:
    (directory / "manifest.json").write_text(json.dumps(MANIFEST | entries))
    run = load(directory)
    assert summary.verdict(run) == verdict
    assert summary.verdicts([run, run]) == {verdict: 2}


def test_devices_table_by_hand(directory: Path) -> None:
    table = summary.devices(load(directory))
    assert table.index.tolist() == ["fast", "slow", "mute"]
    assert table["group"].tolist() == ["pi", "pi", "nano"]
    assert table["profile"].tolist() == ["0.5 cpu, 512 MiB", "0.1 cpu, 512 MiB", "0.1 cpu, 256 MiB"]
    assert table["updates"].tolist() == [2, 1, 0]
    assert table["staleness"].tolist() == pytest.approx([0.0, 2.0, nan], nan_ok=True)
    assert table["share"].tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])
    # fast: 0 to 2.5 without a break (the second download overlaps the first upload), 3 to 4, 4.5 to 5
    assert table["busy"].tolist() == pytest.approx([0.2, 0.6, 0.0])
    assert table["transfer"].tolist() == pytest.approx([0.2, 0.2, 0.0])
    assert table["idle"].tolist() == pytest.approx([0.6, 0.2, 1.0])


def test_shares_of_a_devices_time_sum_to_one(directory: Path) -> None:
    run = with_records(
        directory,
        events.ClientStatus(9.0, "fast", "offline"),
        events.Acted(7.5, "slow", "scenario", 0.0, {"action": "pause"}),
        events.RoundUnfinished(9.0, "fast", 2, 5.0, 9.0),
        events.RoundUnfinished(10.0, "mute", 0, 0.0, 10.0),
    )
    shares = summary.devices(run)[list(summary.SHARES)]
    assert list(shares.loc["fast"]) == pytest.approx([0.6, 0.2, 0.1, 0.0, 0.1])
    assert list(shares.loc["slow"]) == pytest.approx([0.6, 0.15, 0.0, 0.25, 0.0])
    assert list(shares.loc["mute"]) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert shares.sum(axis=1).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_rounds_without_updates_make_no_version(directory: Path) -> None:
    """This holds before the first version, as for fedfix with a short period, and later."""
    lines = [EVENTS[0], _empty(0.5, 0), *EVENTS[2:4], _empty(3.0, 1), _empty(4.0, 1)]
    (directory / "events.jsonl").write_text("\n".join(lines) + "\n")
    run = load(directory)
    assert summary.headline(run).applied == "1 update in 1 version"
    assert run.versions_made == 1


def _empty(at: float, version: int) -> str:
    return events.to_line(events.VersionMade(at, version, 0)).strip()


def test_a_run_without_records_has_unknown_shares(directory: Path) -> None:
    (directory / "events.jsonl").write_text("")
    run = load(directory)
    table = summary.devices(run)
    assert table["updates"].tolist() == [0, 0, 0]
    assert table[["staleness", "share", *summary.SHARES]].isna().all(axis=None)
    line = summary.headline(run)
    assert (line.versions, line.updates, line.ended) == (0, 0, None)
    assert line.accuracy != line.accuracy  # NaN


def test_groups_table_merges_devices_of_a_group() -> None:
    rows = pd.DataFrame(
        {
            "group": ["pi", "pi", "nano"],
            "profile": ["p", "p", "n"],
            "updates": [3, 1, 0],
            "staleness": [1.0, 5.0, np.nan],
            "share": [0.75, 0.25, 0.0],
            "busy": [0.5, 0.7, 0.0],
            "transfer": [0.25, 0.25, 0.0],
            "idle": [0.25, 0.05, 0.5],
            "paused": [0.0, 0.0, 0.5],
            "offline": [0.0, 0.0, 0.0],
        },
        index=["pi-1", "pi-2", "nano"],
    )
    gathered = summary.groups(rows)
    assert gathered.loc["pi", "count"] == 2
    assert gathered.loc["pi", "staleness"] == 2.0  # (3·1 + 1·5)/4
    assert gathered.loc["pi", "share"] == 1.0
    assert gathered.loc["pi", "busy"] == pytest.approx(0.6)
    assert gathered.loc["pi", "idle"] == pytest.approx(0.15)
    assert gathered["staleness"].isna().tolist() == [False, True]
