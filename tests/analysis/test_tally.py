"""The fold of a run's records as they come, against the tables of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import testbed
from agents import events
from analysis.energy import EnergyUse
from analysis.load import load
from analysis.tally import Tally

TOPOLOGY = {
    "name": "tallied",
    "task": {"name": "digits-logreg", "local": {"steps": 2, "lr": 0.1}},
    "rule": {"name": "fedbuff", "buffer_size": 3},
    "devices": [
        {"name": "pi", "count": 3, "timing": {"distribution": "exponential", "mean": "1s"}},
        {
            "name": "phone",
            "timing": "2s",
            "energy": {
                "idle": "1W",
                "core": "2W",
                "charger": "2W",
                "battery": {
                    "capacity": "20J",
                    "initial": "20%",
                    "power_off_at": "5%",
                    "return_at": "50%",
                },
            },
        },
    ],
    "scenario": [{"at": "5s", "crash": "pi-1", "restart_after": "2s"}],
    "evaluate": {"every": "2s"},
    "stop": {"after": "30s"},
}


@pytest.mark.parametrize("seed", range(3))
def test_totals_are_those_of_the_tables(tmp_path: Path, seed: int) -> None:
    path = testbed.simulate({**TOPOLOGY, "seed": seed}, runs=tmp_path).path
    tally, run = Tally({}), load(path)
    for record in events.read(path / "events.jsonl"):
        tally.add(record)
    by_client = run.updates.groupby(run.updates["client"].astype(str))
    devices = {name: one for name, one in tally.devices.items() if one.updates}
    for field, table in (
        ("updates", by_client.size()),
        ("bytes", by_client["bytes"].sum()),
        ("staleness_sum", by_client["staleness"].sum()),
        ("staleness", by_client["staleness"].last()),
    ):
        assert {name: getattr(one, field) for name, one in devices.items()} == table.to_dict(), field
    assert dict(tally.staleness) == run.updates["staleness"].value_counts().to_dict()
    assert (tally.updates, tally.bytes) == (len(run.updates), run.updates["bytes"].sum())
    assert (tally.version, tally.rejected) == (run.versions["version"].max(), len(run.rejected))
    totals = {name: total for part in tally.parts for name, total in part.totals().items()}
    assert totals["round_joules"] == pytest.approx(run.rounds["energy_j"].sum())
    power_offs = run.scenario["action"] == "poweroff"
    of_phone = tally.devices["phone"].part(EnergyUse).power_offs
    assert (totals["power_offs"], of_phone) == (power_offs.sum(),) * 2
    assert power_offs.any()
    assert not run.energy.duplicated().any()
