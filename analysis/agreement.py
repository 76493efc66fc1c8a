"""Whether two settings, such as virtual time and emulation, rank the same configurations alike. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, nan
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis import metrics
from analysis.load import Run

_RESAMPLES = 2000
_LEAST_CONFIGURATIONS = 3
"""From which they can be resampled: of two, each resample agrees as the two do, or has no tau."""

Times = npt.NDArray[np.float64]
"""A row for each configuration or seed, and a column for each of the two settings."""


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    virtual_s: float
    """Mean time to the target over seeds; infinite where a seed did not reach it, as in `compare`."""
    real_s: float
    virtual_rank: int
    """From 1; configurations that tie share the best of their ranks."""
    real_rank: int


@dataclass(frozen=True, slots=True)
class Agreement:
    configurations: tuple[Configuration, ...]
    """By their rank in virtual time."""
    tau: float
    """Kendall's tau-b: 1 is the same order, -1 the reverse. NaN where all tie in either setting."""
    low: float
    """Of the 95% interval (percentiles of a bootstrap), as is `high`; NaN where there is none."""
    high: float
    resampled: Literal["seeds", "configurations"]
    """What the bootstrap draws from: seeds, where each configuration has several."""
    swapped: tuple[tuple[str, str], ...]
    """Pairs of configurations, each with the one first that is faster in virtual time and slower in the
    real runtime. A tie in one of the two is no swap."""


def times(
    configurations: Sequence[str], virtual: Sequence[Run], real: Sequence[Run], target: float
) -> pd.DataFrame:
    """For `agreement`: when the runs of each name in `configurations` reached the accuracy `target`,
    interpolated between evaluations, whose interval would make ties, and let noise decide them."""
    found = {"virtual_s": virtual, "real_s": real}
    crossed = {
        name: [metrics.crossed(run, "accuracy", target) for run in runs] for name, runs in found.items()
    }
    return pd.DataFrame({"configuration": configurations, **crossed})


def agreement(times: pd.DataFrame) -> Agreement:
    """How far the order of the configurations by time is the same in both settings.

    `times` has a row for each seed of a configuration: `configuration`, and the seconds to the target in
    virtual time and in the real runtime, `virtual_s` and `real_s`; infinite or NaN where it was not
    reached. Raises ValueError for fewer than two configurations.
    """
    columns = times[["virtual_s", "real_s"]].astype(np.float64).fillna(inf)
    runs = {
        str(name): own.to_numpy(np.float64)
        for name, own in columns.groupby(times["configuration"], sort=False)
    }
    if len(runs) < 2:
        raise ValueError(f"expected at least 2 configurations to rank, found {len(runs)}")
    means = np.array([own.mean(axis=0) for own in runs.values()])
    ranks = _ranks(means)
    configurations = [
        Configuration(name, float(mean[0]), float(mean[1]), int(rank[0]), int(rank[1]))
        for name, mean, rank in zip(runs, means, ranks.T, strict=True)
    ]
    configurations.sort(key=lambda one: one.virtual_rank)
    seeds = all(len(own) > 1 for own in runs.values())
    low, high = _interval(_seeds(list(runs.values())) if seeds else _configurations(means))
    return Agreement(
        tuple(configurations),
        _tau(means),
        low,
        high,
        "seeds" if seeds else "configurations",
        tuple(
            (one.name, other.name)
            for one, other in combinations(configurations, 2)
            if one.virtual_rank < other.virtual_rank and one.real_rank > other.real_rank
        ),
    )


def _ranks(times: Times) -> npt.NDArray[np.int64]:
    """The ranks in each setting, a row each."""
    from scipy import stats

    ranks: npt.NDArray[np.int64] = stats.rankdata(times, method="min", axis=0).astype(np.int64).T
    return ranks


def _tau(times: Times) -> float:
    from scipy import stats

    tau = stats.kendalltau(*_ranks(times)).statistic  # of ranks: times may be infinite
    return round(float(tau), 12)  # 1 is 1


Resample = Callable[[np.random.Generator], Times]


def _seeds(runs: list[Times]) -> Resample:
    """Seeds drawn anew for each configuration, the same for both settings."""
    return lambda random: np.array(
        [own[random.integers(len(own), size=len(own))].mean(axis=0) for own in runs]
    )


def _configurations(means: Times) -> Resample | None:
    """Configurations drawn anew; None where there are too few."""
    count = len(means)
    if count < _LEAST_CONFIGURATIONS:
        return None
    return lambda random: means[random.integers(count, size=count)]


def _interval(resample: Resample | None) -> tuple[float, float]:
    if resample is None:
        return nan, nan
    random = np.random.default_rng(0)  # the same result each time
    taus = np.array([_tau(resample(random)) for _ in range(_RESAMPLES)])
    known = taus[~np.isnan(taus)]  # a resample in which all tie has none
    low, high = np.quantile(known, (0.025, 0.975)) if len(known) else (nan, nan)
    return float(low), float(high)
