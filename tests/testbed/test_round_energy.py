"""Energy of rounds from the samples of devices and the records of a run, against numbers by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents import events
from agents.energy.messages import EnergyFigures, EnergyOrder, EnergySample, RoundEnergy
from testbed.energy.controlled import RoundEnergies, energy_samples
from testbed.plan import HostResources, plan
from testbed.rundir.live_files import Samples
from testbed.topology import parse
from tests.testbed import record_factories

MODEL_BYTES = 2_000_000


def without_start() -> RoundEnergies:
    topology = parse(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\n"
        "devices: [{name: pi, cpu: 0.2, energy: {idle: 1W, core: 1W, sent: 5J/MB, received: 2J/MB}},"
        " {name: mains, cpu: 0.2}]\nstop: {after: 10s}\ndilation: 2\n"
    )
    return RoundEnergies(plan(topology, "docker", HostResources((0, 1), 2**34)), MODEL_BYTES)


def rounds() -> RoundEnergies:
    made = without_start()
    (order,) = made.start(100.0, 0.0, {})
    assert (order.device, order.epoch, order.at, order.energy) == ("pi", 100.0, 0.0, None)
    return made


def sample(
    made: RoundEnergies,
    at: float,
    consumed: float,
    transferred: float = 0.0,
    level: float | None = None,
) -> None:
    """Add a sample of device time `at` in seconds."""
    figures = EnergyFigures(consumed=consumed, transferred=transferred, power=0.0, level=level)
    made.sample(EnergySample("pi", 100.0 + 2 * at, figures))


def update(
    client: str, dispatch: int, *, train_start: float, train_end: float, sent: float, size: int
) -> events.UpdateApplied:
    made = record_factories.update(client, sent, dispatch=dispatch)
    return replace(made, train_start=train_start, train_end=train_end, sent=sent, bytes=size)


def recorded(orders: list[EnergyOrder]) -> list[Any]:
    """Return time, dispatch, outcome and energy of orders that are about `pi`."""
    assert {order.client for order in orders} == {"pi"}
    return [(order.at, order.dispatch, order.outcome, order.energy_j) for order in orders]


def test_round_has_its_model_its_training_and_its_update() -> None:
    made = rounds()
    sample(made, 1.0, 3.0, 1.0)  # 2 J without transfers
    made.record(update("pi", 7, train_start=0.5, train_end=1.5, sent=1.75, size=100_000))
    made.record(update("mains", 8, train_start=0.5, train_end=1.5, sent=1.75, size=100_000))
    assert made.orders() == []  # a later sample is needed
    sample(made, 2.0, 8.0, 2.0)  # 4 J per second
    assert recorded(made.orders()) == [(1.75, 7, "sent", pytest.approx(1 + 2 + 4 + 0.5))]
    assert made.orders() == []
    assert made.consumed == 8.0


def test_last_rounds_are_extrapolated_when_the_run_is_over() -> None:
    made = rounds()
    sample(made, 1.0, 2.0)
    made.record(update("pi", 7, train_start=0.5, train_end=1.5, sent=1.5, size=0))
    assert recorded(made.orders(is_over=True)) == [(1.5, 7, "sent", pytest.approx(2 + 4))]


def test_round_has_the_level_of_the_battery_when_its_update_is_sent() -> None:
    made = rounds()
    sample(made, 1.0, 3.0, level=0.5)
    sample(made, 2.0, 8.0, level=0.3)
    made.record(update("pi", 7, train_start=1.0, train_end=1.5, sent=1.75, size=0))
    (order,) = made.orders()
    assert order.level == pytest.approx(0.35)


def test_lost_round_has_what_was_consumed_until_its_end() -> None:
    made = rounds()
    made.record(update("pi", 1, train_start=0.0, train_end=1.0, sent=1.0, size=0))
    made.record(events.RoundUnfinished(3.0, "pi", 0, 0.5, 3.0, 2))
    made.record(events.UpdateRejected(4.0, "pi", "not finite", 3))
    made.record(events.RoundUnfinished(4.0, "pi", 0, 3.0, 4.0, 3))
    sample(made, 4.0, 8.0)  # 2 W
    assert recorded(made.orders()) == [
        (1.0, 1, "sent", pytest.approx(2 + 4)),
        # From the end of the round before, as its own training began later.
        (3.0, 2, "lost", pytest.approx(2 * 2 + 4)),
        (4.0, 3, "sent", pytest.approx(2 + 4 + 10)),
    ]


def test_round_of_an_earlier_segment_has_the_energy_of_its_own_time(tmp_path: Path) -> None:
    """Its update is applied only after the run was resumed, from a moment before the last samples. A
    round that has its record gets no other."""
    lines: list[dict[str, Any]] = [
        {"monotonic_zero": 1000.0},
        *({"device": "pi", "at": 10.0 + 2 * at, "energy": energy(3.0 * at)} for at in range(6)),
        {"device": "pi", "at": 30.0, "cpu": 1.0, "memory": 5},
        {"device": "pi", "at": 30.0, "energy": {"consumed": "no"}},
    ]
    file = tmp_path / "telemetry.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    earlier = Samples(file)
    samples = [*energy_samples(earlier)]
    assert (earlier.zero, len(samples)) == (1000.0, 6)
    made = without_start()
    past: list[events.Record] = [
        events.RunStarted(0.0, 1010.0, ("pi",), ()),
        update("pi", 1, train_start=1.0, train_end=2.0, sent=2.0, size=0),
        RoundEnergy(2.0, "pi", 1, 7.0, "sent"),
        events.RoundUnfinished(3.0, "pi", 0, 2.5, 3.0, 2),
        RoundEnergy(3.0, "pi", 2, 1.5, "lost"),
    ]
    made.resume(past, samples, 1000.0)
    (order,) = made.start(100.0, 4.0, {"pi": samples[-1].energy})
    assert (order.at, order.energy) == (4.0, samples[-1].energy)
    assert made.consumed == 0.0
    made.record(update("pi", 3, train_start=3.0, train_end=3.5, sent=3.5, size=0))
    assert recorded(made.orders()) == [(3.5, 3, "sent", pytest.approx(1.5 + 4))]
    sample(made, 5.0, 17.0)  # 2 J since its last sample, which said 15 J
    made.record(update("pi", 4, train_start=4.0, train_end=5.0, sent=5.0, size=0))
    assert recorded(made.orders()) == [(5.0, 4, "sent", pytest.approx(2 + 4))]


def energy(consumed: float) -> dict[str, float]:
    return {"consumed": consumed, "transferred": 0.0, "power": 1.0}


@pytest.mark.parametrize(
    ("samples", "last", "ended", "expect"),
    [
        ([(1.0, 2.0), (2.0, 5.0)], None, (), 6.5),  # 3 W go on for 0.5 s
        ([(1.0, 2.0), (2.0, 5.0)], None, ("pi",), 5.0),
        ([(1.0, 2.0)], None, (), 5.0),  # since the start
        ([(1.0, 2.0), (2.0, 5.0)], (3.0, 6.0), (), 5.5),
        ([(1.0, 2.0), (2.6, 5.2)], None, (), 5.0),  # the run is over, but the device has not heard of it
        ([(0.1, 2.0), (0.2, 3.0)], None, (), 5.0),  # nothing was heard for long: 0.2 s more
    ],
)
def test_energy_is_recorded_up_to_the_end_of_the_run(
    samples: list[tuple[float, float]],
    last: tuple[float, float] | None,
    ended: tuple[str, ...],
    expect: float,
) -> None:
    """Which is at 2.5 s. `last` is the sample of a device when its client has ended."""
    made = rounds()
    for at, consumed in samples:
        sample(made, at, consumed)
    if last is not None:
        for at, consumed in (last, (4.0, 60.0)):
            figures = EnergyFigures(consumed=consumed, transferred=0.0, power=0.0)
            made.sample(EnergySample("pi", 100.0 + 2 * at, figures), is_over=True)
    (found,) = made.last_samples(2.5, ended)
    assert (found.device, found.at) == ("pi", 105.0)
    assert found.energy.consumed == pytest.approx(expect)
    assert made.consumed == found.energy.consumed
