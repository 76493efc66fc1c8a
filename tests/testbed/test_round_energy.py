"""Energy of rounds from the samples of devices and the records of a run, against numbers by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents import events
from agents.wire.messages import EnergyFigures, EnergyOrder, EnergySample
from testbed.plan import HostResources, plan
from testbed.run.round_energy import RoundEnergies, last_figures
from testbed.rundir.tail import Samples
from testbed.topology import parse
from tests.testbed import record_factories

MODEL_BYTES = 2_000_000


def rounds() -> RoundEnergies:
    topology = parse(
        "name: t\ntask: {name: digits-logreg, local: {steps: 1}}\nrule: {name: fedavg}\n"
        "devices: [{name: pi, cpu: 0.2, energy: {idle: 1W, core: 1W, sent: 5J/MB, received: 2J/MB}},"
        " {name: mains, cpu: 0.2}]\nstop: {after: 10s}\ndilation: 2\n"
    )
    made = RoundEnergies(plan(topology, "docker", HostResources((0, 1), 2**34)), MODEL_BYTES)
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


def test_energy_of_an_earlier_segment_is_its_last_sample(tmp_path: Path) -> None:
    lines = [
        {"device": "pi", "at": 1.0, "energy": {"consumed": 1.0, "transferred": 0.0, "power": 1.0}},
        {"device": "pi", "at": 2.0, "energy": {"consumed": 5.0, "transferred": 2.0, "power": 1.0}},
        {"device": "pi", "at": 3.0, "cpu": 1.0, "memory": 5},
        {"device": "pi", "at": 4.0, "energy": {"consumed": "no"}},
    ]
    file = tmp_path / "telemetry.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    earlier = last_figures(Samples(file))
    assert earlier == {"pi": EnergyFigures(consumed=5.0, transferred=2.0, power=1.0)}
    made = rounds()
    (order,) = made.start(100.0, 10.0, earlier)
    assert (order.at, order.energy) == (10.0, earlier["pi"])
    assert made.consumed == 0.0
