"""Energy in the tables, states and charts: two devices of the run by hand, of which one powers off."""

from __future__ import annotations

import json
from math import inf, isnan
from pathlib import Path

import numpy as np
import pytest

from agents.device_actions import PowerOff, PowerOn, to_json
from agents.energy.messages import RoundEnergy
from agents.events import Acted, ClientStatus
from analysis import agreement, comparison, energy, export, metrics, summary
from analysis.charts import CHARTS
from analysis.device_states import timeline
from analysis.load import Run, load
from tests.analysis.conftest import with_records

CONSUMED = {"fast": [(0.0, 0.0), (2.0, 8.0), (10.0, 24.0)], "slow": [(0.0, 0.0), (10.0, 10.0)]}
"""Joules consumed by device: (device time in seconds, joules)."""


def switched(at: float, *, powered: bool) -> Acted:
    return Acted(at, "fast", "battery", 0.0, to_json(PowerOn() if powered else PowerOff()))


@pytest.fixture
def run(directory: Path) -> Run:
    lines = []
    for device, samples in CONSUMED.items():
        for at, joules in samples:
            battery = {"level": 1 - joules / 40, "supplied": 0.0, "charging": 0.0}
            figures = {"consumed": joules, "transferred": 0.0, "power": 1.0, "is_on": True}
            figures |= battery if device == "fast" else {}
            lines.append(json.dumps({"device": device, "at": 100 + at, "energy": figures}))
    with (directory / "telemetry.jsonl").open("a") as file:
        file.write("".join(line + "\n" for line in lines))
    return with_records(
        directory,
        RoundEnergy(1.5, "fast", 1, 2.5, "sent", 0.9),
        switched(6.0, powered=False),
        ClientStatus(6.2, "fast", "offline"),
        RoundEnergy(6.0, "fast", 3, 0.5, "lost", 0.5),
        switched(8.0, powered=True),
        ClientStatus(8.5, "fast", "ready"),
    )


def test_energy_of_a_round_is_joined_to_its_update(directory: Path, run: Run) -> None:
    """The updates of the run by hand have no number of their dispatch, so they are numbered here."""
    lines = (directory / "events.jsonl").read_text().splitlines()
    numbered = [
        line.replace('"sequence":1', '"sequence":1,"dispatch":1') if '"client":"fast"' in line else line
        for line in lines
    ]
    (directory / "events.jsonl").write_text("".join(line + "\n" for line in numbered))
    found = load(directory).updates[["client", "sequence", "energy_j"]]
    first = found[(found["client"] == "fast") & (found["sequence"] == 1)]
    assert first["energy_j"].tolist() == [2.5]
    assert found["energy_j"].isna().sum() == len(found) - 1


def test_device_without_power_has_a_state_of_its_own(run: Run) -> None:
    spans = timeline(run)
    own = spans[spans["device"] == "fast"]
    away = own[own["state"].isin(["unpowered", "offline"])]
    assert [*zip(away["state"], away["begin"], away["end"], strict=True)] == [
        ("unpowered", 6.0, 8.0),
        ("offline", 8.0, 8.5),
    ]
    assert summary.devices(run)["offline"]["fast"] == pytest.approx(0.25)
    assert "unpowered" in CHARTS["devices"]([run]).legend


def test_counted_energy_and_power_offs_by_device(run: Run) -> None:
    joules = energy.joules(run)
    assert joules[["fast", "slow"]].tolist() == [24.0, 10.0]
    assert isnan(joules["mute"])
    assert energy.power_offs(run).to_dict() == {"fast": 1, "slow": 0, "mute": 0}
    table = summary.devices(run)
    assert table["power_offs"].tolist() == [1, 0, 0]
    assert summary.groups(table)["energy"]["pi"] == 34.0


def test_energy_to_a_target_is_that_of_all_devices(run: Run) -> None:
    """The accuracy of 80 % is reached at 5 s: 8 J + 3/8 of 16 J, and 5 J."""
    assert metrics.reached(run, 0.8).others["energy"] == pytest.approx(14 + 5)
    (row,) = comparison.compare([run], 0.8)
    headings, (cells,) = comparison.texts([row])
    assert dict(zip(headings, cells, strict=True))["energy J"] == "19"
    x = CHARTS["accuracy-by-energy"]([run]).layers[0].columns["x"]
    assert np.allclose(x, [0, 19, 34])


def test_configurations_are_ranked_by_energy(directory: Path, run: Run) -> None:
    (joules,) = agreement.other_costs(["fedbuff"], [run], [run], 0.8)["energy"]["measured"]
    at = metrics.crossed(run, "accuracy", 0.8)
    assert joules == pytest.approx(8 + (at - 2) * 2 + at)
    unreached = agreement.other_costs(["fedbuff"], [run], [run], 0.9)["energy"]
    assert unreached["predicted"].tolist() == [inf]
    (directory / "telemetry.jsonl").unlink()
    assert agreement.other_costs(["fedbuff"], [run], [load(directory)], 0.8) == {}


def test_run_without_energy_shows_none(directory: Path) -> None:
    run = load(directory)
    assert isnan(metrics.reached(run, 0.8).others["energy"])
    assert "energy J" not in comparison.texts(comparison.compare([run], 0.8))[0]
    assert {"energy", "power_offs"}.isdisjoint(summary.devices(run).columns)
    for name in ("accuracy-by-energy", "loss-by-energy", "battery-over-time", "power-over-time"):
        assert CHARTS[name]([run]).is_bare


def test_simulated_power_has_no_gaps_between_rare_samples(directory: Path) -> None:
    """A device to which nothing happens has samples only at evaluations."""
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest.pop("monotonic_zero", None)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    times = [*(0.1 * k for k in range(20)), 2.0, 2.0, 5.0, 9.0]
    lines = [
        {"device": "fast", "at": at, "energy": {"consumed": 3.0 * at, "transferred": 0.0, "power": 3.0}}
        for at in times
    ]
    (directory / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chart = CHARTS["power-over-time"]([load(directory)])
    (line,) = (layer.columns for layer in chart.layers if layer.mark == "line")
    assert line["y"] == pytest.approx(np.full(len(line["y"]), 3.0))
    assert line["x"].tolist() == [1.0, 3.0, 5.0, 7.0]


def test_level_and_power_are_drawn_and_traced(run: Run) -> None:
    level = CHARTS["battery-over-time"]([run])
    assert [layer.name for layer in level.layers if layer.mark == "line"] == ["fast"]
    traced = [one for one in export.trace_events(run) if one["name"] == "fast battery (%)"]
    assert [one["args"]["value"] for one in traced][-2:] == pytest.approx([80, 40])
    assert any(one["name"] == "slow power (W)" for one in export.trace_events(run))
