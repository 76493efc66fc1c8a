from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from agents.timing.clock import DeviceClock
from agents.timing.clock_sync import Estimate, Exchanges

MS = 10**6
BEGIN = 5 * 10**12
"""Nanoseconds of the local clock. The other clock is hours apart, as hosts are not started together."""


def other(own: float, skew: float = 9_000_000 * MS + 50 * MS, drift: float = 100e-6) -> int:
    """The other clock: 50 ms besides some hours ahead, and 100 ppm fast."""
    return round(own + skew + drift * (own - BEGIN))


def asked(seconds: float, seed: int, way: float = 0.2 * MS) -> tuple[Exchanges, int]:
    """Exchanges of so many seconds, four a second, each way taking 0.08 ms and a random time of mean
    `way` more; and when the last of them was over."""
    uniform, known, own = random.Random(seed), Exchanges(), BEGIN  # noqa: S311
    for number in range(int(4 * seconds)):
        begin = BEGIN + number * 250 * MS
        there, back = (0.08 * MS + uniform.expovariate(1 / way) for _ in range(2))
        own = round(begin + there + back)
        known.add(begin, other(begin + there), own)
    return known, own


@pytest.mark.parametrize("seed", range(20))
def test_skewed_and_drifting_clock_is_estimated_within_half_a_millisecond(seed: int) -> None:
    for seconds in (1, 4, 6, 20, 300):
        known, own = asked(seconds, seed)
        found = known.estimate()
        assert found is not None
        error = abs(found.other(own) - other(own))
        assert error < 0.5 * MS
        assert error < found.uncertainty + 0.05 * MS  # of what it drifts until the next exchange
        if seconds >= 20:
            assert error < found.uncertainty < MS
            assert found.drift == pytest.approx(100e-6, abs=20e-6)


def test_uncertainty_is_half_of_the_shortest_round_trip() -> None:
    known = Exchanges()
    assert known.estimate() is None
    known.add(100, 1000, 300)
    known.add(400, 1300, 500)  # half as long: this one counts
    assert known.estimate() == Estimate(450, 850, 0.0, 50)


def test_samples_off_the_line_raise_the_uncertainty() -> None:
    """A clock that was set by 3 ms in mid-run."""
    known = Exchanges()
    for second in range(20):
        at = second * 10**9
        known.add(at, at + (0 if second < 10 else 3 * MS), at + 1000)
    found = known.estimate()
    assert found is not None
    assert found.uncertainty > 0.5 * MS


def test_converted_timestamps_never_decrease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock.json"

    def estimated(offset: int, changed: int) -> None:
        file.write_text(json.dumps(Estimate(1000, offset, 0.5, 0).as_dict()))
        os.utime(file, ns=(changed, changed))

    estimated(50, 1)
    clock = DeviceClock(2.0, str(file))
    assert clock.at(1100) == (1100 + 50 + 50) / 2
    monkeypatch.setattr("time.monotonic_ns", lambda: 1200)
    assert clock.now() == (1200 + 50 + 100) / 2
    estimated(0, 2)
    assert clock.now() == 675  # the new estimate says 650
    assert clock.at(1100) == 575  # what happened before may be before
    monkeypatch.setattr("time.monotonic_ns", lambda: 1400)
    assert clock.now() == (1400 + 0 + 200) / 2
