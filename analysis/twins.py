"""Comparison of a run with that of its twin, whose devices have the first run's measured figures;
without I/O and clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite, nan

import numpy as np
import pandas as pd

from analysis import agreement, metrics
from analysis.agreement import RankAgreement, RankedConfiguration
from analysis.load import Run


@dataclass(frozen=True, slots=True)
class TwinRow:
    """A figure of a run and of its twin."""

    name: str
    """Meaning, with the unit."""
    original: float
    """NaN if unknown."""
    twin: float
    """NaN if unknown."""
    difference: float
    """Share of the original; NaN if a value is unknown, or the original is 0."""


def figures(original: Run, twin: Run, target: float | None) -> Iterator[TwinRow]:
    """Whole runs. `target`: accuracy (share) to reach; None for no time to a target."""

    def row(name: str, first: float, second: float) -> TwinRow:
        first, second = (float(value) if isfinite(value) else nan for value in (first, second))
        return TwinRow(name, first, second, second / first - 1 if first else nan)

    both = (original, twin)
    yield row("updates", *(len(run.updates) for run in both))
    yield row("updates per s", *(len(run.updates) / (run.duration or nan) for run in both))
    yield row("staleness, mean", *(float(run.updates["staleness"].mean()) for run in both))
    late = (float(run.updates["staleness"].quantile(0.9)) for run in both)
    yield row("staleness, 90th percentile", *late)
    if target is not None:
        times = (metrics.crossed(run, "accuracy", target) for run in both)
        yield row(f"time to {target:.0%}, s", *times)
    last = [run.evaluations.tail(1) for run in both]
    for name in ("accuracy", "loss"):
        values = [float(one[name].iloc[0]) if len(one) else nan for one in last]
        if isfinite(values[0]):
            yield row(name, *values)


def of_devices(original: Run, twin: Run) -> pd.DataFrame:
    """A row per device of the original run: `device`; `updates`, `staleness` (mean, in versions),
    `round` (mean seconds from the dispatch to the arrival of the update), each for the original and,
    with `twin_` in front, for the twin. NaN if there is no update."""
    table = pd.DataFrame({"device": [str(name) for name in original.devices["device"]]})
    for prefix, run in (("", original), ("twin_", twin)):
        updates = run.updates.assign(round=run.updates["arrived"] - run.updates["dispatched"])
        own = updates.groupby(updates["client"].astype(str))
        counts = own.size().reindex(table["device"]).fillna(0).to_numpy(np.int64)
        table[f"{prefix}updates"] = counts
        for name in ("staleness", "round"):
            table[f"{prefix}{name}"] = own[name].mean().reindex(table["device"]).to_numpy()
    return table


def device_ranks(
    original: Run, twin: Run, table: pd.DataFrame
) -> RankAgreement[RankedConfiguration] | None:
    """Ranks of devices by seconds of the run per update, as `agreement` returns them, with the twin in
    place of virtual time. None for fewer than two devices. `table`: result of `of_devices`."""
    if len(table) < 2:
        return None
    counts = table[["twin_updates", "updates"]].to_numpy(np.float64)
    lasted = np.array([twin.duration, original.duration])
    costs = np.divide(lasted, counts, out=np.full_like(counts, inf), where=counts > 0)
    frame = pd.DataFrame(
        {"configuration": table["device"], "virtual_cost": costs[:, 0], "real_cost": costs[:, 1]}
    )
    return agreement.agreement(frame)
