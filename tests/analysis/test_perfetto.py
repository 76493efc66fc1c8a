"""The trace for Perfetto: that it is a correct file of the trace event format, and says what the run's
tables say."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from analysis import export
from analysis.load import load
from tests.analysis.conftest import EVENTS

Events = list[dict[str, Any]]


@pytest.fixture
def events(directory: Path, tmp_path: Path) -> Events:
    with gzip.open(export.write_trace(load(directory), tmp_path / "trace.json.gz"), "rt") as file:
        found: Events = json.load(file)["traceEvents"]
    return found


def of(events: Events, phase: str, **fields: Any) -> Events:
    return [one for one in events if one["ph"] == phase and fields.items() <= one.items()]


def test_each_group_is_a_process_and_each_device_a_thread(events: Events) -> None:
    processes = {one["pid"]: one["args"]["name"] for one in of(events, "M", name="process_name")}
    assert [*processes.values()][1:] == ["pi", "nano"]
    threads = {one["args"]["name"]: processes[one["pid"]] for one in of(events, "M", name="thread_name")}
    assert threads == {"versions": processes[1], "fast": "pi", "slow": "pi", "mute": "nano"}


def test_states_are_slices_in_microseconds_of_device_time(events: Events) -> None:
    (trained,) = [one for one in of(events, "X", name="train") if one["ts"] == 1e6]
    assert trained["dur"] == 6e6
    assert trained["args"]["staleness"] == 2
    assert of(events, "X", name="wait") == []


def test_slices_of_a_thread_do_not_overlap(events: Events) -> None:
    threads = {(one["pid"], one["tid"]) for one in of(events, "X")}
    for pid, tid in threads:
        spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in of(events, "X", pid=pid, tid=tid))
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_arrow_leads_from_each_update_to_its_version(events: Events) -> None:
    starts = {one["id"]: one["ts"] for one in of(events, "s")}
    ends = {one["id"]: one["ts"] for one in of(events, "f")}
    assert starts == {0: 1.5e6, 1: 4.5e6, 2: 7e6}
    assert ends == {0: 2e6, 1: 5e6, 2: 8e6}


def test_evaluations_are_counters_and_rejections_instants(events: Events) -> None:
    accuracies = [(one["ts"], one["args"]["value"]) for one in of(events, "C", name="accuracy")]
    assert accuracies == [(0.0, 0.1), (5e6, 0.85), (10e6, 0.8)]
    (rejected,) = of(events, "i")
    assert (rejected["name"], rejected["ts"]) == ("rejected", 6e6)


def test_telemetry_is_shown_as_rates(directory: Path, tmp_path: Path) -> None:
    """A counter restarts from 0 with its device: between the last two samples it grew by 2 at least."""
    samples = [(100.0, 1.0), (101.0, 1.5), (102.0, 2.0)]
    lines = [
        json.dumps({"device": "fast", "at": at, "cpu": cpu, "memory": 5, "received": 0, "sent": sent})
        for (at, cpu), sent in zip(samples, (0, 500, 200), strict=True)
    ]
    (directory / "telemetry.jsonl").write_text("".join(line + "\n" for line in lines))
    found = list(export.trace_events(load(directory)))
    sent = of(found, "C", name="fast sent (byte/s)")
    assert [(one["ts"], one["args"]["value"]) for one in sent] == [(0.0, 500), (1e6, 200), (2e6, 0)]
    used = of(found, "C", name="fast CPU (cores)")
    assert [one["args"]["value"] for one in used] == [0.5, 0.5, 0]


def test_values_that_are_not_finite_are_left_out(directory: Path) -> None:
    lines = [line.replace('"loss":1.5', '"loss":null') for line in EVENTS]
    (directory / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    trained = of(list(export.trace_events(load(directory))), "X", name="train")
    assert trained
    assert all("loss" not in one["args"] for one in trained)
