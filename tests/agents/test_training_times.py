"""Durations of a client's trainings, drawn for each training that starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents import random_generators
from agents.client import files
from agents.client.factory import Timing
from agents.config import DrawnDuration
from agents.timing.nanoseconds import SECOND, Nanoseconds

MEASURED = DrawnDuration("trace", {"values": [1, 2, 7]})
DRAWN = DrawnDuration("exponential", {"mean": 2})


def rng(purpose: int) -> np.random.Generator:
    return random_generators.client_generator(3, "pi", purpose)


def taken(timing: Timing, trainings: int) -> list[tuple[Nanoseconds, Nanoseconds]]:
    found = []
    for _ in range(trainings):
        timing.begin()
        found.append((timing.floor, timing.thinking))
    return found


def test_each_started_training_takes_the_next_duration() -> None:
    timing = Timing(MEASURED, DrawnDuration("constant", {"value": 5}), rng, speed=0.5)
    floors = [2, 4, 14, 2]
    assert taken(timing, 4) == [(floor * SECOND, 5 * SECOND) for floor in floors]
    assert taken(Timing(MEASURED, None, rng), 2) == [(SECOND, 0), (2 * SECOND, 0)]


def test_restarted_process_continues_the_sequence_of_durations() -> None:
    """The trainings that were not finished have taken their values with them."""
    whole = taken(Timing(DRAWN, MEASURED, rng), 5)
    assert len(set(whole)) == 5
    assert taken(Timing(DRAWN, MEASURED, rng, begun=3), 2) == whole[3:]


def test_timing_and_think_are_drawn_independently() -> None:
    timing = Timing(DRAWN, DRAWN, rng)
    assert all(floor != thinking for floor, thinking in taken(timing, 3))


def test_without_timing_and_think_nothing_takes_time() -> None:
    assert taken(Timing(None, None, rng), 2) == [(0, 0), (0, 0)]


def test_count_of_trainings_survives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "begun"
    assert files.read_count(path) == 0
    for _ in range(3):
        files.count_one_more(path)
    assert files.read_count(path) == 3
