from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from testbed import speed
from testbed.errors import BadInputError
from testbed.speed import CalibratedHost, Calibration, Work
from testbed.topology.profiles import DeviceProfile, TrainingSpeeds

HERE = CalibratedHost(cpu="Abacus", cores=4, torch="2.0")
ELSEWHERE = CalibratedHost(cpu="Slide rule", cores=1, torch="2.0")

SPEEDS = TrainingSpeeds(convolution=100.0, depthwise=5.0, matrix=80.0, memory=4.0)


def _calibration(host: CalibratedHost, median: float = 40.0) -> Calibration:
    return Calibration(
        host=host,
        low=median / 2,
        median=median,
        high=median + 2,
        products=5,
        training=SPEEDS,
        measured=datetime.datetime(2026, 1, 31, 12, 5, tzinfo=datetime.UTC),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "testbed" / "calibration.json"


class Bench:
    """Stand-in for the measurement; each result is faster than the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self.host = HERE
        monkeypatch.setattr(speed, "measure", self._measure)
        monkeypatch.setattr(speed, "calibrated_host", lambda: self.host)

    def _measure(self, seconds: float) -> Calibration:
        self.runs += 1
        return _calibration(self.host, 40.0 + self.runs)


@pytest.fixture
def bench(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_this_host_is_measured(cache: Path) -> None:
    found = speed.calibrate(seconds=0.2)
    assert found.gflops > 0
    assert found.low <= found.median <= found.high
    assert found.products >= 3
    assert all(speed > 0 for speed in found.training.model_dump(exclude={"error"}).values())
    assert found.host == speed.calibrated_host()
    assert speed.calibrate() == found  # from the cache, to the last bit
    assert [path.name for path in cache.parent.iterdir()] == ["calibration.json"]


def test_measurement_restores_torchs_threads() -> None:
    import torch

    before = torch.get_num_threads()
    speed.measure(0.0)
    assert torch.get_num_threads() == before


def test_calibration_is_cached(bench: Bench) -> None:
    first = speed.calibrate()
    assert speed.calibrate() == first
    assert bench.runs == 1
    assert speed.calibrate(refresh=True).median == first.median + 1
    assert speed.calibrate().median == first.median + 1
    assert bench.runs == 2


@pytest.mark.parametrize("changed", [{"cpu": "Abacus II"}, {"cores": 8}, {"torch": "2.1"}])
def test_other_machine_or_torch_version_is_measured_again(
    bench: Bench, changed: dict[str, object]
) -> None:
    first = speed.calibrate()
    bench.host = HERE.model_copy(update=changed)
    assert speed.calibrate() != first
    assert bench.runs == 2
    bench.host = HERE
    assert speed.calibrate() == first  # what other hosts measure takes nothing away
    assert bench.runs == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"format": 2, "calibrations": [{"ho',
        b"\xff\xfe",
        b"[]",
        b'{"format": 1, "calibrations": []}',
        b'{"format": 2, "calibrations": [{"host": 3}]}',
    ],
)
def test_damaged_or_foreign_cache_is_replaced(bench: Bench, cache: Path, content: bytes) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    first = speed.calibrate()
    assert speed.calibrate() == first
    assert bench.runs == 1


def test_unwritable_cache_is_ignored(bench: Bench, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    assert speed.calibrate() == _calibration(HERE, 41.0)


def test_failed_write_keeps_the_old_cache(
    bench: Bench, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = speed.calibrate()

    def full(path: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    bench.host = ELSEWHERE
    speed.calibrate()
    bench.host = HERE
    assert speed.calibrate() == first
    assert [path.name for path in cache.parent.iterdir()] == ["calibration.json"]


def test_cpu_share_is_the_devices_speed_in_host_cores() -> None:
    here = _calibration(HERE, 40.0)
    assert speed.cpu_share("pi", DeviceProfile(gflops=10.0), here) == 0.25
    assert speed.cpu_share("big", DeviceProfile(gflops=60.0), here) == 1.5


STEP = Work(convolution=10.0, depthwise=0.5, matrix=8.0, memory=0.4)
"""A step that takes 0.1 s per kind on the host of SPEEDS."""


def test_training_share_depends_on_the_operations_of_a_step() -> None:
    device = TrainingSpeeds(convolution=50.0, depthwise=1.0, matrix=40.0, memory=0.8)
    here, profile = _calibration(HERE, 40.0), DeviceProfile(gflops=10.0, training=device)
    assert speed.cpu_share("pi", profile, here, STEP) == pytest.approx(0.4 / 1.4)
    plain = Work(convolution=1.0, depthwise=0.0, matrix=0.0, memory=0.0)
    assert speed.cpu_share("pi", profile, here, plain) == pytest.approx(0.5)
    assert speed.cpu_share("pi", profile, here, None) == 0.25  # by HPL: the step is unknown


def test_matrix_products_use_hpl_without_a_training_figure() -> None:
    device = TrainingSpeeds(convolution=50.0, depthwise=1.0, memory=0.8)
    here, profile = _calibration(HERE, 40.0), DeviceProfile(gflops=10.0, training=device)
    # a quarter of the host's double precision: products take 0.4 s
    assert speed.cpu_share("pi", profile, here, STEP) == pytest.approx(0.4 / 1.6)


def test_profile_without_a_speed_has_no_share() -> None:
    with pytest.raises(BadInputError, match=r"the profile jetson-nano has no gflops.*give cpu"):
        speed.cpu_share("jetson-nano", DeviceProfile(cores=4), _calibration(HERE))


def test_summary_shows_the_spread() -> None:
    assert _calibration(HERE, 40.0).summary().splitlines() == [
        "One core of this host: 40.0 Gflop/s in double precision",
        "    5 products: lowest 20.0, median 40.0, highest 42.0",
        "    in training: convolutions 100.0 Gflop/s, depthwise 5.0,",
        "    matrix products 80.0, memory 4.0 GB/s",
        "    Abacus, 4 cores, torch 2.0",
        "    measured on 2026-01-31 12:05 UTC",
    ]


def test_summary_warns_of_a_wide_spread() -> None:
    wide = _calibration(HERE, 40.0).model_copy(update={"high": 60.0})
    assert not wide.is_steady
    assert wide.summary().splitlines()[-1].startswith("The speed varied")


def test_output_for_programs_has_one_level() -> None:
    told = _calibration(HERE, 40.0).flat().model_dump(mode="json", exclude_none=True)
    assert (told["gflops"], told["cpu"], told["steady"]) == (40.0, "Abacus", True)
    assert told["training"] == {"convolution": 100, "depthwise": 5, "matrix": 80, "memory": 4}
    assert told["measured"] == "2026-01-31T12:05:00Z"
