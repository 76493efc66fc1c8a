"""The benchmark of shared links: a run in virtual time stands for the one in containers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import testbed
from analysis.load import Run
from benchmarks.segments import Measurement, figures, loaded, replay, table
from testbed.plan import HostResources, plan
from testbed.plan.catalog import read
from testbed.plan.costs import DIGITS
from testbed.topology import parse

TOPOLOGY: dict[str, Any] = {
    "name": "t",
    "seed": 1,
    "task": {"name": "digits-logreg", "local": {"steps": 5, "batch_size": 16, "lr": 0.02}},
    "rule": {"name": "fedasync"},
    "network": {
        "backhaul": {"up": "100kbit", "down": "200kbit", "rtt": "10ms"},
        "cell": {"parent": "backhaul", "up": "80kbit", "rtt": "10ms"},
    },
    "devices": [
        {"name": "a", "count": 2, "timing": "500ms", "segment": "cell", "link": {"up": "50kbit"}},
        {"name": "b", "count": 2, "timing": "700ms", "segment": "backhaul"},
    ],
    "runtime": {"name": "virtual"},
    "virtual": {"step_time": "1ms", "packets": True},
    "evaluate": {"every": "10s"},
    "stop": {"after": "40s"},
}


def _replay(run: Run, topology: dict[str, Any]) -> pd.DataFrame:
    real = replace(run, updates=run.updates.assign(bytes=run.updates["bytes"] + DIGITS))
    parsed = parse(yaml.safe_dump(topology))
    return replay(real, parsed, plan(parsed, "virtual", HostResources((0, 1), 2**34), read(parsed)))


@pytest.mark.parametrize("share", ["0%", "50%"])
def test_transfers_of_a_virtual_run_are_repeated_exactly(share: str, tmp_path: Path) -> None:
    topology = loaded(TOPOLOGY, share, "64kB")
    run = testbed.simulate(topology, runs=tmp_path)
    transfers = _replay(run, topology)
    assert len(transfers) == 2 * len(run.updates) > 100
    # Except where messages begin at the same moment, and beside models that reach no update by the end.
    assert np.isclose(transfers["replayed"], transfers["real"], rtol=1e-4).mean() > 0.95
    early = (transfers["begin"] < 2).sum()
    found = figures(
        [Measurement(run, [run, run], transfers, Counter({"packets dropped by segments": 3}))]
    )
    assert found["updates per device, a"] == found["time per update, b"] == "+0.0 ± 0.0 %"
    row = f"| packets dropped by segments | 3 in {len(transfers) - early} transfers | – |"
    assert row in [*table({"alone": found, "no run": {}})]


def test_slower_transfers_show_in_means_and_medians(tmp_path: Path) -> None:
    run = testbed.simulate(TOPOLOGY, runs=tmp_path)
    transfers = _replay(run, TOPOLOGY)
    slower = transfers.assign(real=1.1 * transfers["replayed"])
    found = figures([Measurement(run, [run], slower, Counter())])
    assert found["downloads of a, mean"] == "+10.0 ± 0.0 %"
    assert found["uploads of b, median of ratios"] == "+10.0 %"


def test_figures_are_compared_with_the_mean_of_the_virtual_runs(tmp_path: Path) -> None:
    """The other run lasts half as long: its devices have about half of the updates."""
    run = testbed.simulate(TOPOLOGY, runs=tmp_path)
    half = testbed.simulate(TOPOLOGY, runs=tmp_path, stop={"after": "20s"})
    found = figures([Measurement(run, [run, half], _replay(run, TOPOLOGY), Counter())])
    difference, spread = found["updates per device, a"].removesuffix(" %").split(" ± ")
    assert float(difference) == pytest.approx(100 / 3, abs=3)
    # 1 and 0.5 of the run's updates: a standard deviation of 0.354, of a figure against the mean of two.
    assert float(spread) == pytest.approx(196 * 0.354 * 1.5**0.5 / 0.75, rel=0.1)
