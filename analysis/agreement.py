"""Agreement of two runs: of two runtimes on a ranking of configurations, and of a run with its twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf, isfinite, isnan, nan, sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis import metrics
from analysis.features import COSTS
from analysis.load import Run
from analysis.part import ProgressFigure

_RESAMPLES = 2000
_MIN_CONFIGURATIONS = 3
"""Minimum number of configurations that can be resampled. With two configurations, a resample has the
same tau as the original, or no tau if one configuration was drawn twice."""

Costs = npt.NDArray[np.float64]
"""Seconds or another cost: a row per configuration or seed, a column per runtime."""


@dataclass(frozen=True, slots=True)
class RankedConfiguration:
    """Configuration or device with its mean costs over seeds and its ranks: as predicted, by virtual
    time or by twins, and as measured, with the real runtime or in the runs of the twins."""

    name: str
    predicted: float
    """Seconds, or another cost, to the target; seconds per update of a device. Infinite if a seed did
    not reach the target."""
    measured: float
    """Like `predicted`."""
    predicted_rank: int
    """From 1. Equal costs have the best of the ranks that they share: 1, 2, 2, 4."""
    measured_rank: int


@dataclass(frozen=True, slots=True)
class RankAgreement:
    configurations: Sequence[RankedConfiguration]
    """In the order of their predicted rank."""
    tau: float
    """Kendall's tau-b: 1 for the same order, −1 for the reversed one; NaN if all costs are equal in one
    of the two."""
    low: float
    """Lower end of the 95% interval (percentiles of a bootstrap); NaN if there is no interval."""
    high: float
    """Upper end of the 95% interval; NaN if there is no interval."""
    resampled: Literal["seeds", "configurations"]
    """Seeds if every configuration has several, else configurations."""
    swapped: Sequence[tuple[str, str]]
    """The first of a pair has the lower predicted cost, but the higher measured one. Equal costs are no
    swap."""


def times(
    configurations: Sequence[str], virtual: Sequence[Run], real: Sequence[Run], target: float
) -> pd.DataFrame:
    """Return the table for `agreement`, with the times at which the runs reached the accuracy `target`.

    `virtual` and `real` have one run for each entry of `configurations`. Costs are interpolated between
    evaluations: else times in the same interval would be equal, or noise would decide their order.
    """
    return _table(configurations, virtual, real, lambda run: metrics.crossed(run, "accuracy", target))


def other_costs(
    configurations: Sequence[str], virtual: Sequence[Run], real: Sequence[Run], target: float
) -> dict[str, pd.DataFrame]:
    """Like `times`, with further costs of all devices until the accuracy `target` (`features.COSTS`), by
    name. Costs that a run did not count are left out."""

    def until(cost: ProgressFigure, run: Run) -> float:
        at = metrics.crossed(run, "accuracy", target)
        return float(cost.at(run, at)) if at < inf else inf

    return {
        name: _table(configurations, virtual, real, partial(until, cost))
        for name, cost in COSTS.items()
        if not any(isnan(float(cost.at(run, 0.0))) for run in (*virtual, *real))
    }


def _table(
    configurations: Sequence[str],
    virtual: Sequence[Run],
    real: Sequence[Run],
    cost: Callable[[Run], float],
) -> pd.DataFrame:
    costs = {
        "predicted": [cost(run) for run in virtual],
        "measured": [cost(run) for run in real],
    }
    return pd.DataFrame({"configuration": configurations, **costs})


def agreement(costs: pd.DataFrame) -> RankAgreement:
    """`costs` has a row for each seed of a configuration. Its columns are `configuration`,
    `predicted` and `measured`: seconds or another cost to the target, infinite or NaN if it was not
    reached. Raises ValueError for fewer than two configurations."""
    columns = costs[["predicted", "measured"]].astype(np.float64).fillna(inf)
    runs = {
        str(name): own.to_numpy(np.float64)
        for name, own in columns.groupby(costs["configuration"], sort=False)
    }
    if len(runs) < 2:
        raise ValueError(f"expected at least 2 configurations to rank, found {len(runs)}")
    means = np.array([own.mean(axis=0) for own in runs.values()])
    ranks = _ranks(means)
    configurations = [
        RankedConfiguration(name, float(mean[0]), float(mean[1]), int(rank[0]), int(rank[1]))
        for name, mean, rank in zip(runs, means, ranks.T, strict=True)
    ]
    configurations.sort(key=lambda one: one.predicted_rank)
    seeds = all(len(own) > 1 for own in runs.values())
    low, high = _interval(_seeds(list(runs.values())) if seeds else _configurations(means))
    return RankAgreement(
        tuple(configurations),
        _tau(means),
        low,
        high,
        "seeds" if seeds else "configurations",
        tuple(
            (one.name, other.name)
            for one, other in combinations(configurations, 2)
            if one.predicted_rank < other.predicted_rank and one.measured_rank > other.measured_rank
        ),
    )


def _ranks(costs: Costs) -> npt.NDArray[np.int64]:
    """One row per runtime. Equal costs have the same rank."""
    ranks: npt.NDArray[np.int64] = 1 + (_signs(costs) > 0).sum(axis=2)
    return ranks


def _signs(costs: Costs) -> npt.NDArray[np.int64]:
    """Return for each runtime and each pair of configurations whether the first costs more (1), less
    (-1), or as much (0). Costs may be infinite."""
    first, second = costs.T[:, :, None], costs.T[:, None, :]
    signs: npt.NDArray[np.int64] = (first > second).astype(np.int64) - (first < second)
    return signs


def _tau(costs: Costs) -> float:
    """Kendall's tau-b; NaN if all costs in one of the runtimes are equal. For few configurations,
    `scipy.stats.kendalltau` takes much longer, and SciPy is slow to import."""
    virtual, real = _signs(costs)
    different = np.count_nonzero(virtual) * np.count_nonzero(real)
    if not different:
        return nan
    return round(float((virtual * real).sum()) / sqrt(different), 12)  # a tau of 1 is exactly 1


Resample = Callable[[np.random.Generator], Costs]


def _seeds(runs: list[Costs]) -> Resample:
    """Resample the seeds of each configuration, the same ones for both runtimes."""
    return lambda random: np.array(
        [own[random.integers(len(own), size=len(own))].mean(axis=0) for own in runs]
    )


def _configurations(means: Costs) -> Resample | None:
    """Resample the configurations; None if there are fewer than `_MIN_CONFIGURATIONS`."""
    count = len(means)
    if count < _MIN_CONFIGURATIONS:
        return None
    return lambda random: means[random.integers(count, size=count)]


def _interval(resample: Resample | None) -> tuple[float, float]:
    """95% interval of tau; NaN if `resample` is None."""
    if resample is None:
        return nan, nan
    random = np.random.default_rng(0)  # the same result each time
    taus = np.array([_tau(resample(random)) for _ in range(_RESAMPLES)])
    known = taus[~np.isnan(taus)]  # NaN if all costs in one of the runtimes are equal
    low, high = np.quantile(known, (0.025, 0.975)) if len(known) else (nan, nan)
    return float(low), float(high)


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


def twin_figures(original: Run, twin: Run, target: float | None) -> Iterator[TwinRow]:
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


def twin_device_figures(original: Run, twin: Run) -> pd.DataFrame:
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


def device_ranks(original: Run, twin: Run, table: pd.DataFrame) -> RankAgreement | None:
    """Ranks of devices by seconds of the run per update, as `agreement` returns them, with the twin in
    place of virtual time. None for fewer than two devices. `table`: result of `twin_device_figures`."""
    if len(table) < 2:
        return None
    counts = table[["twin_updates", "updates"]].to_numpy(np.float64)
    lasted = np.array([twin.duration, original.duration])
    costs = np.divide(lasted, counts, out=np.full_like(counts, inf), where=counts > 0)
    frame = pd.DataFrame(
        {"configuration": table["device"], "predicted": costs[:, 0], "measured": costs[:, 1]}
    )
    return agreement(frame)
