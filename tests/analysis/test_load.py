from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from agents import events
from analysis.load import load
from tests.analysis.conftest import EVENTS


def test_every_record_becomes_a_row(directory: Path) -> None:
    run = load(directory)
    assert run.manifest["devices"]["fast"]["cpu"] == 0.5
    assert run.topology["rule"] == {"name": "fedbuff", "buffer_size": 1}
    assert run.started is not None
    assert run.started.clients == ("fast", "slow")
    assert run.updates["client"].tolist() == ["fast", "fast", "slow"]
    assert run.updates["staleness"].tolist() == [0, 0, 2]
    assert run.versions["at"].tolist() == [2.0, 5.0, 8.0]
    assert run.evaluations["accuracy"].tolist() == [0.1, 0.85, 0.8]
    assert run.rejected["reason"].tolist() == ["duplicate: sequence 2"]
    assert run.statuses.empty
    assert run.ended is not None
    assert run.duration == 10.0


def test_a_torn_last_line_is_left_out(directory: Path) -> None:
    assert load(directory).telemetry["cpu"].tolist() == [1.25]  # the fixture's second line is torn
    path = directory / "events.jsonl"
    path.write_text(path.read_text()[:-20])
    run = load(directory)
    assert run.ended is None
    assert len(run.evaluations) == 3


def test_a_run_still_going_lasts_until_its_last_record(directory: Path) -> None:
    (directory / "events.jsonl").write_text("\n".join(EVENTS[:9]) + "\n")
    assert load(directory).duration == 8.0  # an update's time is when it was applied


def test_a_resumed_run_goes_on_after_its_first_end(directory: Path) -> None:
    resumed = EVENTS[0].replace('"at":0.0', '"at":10.0'), EVENTS[1].replace('"at":0.0', '"at":11.0')
    path = directory / "events.jsonl"
    path.write_text("\n".join([*EVENTS, *resumed]) + "\n")
    run = load(directory)
    assert run.started is not None
    assert (run.started.at, run.ended, run.duration) == (0.0, None, 11.0)
    path.write_text("\n".join([*EVENTS, *resumed, EVENTS[-1].replace('"at":10.0', '"at":12.0')]) + "\n")
    assert load(directory).duration == 12.0


def test_a_run_that_has_not_begun_is_empty_with_all_columns(directory: Path) -> None:
    for name in ("events.jsonl", "telemetry.jsonl", "topology.yaml"):
        (directory / name).unlink()
    run = load(directory)
    assert (run.started, run.duration, run.topology) == (None, 0.0, {})
    names = [field.name for field in dataclasses.fields(events.UpdateApplied)]
    assert run.updates.columns.tolist() == names
    assert run.telemetry.columns.tolist() == ["device", "at"]


def test_what_is_no_run_or_too_new_is_refused(directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(directory / "nowhere")
    (directory / "manifest.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(ValueError, match="format 2 is newer"):
        load(directory)
