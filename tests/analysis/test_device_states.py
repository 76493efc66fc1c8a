from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from agents import events
from analysis.device_states import timeline
from analysis.load import Run, load
from tests.analysis.conftest import EVENTS, with_records

TIMES = ("dispatched", "downloaded", "train_start", "train_end", "sent", "arrived", "applied")


def of(run: Run, device: str, since: float = 0.0) -> list[tuple[str, float, float, int]]:
    spans = timeline(run, since)
    own = spans[spans["device"] == device]
    return list(own[["state", "begin", "end", "update"]].itertuples(index=False, name=None))


def test_states_follow_from_the_timestamps(directory: Path) -> None:
    run = load(directory)
    assert of(run, "fast") == [
        ("download", 0.0, 0.5, 0),
        ("train", 0.5, 1.5, 0),
        ("upload", 1.5, 2.0, 0),  # while the next model comes already, since 1.75
        ("download", 2.0, 2.5, 1),
        ("wait", 2.5, 3.0, -1),
        ("train", 3.0, 4.0, 1),
        ("wait", 4.0, 4.5, -1),
        ("upload", 4.5, 5.0, 1),
        ("wait", 5.0, 10.0, -1),
    ]
    assert of(run, "slow") == [
        ("download", 0.0, 1.0, 2),
        ("train", 1.0, 7.0, 2),
        ("upload", 7.0, 8.0, 2),
        ("wait", 8.0, 10.0, -1),
    ]
    assert of(run, "mute") == [("wait", 0.0, 10.0, -1)]


def test_states_of_a_part_of_the_run(directory: Path) -> None:
    assert of(load(directory), "slow", since=6.5)[0] == ("train", 6.5, 7.0, 2)
    assert of(load(directory), "fast", since=6.5) == [("wait", 6.5, 10.0, -1)]


def test_round_without_an_applied_update_counts_as_work(directory: Path) -> None:
    run = with_records(
        directory,
        events.Acted(6.0, "mute", "hand", 0.0, {"action": "pause"}),
        events.Acted(7.0, "mute", "hand", 0.0, {"action": "resume"}),
        events.RoundUnfinished(8.5, "slow", 0, 8.0, 8.5),  # arrived, and was rejected
        events.RoundUnfinished(10.0, "fast", 1, 4.75, 10.0),  # sent during its last upload
        events.RoundUnfinished(10.0, "mute", 0, 0.5, 10.0),
    )
    assert of(run, "mute") == [
        ("wait", 0.0, 0.5, -1),
        ("unfinished", 0.5, 6.0, -1),
        ("paused", 6.0, 7.0, -1),
        ("unfinished", 7.0, 10.0, -1),
    ]
    assert of(run, "fast")[-2:] == [("upload", 4.5, 5.0, 1), ("unfinished", 5.0, 10.0, -1)]
    assert of(run, "slow")[-2:] == [("unfinished", 8.0, 8.5, -1), ("wait", 8.5, 10.0, -1)]
    assert of(run, "mute", since=9.0) == [("unfinished", 9.0, 10.0, -1)]


def test_state_of_a_running_round_follows_from_cpu_use(directory: Path) -> None:
    (directory / "events.jsonl").write_text("\n".join(EVENTS[:-1]) + "\n")
    samples = [
        *(("mute", at, cpu) for at, cpu in ((0, 1.0), (2, 1.2), (4, 1.21), (6, 1.31), (8, 0.0))),
        *(("fast", at, cpu) for at, cpu in ((4, 1.0), (6, 2.0), (8, 2.5), (12, 2.6))),
    ]
    (directory / "telemetry.jsonl").write_text(
        "".join(json.dumps({"device": d, "at": 100.0 + at, "cpu": cpu}) + "\n" for d, at, cpu in samples)
    )
    run = load(directory)
    assert of(run, "mute") == [  # of a tenth of a core
        ("unfinished", 0.0, 2.0, -1),
        ("wait", 2.0, 4.0, -1),
        ("unfinished", 4.0, 6.0, -1),
        ("wait", 6.0, 12.0, -1),  # its counter began anew
    ]
    assert of(run, "fast")[-3:] == [
        ("wait", 5.0, 6.0, -1),  # the sample from 4 to 6 s has its last training in it
        ("unfinished", 6.0, 8.0, -1),
        ("wait", 8.0, 12.0, -1),
    ]
    (directory / "events.jsonl").write_text("\n".join(EVENTS) + "\n")
    assert of(load(directory), "mute") == [("wait", 0.0, 10.0, -1)]


def test_paused_device_that_crashes_or_rejoins_meanwhile(directory: Path) -> None:
    run = with_records(
        directory,
        *(
            events.Acted(at, "mute", "hand", 0.0, {"action": action})
            for at, action in ((1, "crash"), (2, "pause"), (4, "resume"), (5, "pause"), (6, "restart"))
        ),
        events.ClientStatus(7.0, "mute", "ready"),
        events.Acted(8.0, "mute", "scenario", 0.0, {"action": "leave"}),
        events.Acted(9.0, "mute", "scenario", 0.0, {"action": "join"}),
        events.ClientStatus(9.5, "mute", "ready"),
        events.Acted(10.0, "mute", "hand", 0.0, {"action": "pause"}),  # as the run ends
    )
    assert of(run, "mute") == [
        ("wait", 0.0, 1.0, -1),
        ("offline", 1.0, 7.0, -1),
        ("paused", 7.0, 8.0, -1),
        ("offline", 8.0, 9.5, -1),
        ("wait", 9.5, 10.0, -1),
    ]


def test_resumed_run_starts_with_the_planned_states(directory: Path) -> None:
    run = with_records(
        directory,
        events.Acted(8.0, "slow", "hand", 0.0, {"action": "pause"}),
        events.Acted(8.0, "fast", "hand", 0.0, {"action": "disconnect"}),
        events.RunEnded(9.0, "interrupted", 3, 3),
        events.RunStarted(9.0, 1.8e9, ("fast", "slow"), ("mute",)),
        events.Acted(9.5, "fast", "scenario", 0.5, {"action": "pause"}),  # the scenario's is done again
    )
    assert of(run, "slow")[-2:] == [("paused", 8.0, 9.0, -1), ("wait", 9.0, 10.0, -1)]
    assert of(run, "fast")[-3:] == [
        ("offline", 8.0, 9.0, -1),
        ("wait", 9.0, 9.5, -1),
        ("paused", 9.5, 10.0, -1),
    ]
    assert of(run, "mute") == [("wait", 0.0, 9.0, -1), ("offline", 9.0, 10.0, -1)]


def test_disconnected_device_is_offline_until_it_is_ready_again(directory: Path) -> None:
    run = with_records(
        directory,
        events.Acted(8.2, "slow", "scenario", 0.0, {"action": "disconnect"}),
        events.Acted(8.6, "slow", "scenario", 0.0, {"action": "reconnect"}),
        events.Acted(9.0, "slow", "scenario", 0.0, {"action": "disconnect"}),
        events.ClientStatus(9.1, "slow", "offline"),  # its keep-alive has run out
        events.Acted(9.2, "slow", "scenario", 0.0, {"action": "reconnect"}),
        events.ClientStatus(9.5, "slow", "ready"),
    )
    assert of(run, "slow")[3:] == [
        ("wait", 8.0, 8.2, -1),
        ("offline", 8.2, 8.6, -1),
        ("wait", 8.6, 9.0, -1),
        ("offline", 9.0, 9.5, -1),
        ("wait", 9.5, 10.0, -1),
    ]


def test_rejoining_device_is_not_held_by_earlier_actions(directory: Path) -> None:
    run = with_records(
        directory,
        events.Acted(8.1, "slow", "scenario", 0.0, {"action": "pause"}),
        events.Acted(8.2, "slow", "scenario", 0.0, {"action": "disconnect"}),
        events.Acted(8.3, "slow", "scenario", 0.0, {"action": "leave"}),
        events.Acted(9.0, "slow", "scenario", 0.0, {"action": "join"}),
        events.ClientStatus(9.5, "slow", "ready"),
    )
    assert of(run, "slow")[-2:] == [("offline", 8.2, 9.5, -1), ("wait", 9.5, 10.0, -1)]


def test_device_restarted_at_once_is_present(directory: Path) -> None:
    """In virtual time all these records have the same time."""
    run = with_records(
        directory,
        events.Acted(8.5, "slow", "scenario", 0.0, {"action": "crash"}),
        events.ClientStatus(8.5, "slow", "offline"),
        events.Acted(8.5, "slow", "scenario", 0.0, {"action": "restart"}),
        events.ClientStatus(8.5, "slow", "ready"),
        events.Acted(9.0, "slow", "scenario", 0.0, {"action": "crash"}),
        events.ClientStatus(9.0, "slow", "offline"),
    )
    assert of(run, "slow")[3:] == [("wait", 8.0, 9.0, -1), ("offline", 9.0, 10.0, -1)]


def test_device_absent_at_the_start_is_offline_until_ready(directory: Path) -> None:
    missing = EVENTS[0].replace('"missing":[]', '"missing":["mute","stranger"]')
    ready = events.to_line(events.ClientStatus(4.0, "mute", "ready"))
    (directory / "events.jsonl").write_text(
        "\n".join([missing, *EVENTS[1:-1], ready + EVENTS[-1]]) + "\n"
    )
    assert of(load(directory), "mute") == [("offline", 0.0, 4.0, -1), ("wait", 4.0, 10.0, -1)]


def test_unknown_times_cover_no_interval(directory: Path) -> None:
    line = EVENTS[8].replace('"train_end":7.0', '"train_end":null')
    (directory / "events.jsonl").write_text("\n".join([EVENTS[0], line, EVENTS[-1]]) + "\n")
    states = [span[0] for span in of(load(directory), "slow")]
    assert states == ["download", "wait", "upload", "wait"]


def test_a_run_without_records_has_no_intervals(directory: Path) -> None:
    (directory / "events.jsonl").write_text("")
    assert timeline(load(directory)).empty


def test_intervals_fill_the_run_under_any_overlap(directory: Path) -> None:
    """Compared with a slow count, moment by moment, of random overlapping updates."""
    random, lines = np.random.default_rng(5), [EVENTS[0]]
    for sequence in range(40):
        times = np.sort(random.integers(0, 11, 7)).astype(float).tolist()
        random.shuffle(times)
        client = ("fast", "slow")[sequence % 2]
        update = events.UpdateApplied(
            client=client,
            sequence=sequence,
            kind="delta",
            base_version=0,
            applied_version=1,
            staleness=0,
            weight=1,
            samples=1,
            steps=1,
            loss=1.0,
            bytes=1,
            **dict(zip(TIMES, times, strict=True)),
        )
        lines.append(events.to_line(update).strip())
    (directory / "events.jsonl").write_text("\n".join([*lines, EVENTS[-1]]) + "\n")
    run = load(directory)
    spans = timeline(run)
    for device in ("fast", "slow"):
        own = spans[spans["device"] == device]
        assert own["begin"].tolist() == [0.0, *own["end"].tolist()[:-1]]
        assert own["end"].iloc[-1] == 10.0
        for moment in np.arange(0.5, 10):
            at = own[(own["begin"] < moment) & (own["end"] > moment)].iloc[0]
            assert at["state"] == _slow(run.updates[run.updates["client"] == device], moment)


def _slow(updates: pd.DataFrame, moment: float) -> str:
    pairs = {"train": ("train_start", "train_end"), "upload": ("sent", "arrived")}
    for state, (begin, end) in {**pairs, "download": ("dispatched", "downloaded")}.items():
        if ((updates[begin] < moment) & (updates[end] > moment)).any():
            return state
    return "wait"


@pytest.mark.parametrize("column", ["device", "state"])
def test_device_and_state_names_are_categoricals(directory: Path, column: str) -> None:
    assert isinstance(timeline(load(directory))[column].dtype, pd.CategoricalDtype)


def test_mask_time_is_placed_before_the_training(directory: Path) -> None:
    """It lies between the end of the download, at 8.25 s, and the training, at 9 s; other updates have
    none."""
    first = events.from_line(EVENTS[next(i for i, line in enumerate(EVENTS) if '"update"' in line)])
    assert isinstance(first, events.UpdateApplied)
    times: dict[str, Any] = dict(zip(TIMES, (8.0, 8.25, 9.0, 9.25, 9.25, 9.5, 9.5), strict=True))
    update = dataclasses.replace(first, client="mute", masking=0.5, **times)
    assert of(with_records(directory, update), "mute")[:5] == [
        ("wait", 0.0, 8.0, -1),
        ("download", 8.0, 8.25, 3),
        ("wait", 8.25, 8.5, -1),
        ("mask", 8.5, 9.0, 3),
        ("train", 9.0, 9.25, 3),
    ]
