"""The energy meter of a device in real time, against numbers by hand."""

from __future__ import annotations

import math

import pytest

from agents.device.part import CounterReading
from agents.energy import BatteryConfig, ChargerConfig, EnergyConfig
from agents.energy.init import STEP, EnergyMeter
from agents.energy.messages import Charge, EnergyFigures, EnergyStart, SetBattery, Unplug
from agents.timing.nanoseconds import SECOND, Nanoseconds

EPOCH = 100 * SECOND
CONFIG = EnergyConfig(idle=2.0, busy=3.0, sent=5.0, received=1.0, battery=BatteryConfig(capacity=40.0))


def at(seconds: float, cpu: float = 0.0, sent: int = 0, received: int = 0) -> CounterReading:
    """CounterReading at `seconds` of host time since the start of the run clock."""
    return CounterReading(EPOCH + round(seconds * SECOND), round(cpu * SECOND), sent, received)


def started(
    config: EnergyConfig = CONFIG, dilation: float = 1.0, energy: EnergyFigures | None = None
) -> EnergyMeter:
    meter = EnergyMeter("pi", config, cpu=0.5, dilation=dilation)
    meter.start(EnergyStart("pi", EPOCH / SECOND, energy=energy))
    meter.update(at(0))
    return meter


def figures(meter: EnergyMeter) -> EnergyFigures:
    return meter.sample(0.0).energy


def test_consumption_of_time_work_and_bytes() -> None:
    meter = started()
    meter.update(at(2, cpu=0.25, sent=1_000_000, received=2_000_000))
    # 2 s × 2 W, half of the share for 1 s of 2 s × 3 W, 1 MB × 5 J and 2 MB × 1 J
    assert figures(meter).consumed == pytest.approx(4 + 1.5 + 7)
    assert figures(meter).transferred == pytest.approx(7)
    assert figures(meter).level == pytest.approx((40 - 12.5) / 40)


def test_power_is_the_mean_since_the_last_sample() -> None:
    meter = started()
    meter.update(at(2))
    assert figures(meter).power == pytest.approx(2)
    meter.update(at(4, cpu=1.0))  # the whole share
    assert figures(meter).power == pytest.approx(5)
    assert figures(meter).power == 0  # no time has passed


def test_counters_from_before_the_run_clock_do_not_count() -> None:
    meter = EnergyMeter("pi", CONFIG, cpu=0.5)
    for seconds in (-0.3, -0.2, -0.1, 0.1):
        meter.update(at(seconds, cpu=9 + seconds, sent=77))
    meter.start(EnergyStart("pi", EPOCH / SECOND))
    meter.update(at(1, cpu=9.4, sent=77))
    assert figures(meter).consumed == pytest.approx(2 + 3 * 0.5 / 0.5)  # from the reading at −0.1 s on


def test_start_of_a_client_counts_as_a_busy_device() -> None:
    meter = started()
    meter.update(at(2, cpu=2.0), is_starting=True)  # without limit: four times its share
    assert figures(meter).consumed == pytest.approx(2 * (2 + 3))


def test_counters_of_a_new_process_start_again() -> None:
    meter = started()
    meter.update(at(1, cpu=0.5))
    meter.update(at(2, cpu=0.1))
    meter.update(at(3, cpu=0.2))
    assert figures(meter).consumed == pytest.approx(3 * 2 + (0.5 + 0.1) / 0.5 * 3)


def test_dilation_stretches_the_time_and_not_the_energy() -> None:
    meter = started(dilation=10.0)
    meter.update(at(20, cpu=1.0))  # 2 s of device time, the whole share
    assert figures(meter).consumed == pytest.approx(10)
    assert meter.next_look(at(20).at) == pytest.approx(EPOCH + 80 * SECOND)  # 30 J at 5 W


def test_looks_reach_the_threshold_within_a_step() -> None:
    """The device uses less than its share, so that each look is too early."""
    meter, now, looks = started(), EPOCH, 0
    while meter.switch() is None:
        now = round(meter.next_look(now))
        looks += 1
        seconds = (now - EPOCH) / SECOND
        meter.update(at(seconds, cpu=0.1 * seconds))
    assert 40 / (2 + 0.6) <= seconds <= 40 / (2 + 0.6) + STEP / SECOND
    assert looks < 40


def test_powered_off_device_consumes_nothing_and_returns_when_charged() -> None:
    meter = started(
        EnergyConfig(
            idle=2.0,
            busy=0.0,
            battery=BatteryConfig(capacity=40.0, initial=0.05, return_at=0.5),
            charger=ChargerConfig(times=[0.0, 10.0], watts=[0.0, 4.0]),
        )
    )
    meter.update(at(1))
    assert meter.switch() is False
    meter.update(at(9, cpu=5.0, sent=1000))
    assert figures(meter).consumed == pytest.approx(2)
    assert meter.switch() is None
    assert meter.next_look(at(9).at) == at(10).at  # the charger's power changes
    meter.update(at(10))
    assert meter.next_look(at(10).at) == at(15).at  # 20 J at 4 W
    meter.update(at(15))
    assert meter.switch() is True
    assert figures(meter).is_on


def test_actions_on_the_battery() -> None:
    meter = started()
    meter.account.act(SetBattery(0.5))
    meter.account.act(Charge(3.0))
    meter.update(at(10))
    assert figures(meter).level == pytest.approx((20 + 30 - 20) / 40)
    assert figures(meter).charging == 3
    meter.account.act(Unplug())
    assert figures(meter).charging == 0


def test_absent_device_is_not_counted() -> None:
    meter = EnergyMeter("pi", CONFIG, cpu=0.5, is_present=False)
    meter.start(EnergyStart("pi", EPOCH / SECOND))
    meter.update(at(5, cpu=1.0, sent=10**6))
    assert figures(meter).consumed == 0
    assert meter.next_look(at(5).at) == math.inf


def test_resumed_run_continues_with_the_energy_of_its_last_sample() -> None:
    before = EnergyFigures(
        consumed=41.0, transferred=1.0, power=0.0, is_on=False, level=0.05, supplied=3.0, charging=0.0
    )
    meter = started(energy=before)
    assert meter.switch() is False  # the client has to be ended: all clients start with a resumed run
    meter.update(at(1))
    assert figures(meter) == before


def test_restarted_aggregator_moves_the_zero_of_device_time() -> None:
    """For the run clock, the time without an aggregator does not pass."""
    meter = started()
    meter.update(at(4))
    meter.start(EnergyStart("pi", EPOCH / SECOND + 3, at=1.0))
    meter.update(at(6))
    assert figures(meter).consumed == pytest.approx(8)  # device time 3 s: before the last reading
    meter.update(at(9))
    assert figures(meter).consumed == pytest.approx(12)


@pytest.mark.parametrize("config", [EnergyConfig(idle=1.0, busy=0.0), CONFIG])
def test_nothing_happens_before_the_run_clock(config: EnergyConfig) -> None:
    meter = EnergyMeter("pi", config, cpu=0.5)
    now: Nanoseconds = EPOCH
    meter.update(CounterReading(now, 0))
    assert not meter.is_counting
    assert (meter.switch(), meter.next_look(now)) == (None, math.inf)
