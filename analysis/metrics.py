"""What the papers measure, of one run or of several. Pure functions, each with its definition.

Times are seconds of device time, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.device_states import BUSY, STATES, TRANSFER, timeline
from analysis.load import Run
from analysis.names import by_settings

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Reached:
    """What it took to reach an accuracy; NaN where the run never did."""

    time: float
    """Device time at which the model was taken that reached it, in seconds."""
    rounds: float
    """Its version: global models made."""
    updates: float
    """Updates in it."""
    bytes: float
    """Payload of these updates: what went up. The dispatches down are not in the record."""


def reached(run: Run, accuracy: float) -> Reached:
    """The cost of reaching the test accuracy `accuracy` (share) for the first time.

    The papers' time to target accuracy (FedBuff, Nguyen et al. 2022; FedFa, Xu et al. 2024). It is as
    fine as the evaluations are frequent: nothing is interpolated.
    """
    evaluations = run.evaluations.sort_values("at", kind="stable")
    good = evaluations[evaluations["accuracy"] >= accuracy]
    if good.empty:
        return Reached(nan, nan, nan, nan)
    at, version = (float(good.iloc[0][column]) for column in ("at", "version"))
    contained = run.updates[run.updates["applied_version"] <= version]
    return Reached(at, version, float(len(contained)), float(contained["bytes"].sum()))


def crossed(run: Run, quality: Literal["accuracy", "loss"], level: float) -> float:
    """Seconds until the global model first has `level` of `quality`: at least that accuracy (share), at
    most that loss. Interpolated linearly between evaluations, from a finite quality on; infinite where
    it never has."""
    evaluations = run.evaluations.sort_values("at", kind="stable")
    at, value = evaluations["at"].to_numpy(), evaluations[quality].to_numpy()
    excess = value - level if quality == "accuracy" else level - value
    first = next(iter(np.flatnonzero(excess >= 0)), None)
    if first is None:
        return inf
    if first == 0 or not isfinite(excess[first - 1]):
        return float(at[first])
    share = excess[first - 1] / (excess[first - 1] - excess[first])
    return float(at[first - 1] + share * (at[first] - at[first - 1]))


def final(run: Run, quality: Literal["accuracy", "loss"], share: float = 0.2) -> float:
    """Mean of the evaluations in the last `share` of the time up to the last of them: a single one
    depends on whose update came last. NaN without evaluations, and where one of these is not finite.

    Times are compared as whole nanoseconds: 2.4 s belong to the last fifth of 3 s, and as floats are
    less than (1 − 0.2) · 3.
    """
    evaluations = run.evaluations
    at = (evaluations["at"] * 1e9).round()
    late = at >= np.rint((1 - share) * at.max())
    return float(evaluations.loc[late, quality].mean(skipna=False))


def speed_up(time: float, baseline: float) -> float:
    """How many times sooner a target was reached than by a baseline: the baseline's time (s) ÷ `time`,
    as in `speed_up(reached(run, 0.9).time, reached(other, 0.9).time)`.

    NaN where either never reached it, infinite where only the other one had to learn for it.
    """
    if time > 0 or isnan(time):
        return baseline / time
    return nan if isnan(baseline) else inf if baseline else 1.0


def staleness(run: Run, by: str | None = "group") -> pd.DataFrame:
    """Staleness τ of applied updates, in versions: `count`, `mean`, `std` (of the sample), `p50`, `p90`,
    `p99` and `max` (the paper's τ_max, of what happened), per `by` (`group`, `client`, or None: one row,
    `all`)."""
    key = run.updates[by] if by else pd.Series("all", run.updates.index)
    grouped = run.updates["staleness"].groupby(key, observed=True)
    quantiles = {name: grouped.quantile(share) for name, share in _QUANTILES.items()}
    table = grouped.agg(["count", "mean", "std", "max"]).assign(**quantiles)
    return table[["count", "mean", "std", *_QUANTILES, "max"]]


def utilisation(run: Run) -> pd.DataFrame:
    """Per device, the share of the run that it spent in each state of `timeline.STATES` (they sum to 1);
    and by what they mean: `busy` (training, making a mask, or in a round that came to no applied
    update), `transfer` (downloading or uploading), `idle` (`wait`), which sum to 1 with `paused` and
    `offline`. NaN for a run without duration."""
    spans = timeline(run)
    spent = (spans["end"] - spans["begin"]).groupby([spans["device"], spans["state"]], observed=False)
    table = spent.sum().unstack("state").reindex(columns=list(STATES)) / (run.duration or nan)
    busy, transfer = (table[list(states)].sum(axis=1, skipna=False) for states in (BUSY, TRANSFER))
    return table.assign(busy=busy, transfer=transfer, idle=table["wait"])


def contributions(run: Run) -> pd.DataFrame:
    """Per device: `group`; `updates` applied; `share` of them; `weight` q_i, the mean weight per
    aggregation; `effective` q̃_i = q_i ÷ Σ q; `importance` p_i, as planned (NaN: not planned).

    Fraboni et al. 2023 (FedFix): a run with q̃ ≠ p heads for the optimum of Σ q̃_i f_i, not of Σ p_i f_i.
    An aggregation without updates (an empty tick) counts as one.
    """
    grouped = run.updates.groupby("client", observed=False)
    updates, weights = grouped.size(), grouped["weight"].sum()
    planned = run.devices.set_index("device")
    with np.errstate(invalid="ignore"):
        return pd.DataFrame(
            {
                "group": planned["group"]
                .astype(object)
                .reindex(updates.index.astype(object))
                .to_numpy(),
                "updates": updates.to_numpy(),
                "share": updates.to_numpy() / np.float64(updates.sum()),
                "weight": weights.to_numpy() / np.float64(len(_aggregations(run))),
                "effective": weights.to_numpy() / np.float64(weights.sum()),
                "importance": planned["importance"].reindex(updates.index.astype(object)).to_numpy(),
            },
            index=pd.Index(updates.index.astype(object), name="device"),
        )


@dataclass(frozen=True, slots=True)
class Bias:
    chi_square: float
    missed: float
    """Σ p_i of the clients with q̃_i = 0, which χ² leaves out."""


def bias(run: Run) -> Bias:
    """χ² = Σ (p_i − q̃_i)² ÷ q̃_i over clients that were heard: how far the weights that the run gave are
    from those it should give (Fraboni et al. 2023); 0 means none. NaN without updates or importance."""
    table = contributions(run)
    p, q = table["importance"].to_numpy(), table["effective"].to_numpy()
    if not len(run.updates) or np.isnan(p).all():
        return Bias(nan, nan)
    p, heard = np.nan_to_num(p), q > 0
    return Bias(float(np.sum((p - q)[heard] ** 2 / q[heard])), float(p[~heard].sum()))


def window(run: Run) -> int:
    """W, in aggregations: the least for which any W consecutive ones have an update of every client
    that contributed at all; 0 without updates. An aggregation without updates (an empty tick) counts
    as one.

    Fraboni et al. 2023 ask for windows over which the weights of each client add up to the same. A
    measured run has no such exactly; this is the part of it that can be counted.
    """
    aggregations = _aggregations(run)
    place = pd.Series(np.searchsorted(aggregations, run.updates["applied_version"]))
    longest = 0
    for _, own in place.groupby(run.updates["client"].cat.codes.to_numpy()):
        heard = np.concatenate([[-1], np.unique(own), [len(aggregations)]])
        longest = max(longest, int(np.diff(heard).max()))
    return longest


def _aggregations(run: Run) -> npt.NDArray[np.int64]:
    """The version that each aggregation left, in their order. One without updates leaves the version as
    it was: of those with the same version, the first made it.

    A record may end between the updates of a version and the version's own; it counts all the same.
    """
    recorded = run.versions["version"].to_numpy(np.int64)
    begun = np.setdiff1d(run.updates["applied_version"].to_numpy(np.int64), recorded)
    return np.sort(np.concatenate([recorded, begun]))


def jain(values: npt.ArrayLike) -> float:
    """Jain's fairness index (Σx)² ÷ (n Σx²) (Jain, Chiu and Hawe 1984): 1 where all have the same, 1/n
    where one has all. NaN where nobody has any."""
    x = np.asarray(values, np.float64)
    squares = len(x) * np.sum(x**2)
    return float(x.sum() ** 2 / squares) if squares else nan


def effective_participants(values: npt.ArrayLike) -> float:
    """1 ÷ Σ share² = n × Jain's index: how many equal contributors would be as uneven as these."""
    return jain(values) * np.size(values)


def energy(run: Run, watts: Mapping[str, Mapping[str, float]] | None = None) -> pd.Series[float]:
    """An estimate in joules per device: Σ over states of the seconds in it × the watts drawn then.

    The watts are those of the plan (`power` of topology or profile), or `watts[group][state]`.
    A state without a figure counts as none, so with `power: {train: 7.2W}` it is the energy of training
    alone; a round that came to no applied update, and the making of masks, count as training; a device
    without any figure has NaN.
    """
    names = run.updates["client"].cat.categories
    planned = [run.manifest.get("devices", {}).get(name, {}) for name in names]
    drawn = [one.get("power") if watts is None else watts.get(one.get("group")) for one in planned]
    power = pd.DataFrame(
        [
            {**dict.fromkeys(("unfinished", "mask"), (one or {}).get("train", 0.0)), **(one or {})}
            for one in drawn
        ],
        names,
        list(STATES),
    ).fillna(0.0)
    known = np.array([one is not None for one in drawn], bool)
    if not known.any():
        return pd.Series(nan, names, name="joules")
    spent = utilisation(run)[list(STATES)] * run.duration
    return (spent * power).sum(axis=1, skipna=False).where(known).rename("joules")


@dataclass(frozen=True, slots=True)
class Interval:
    mean: float
    low: float
    high: float
    count: int
    """Values that it rests on."""


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean and Student's interval of confidence, for runs that differ in their seed. The ends are NaN
    for fewer than two values; a NaN value (a target never reached) makes all NaN: none is dropped."""
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return Interval(float(x[0]) if len(x) else nan, nan, nan, len(x))
    from scipy import stats  # which takes half a second

    half = stats.t.ppf((1 + level) / 2, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))
    return Interval(float(x.mean()), float(x.mean() - half), float(x.mean() + half), len(x))


def over_seeds(runs: Sequence[Run], metric: Callable[[Run], float], level: float = 0.95) -> pd.DataFrame:
    """`metric` of `runs`: `mean`, `low`, `high` (Student's interval) and `count`, one row for each set
    of runs that are alike but for their seed, indexed by a short name."""
    sets = by_settings(runs)
    intervals = [t_interval([metric(run) for run in same], level) for same in sets.values()]
    return pd.DataFrame(intervals, index=list(sets), columns=["mean", "low", "high", "count"])
