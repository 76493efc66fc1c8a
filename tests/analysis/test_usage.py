from __future__ import annotations

from math import isnan, nan

import pytest

from analysis.tally import DeviceUsage


def test_shares_and_rates_cover_the_last_five_seconds() -> None:
    usage = DeviceUsage()
    assert isnan(usage.share(0.0))
    for at in range(11):
        values = {"cpu": 0.25 * at, "sent": 1000 * at, "received": 500 * at * at}
        usage.add(float(at), values)
    assert usage.share(10.0) == pytest.approx(0.25)
    assert usage.up(10.0) == 8000.0
    assert usage.down(10.0) == pytest.approx(8 * 500 * (100 - 25) / 5)
    assert usage.latest == pytest.approx(0.25)
    assert isnan(usage.share(13.5))  # nothing came for more than three seconds


def test_rates_need_byte_counters() -> None:
    usage = DeviceUsage()
    usage.add(1.0, {"cpu": 1.0})
    usage.add(2.0, {"cpu": 1.5})
    assert usage.share(2.0) == 0.5
    assert isnan(usage.up(2.0))


def test_restarted_device_counts_from_zero() -> None:
    usage = DeviceUsage()
    for at, cpu in [(1.0, 7.0), (2.0, 7.5), (3.0, 0.1), (4.0, 0.3)]:
        usage.add(at, {"cpu": cpu})
    assert usage.share(4.0) == pytest.approx(0.2)


@pytest.mark.parametrize("cpu", [nan, -1.0, "much", None])
def test_invalid_samples_are_skipped(cpu: object) -> None:
    usage = DeviceUsage()
    usage.add(1.0, {"cpu": 1.0})
    usage.add(2.0, {"cpu": cpu})
    usage.add(2.0, {})
    usage.add(3.0, {"cpu": 2.0})
    assert usage.share(3.0) == 0.5
