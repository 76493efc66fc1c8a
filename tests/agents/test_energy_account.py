"""The energy account of a device: closed forms, exact to the nanosecond and the femtojoule."""

from __future__ import annotations

import random

import pytest

from agents.energy import (
    BatteryConfig,
    ChargerConfig,
    EnergyAccount,
    EnergyConfig,
    Outlook,
    femtojoules,
    microwatts,
    to_joules,
)

SECOND = 10**9


def battery(capacity: float = 10.0, **settings: float) -> BatteryConfig:
    return BatteryConfig(capacity=capacity, **settings)  # type: ignore[arg-type]


def account(
    cell: BatteryConfig | None = None, charger: ChargerConfig | None = None, cpu: float | None = None
) -> EnergyAccount:
    return EnergyAccount(EnergyConfig(idle=2, busy=3, battery=cell, charger=charger), cpu)


def test_battery_of_a_device_at_a_duty_runs_empty_at_the_computed_nanosecond() -> None:
    one = account(battery(7.0))
    at, duty = 0, 300_000_007  # busy for 300,000,007 ns of each second
    while not one.must_switch:
        for work, length in ((one.busy, duty), (0, SECOND - duty)):
            ahead = one.outlook(work)
            assert ahead is not None
            at = min(ahead.at, one.at + length)
            one.advance(at, work * (at - one.at))
            if one.must_switch:
                break
    # Two whole seconds take 2 (2 s · 2 W + d · 3 W); the rest is drawn at 5 W while the device is busy
    # in the third second.
    two = 2 * (2_000_000 * SECOND + 3_000_000 * duty)
    assert at == 2 * SECOND + -(-(femtojoules(7.0) - two) // 5_000_000)
    assert one.stored <= 0 < one.stored + 5_000_000


def test_consumption_follows_from_cpu_time_and_bytes() -> None:
    one = EnergyAccount(EnergyConfig(idle=2, busy=3, sent=5.0, received=2.0), cpu=0.25)
    one.advance(4 * SECOND, one.work_of_cpu(SECOND))  # the whole share: busy for all 4 s
    assert one.consumed == femtojoules(4 * 5)
    assert one.transfer(sent=1_000_000, received=500_000) == femtojoules(6.0) == one.transferred
    assert to_joules(one.consumed) == 26
    assert one.level is None
    assert one.outlook() is None


@pytest.mark.parametrize(
    ("initial", "charging", "busy", "expected"),
    [
        (1.0, None, 0, Outlook(5 * SECOND, switches=True)),
        (1.0, None, 3, Outlook(2 * SECOND, switches=True)),
        (1.0, 4, 3, Outlook(10 * SECOND, switches=True)),
        (1.0, 5, 3, None),  # the charger covers the load
        (0.0, 5, 0, Outlook(0, switches=True)),
    ],
)
def test_power_off_is_at_the_first_nanosecond_at_the_threshold(
    initial: float, charging: float | None, busy: float, expected: Outlook | None
) -> None:
    one = account(battery(initial=initial))
    if charging is not None:
        one.charge(charging)
    assert one.outlook(microwatts(busy)) == expected
    assert one.switches_eventually(microwatts(busy)) == (expected is not None)


def test_device_without_power_returns_when_it_is_charged() -> None:
    charger = ChargerConfig(times=[0, 7], watts=[0, 3])
    one = account(battery(initial=0.05, power_off_at=0.1, return_at=0.4), charger)
    assert one.must_switch
    one.switch()
    ahead = one.outlook()
    assert ahead == Outlook(7 * SECOND, switches=False)
    one.advance(ahead.at)
    assert (one.consumed, one.stored) == (0, femtojoules(0.5))
    assert one.outlook() == Outlook(7 * SECOND + -(-femtojoules(3.5) // 3_000_000), switches=True)
    one.unplug()
    assert one.outlook() is None
    one.set_level(0.4)
    assert one.must_switch


def test_full_battery_takes_only_what_is_consumed() -> None:
    one = account(battery())
    one.charge(10.0)
    one.advance(3 * SECOND, one.busy * 3 * SECOND)
    assert one.stored == one.capacity
    assert one.supplied == one.consumed == femtojoules(15)


def test_absent_device_neither_consumes_nor_charges() -> None:
    one = account(battery(initial=0.5))
    one.charge(1.0)
    one.is_counted = False
    one.advance(100 * SECOND)
    assert (one.consumed, one.supplied, one.level, one.outlook()) == (0, 0, 0.5, None)
    one.is_counted = True
    one.advance(101 * SECOND)
    assert one.level == 0.4


def test_stored_energy_is_conserved_exactly() -> None:
    draw = random.Random(1)  # noqa: S311
    charger = ChargerConfig(times=[0, 1.3, 2.9], watts=[4.1, 0, 7.7], period=4.0)
    one = EnergyAccount(
        EnergyConfig(idle=2.3, busy=3.1, sent=0.7, battery=battery(20.0), charger=charger), cpu=0.3
    )
    initial, changed = one.stored, 0
    for _ in range(2000):
        if draw.random() < 0.05:
            before = one.stored
            one.set_level(draw.random())
            changed += one.stored - before
        cpu = draw.randrange(10**9)
        one.advance(one.at + draw.randrange(3 * 10**9), one.work_of_cpu(cpu))
        one.transfer(sent=draw.randrange(10**6))
        if one.must_switch:
            one.switch()
        assert one.stored == initial + one.supplied - one.consumed + changed <= one.capacity


def test_same_time_in_many_steps_gives_the_same_energy() -> None:
    charger = ChargerConfig(times=[0, 1.5], watts=[4, 1], period=3.0)
    whole, steps = (account(battery(initial=0.9), charger) for _ in range(2))
    whole.advance(2 * SECOND, whole.busy * 2 * SECOND)
    for at in range(0, 2 * SECOND + 1, 7_000_000):
        steps.advance(at, steps.busy * (at - steps.at))
    steps.advance(2 * SECOND, steps.busy * (2 * SECOND - steps.at))
    assert (whole.stored, whole.consumed) == (steps.stored, steps.consumed)


def test_eventual_power_off_is_known_without_waiting_for_it() -> None:
    days = ChargerConfig(times=[0, 43_200], watts=[4.0, 0], period=86_400)
    assert not account(battery(1e6), days).switches_eventually()  # 4 W for half a day carry 2 W
    weak = ChargerConfig(times=[0, 43_200], watts=[3.99, 0], period=86_400)
    assert account(battery(1e9), weak).switches_eventually()  # in thousands of days
    assert not account(battery(1e5), ChargerConfig(times=[0], watts=[2])).switches_eventually()
    empty = account(battery(initial=0.0), days)
    empty.switch()
    assert empty.switches_eventually()
    empty.charge(0.0)
    assert not empty.switches_eventually()
