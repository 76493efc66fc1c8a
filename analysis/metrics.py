"""The metrics of the papers, for one run or several. The docstring of each function has the definition
of its metric. Times are in seconds of device time, and sizes are in bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import cos, inf, isfinite, isnan, nan, pi, sin, sqrt, tan
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.device_states import BUSY, STATES, TRANSFER, timeline
from analysis.features import COSTS
from analysis.load import Run
from analysis.names import by_settings

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Reached:
    """The cost of reaching an accuracy. All fields are NaN if the run never reached the accuracy."""

    time: float
    """Device time of the global model that first had the accuracy, in seconds."""
    rounds: float
    """Number of aggregations up to the first model that had the accuracy. It is equal to the version of
    that model."""
    updates: float
    """Number of updates applied up to the first model that had the accuracy."""
    bytes: float
    """Payload size in bytes of the updates applied up to the first model that had the accuracy.
    Downloads are not recorded."""
    others: Mapping[str, float]
    """Further costs of all devices together up to `time`, by name (`features.COSTS`). NaN for one that
    was not counted."""


UNKNOWN = Reached(nan, nan, nan, nan, dict.fromkeys(COSTS, nan))


def reached(run: Run, accuracy: float) -> Reached:
    """Return the cost of reaching the test accuracy `accuracy` (share) for the first time.

    This is the papers' time to target accuracy (FedBuff, Nguyen et al. 2022; FedFa, Xu et al. 2024). The
    time is not interpolated, so that its resolution is the time between two evaluations. `crossing`
    interpolates.
    """
    evaluations = run.evaluations.sort_values("at", kind="stable")
    good = evaluations[evaluations["accuracy"] >= accuracy]
    if good.empty:
        return UNKNOWN
    first = good.iloc[0]
    return _cost_until(run, float(first["at"]), float(first["version"]))


def observed(run: Run) -> Reached:
    """Return the cost up to the last evaluation, or up to the end of the run if the last model was
    evaluated. This is a lower bound of the cost of an accuracy that the run did not reach. All fields
    are 0 if the run was never evaluated."""
    if run.evaluations.empty:
        return Reached(0.0, 0.0, 0.0, 0.0, _other_costs(run, 0.0))
    last = lasting(run).evaluations.iloc[-1]
    return _cost_until(run, float(last["at"]), float(last["version"]))


def lasting(run: Run) -> Run:
    """Return `run` with its evaluations in the order of time, and the last one repeated at the end of
    the run if it is of the last model: a model that does not change is not evaluated again."""
    evaluations, ended = run.evaluations.sort_values("at", kind="stable"), run.ended
    last = evaluations[-1:]
    if ended is not None and ((last["version"] == ended.version) & (last["at"] < ended.at)).any():
        evaluations = pd.concat([evaluations, last.assign(at=ended.at)], ignore_index=True)
    return replace(run, evaluations=evaluations)


def _cost_until(run: Run, at: float, version: float) -> Reached:
    contained = run.updates[run.updates["applied_version"] <= version]
    sent = float(contained["bytes"].sum())
    return Reached(at, version, float(len(contained)), sent, _other_costs(run, at))


def _other_costs(run: Run, at: float) -> dict[str, float]:
    return {name: float(cost.at(run, [at])[0]) for name, cost in COSTS.items()}


@dataclass(frozen=True, slots=True)
class Crossing:
    """Time at which a run first reached a level of accuracy or loss."""

    time: float
    """Seconds of device time, interpolated linearly between two evaluations with finite values; infinite
    if the run never reached the level."""
    resolution: float
    """Precision of `time`: seconds between the two evaluations around `time`. 0 if already the first
    evaluation reached the level; NaN if no evaluation did."""


def crossed(run: Run, quality: Literal["accuracy", "loss"], level: float) -> float:
    """Return the seconds until the global model first has an accuracy (share) of at least `level`, or a
    loss of at most `level`; infinite if that never happens. The time is interpolated linearly between
    evaluations with finite values."""
    return crossing(run, quality, level).time


def crossing(run: Run, quality: Literal["accuracy", "loss"], level: float) -> Crossing:
    """Return the time at which the global model first has an accuracy (share) of at least `level`, or a
    loss of at most `level`. The result has the precision of this time, too."""
    evaluations = run.evaluations.sort_values("at", kind="stable")
    at, value = evaluations["at"].to_numpy(), evaluations[quality].to_numpy()
    excess = value - level if quality == "accuracy" else level - value
    first = next(iter(np.flatnonzero(excess >= 0)), None)
    if first is None:
        return Crossing(inf, nan)
    if first == 0:
        return Crossing(float(at[first]), 0.0)
    width = float(at[first] - at[first - 1])
    if not isfinite(excess[first - 1]):
        return Crossing(float(at[first]), width)
    share = excess[first - 1] / (excess[first - 1] - excess[first])
    return Crossing(float(at[first - 1] + share * width), width)


def final(run: Run, quality: Literal["accuracy", "loss"], share: float = 0.2) -> float:
    """Return the mean accuracy or loss in the last `share` of the time from the start to the last
    evaluation. NaN if a value in this time is not finite, or if the run was never evaluated. With a
    single evaluation, the result would depend on the update that was applied last.

    Times are compared as whole nanoseconds. For example, 2.4 s belong to the last fifth of 3 s, although
    as floats they are less than (1 − 0.2) · 3.
    """
    evaluations = run.evaluations
    at = (evaluations["at"] * 1e9).round()
    late = at >= np.rint((1 - share) * at.max())
    return float(evaluations.loc[late, quality].mean(skipna=False))


def speed_up(time: float, baseline: float) -> float:
    """Return `baseline` ÷ `time`, both in seconds: the factor by which a target was reached faster than
    in the baseline. Example: `speed_up(reached(run, 0.9).time, reached(other, 0.9).time)`.

    The result is NaN if one of the two runs never reached the target, infinite if only `time` is 0, and
    1 if both times are 0.
    """
    if time > 0 or isnan(time):
        return baseline / time
    return nan if isnan(baseline) else inf if baseline else 1.0


def accuracy_by(run: Run, by: Literal["class", "group", "device"]) -> pd.DataFrame:
    """Return the accuracy (share) over time by class, group or device: a row per evaluation, indexed by
    its time in seconds, and a column per part. A group's accuracy is the mean over its devices, weighted
    by their samples.

    Empty unless the topology evaluates by part (`evaluate: {classes: true}` or `{devices: 200}`).
    """
    parts = run.parts[run.parts["part"] == ("class" if by == "class" else "device")]
    names = parts["name"].astype(str)
    if by == "group":
        groups = run.devices.set_index(run.devices["device"].astype(str))["group"].astype(str)
        names = names.map(groups).fillna("no group")
    order = list(names.unique())
    if by == "class" and all(name.isdecimal() for name in order):
        order.sort(key=int)
    correct = parts["accuracy"] * parts["samples"]
    keys = [parts["at"], names.rename("name")]
    shares = correct.groupby(keys, sort=True).sum(min_count=1) / parts["samples"].groupby(keys).sum()
    return shares.unstack("name").reindex(columns=order)


def staleness(run: Run, by: str | None = "group") -> pd.DataFrame:
    """Return the staleness τ of applied updates, in versions, with one row per `group` or `client`. If
    `by` is None, there is one row `all`.

    Columns: `count`, `mean`, `std` (of the sample), `p50`, `p90`, `p99`, and `max`, which is the
    observed τ_max of the papers.
    """
    key = run.updates[by] if by else pd.Series("all", run.updates.index)
    grouped = run.updates["staleness"].groupby(key, observed=True)
    quantiles = {name: grouped.quantile(share) for name, share in _QUANTILES.items()}
    table = grouped.agg(["count", "mean", "std", "max"]).assign(**quantiles)
    return table[["count", "mean", "std", *_QUANTILES, "max"]]


def utilisation(run: Run) -> pd.DataFrame:
    """Return a table with one row per device. All values are shares of the run's duration; NaN if the
    duration is 0.

    Each column named in `device_states.STATES` is the share that the device spent in that state. These
    columns sum to 1. Three further columns combine states: `busy` (training, making a mask, or in a
    round whose update is not applied), `transfer` (download or upload) and `idle` (`wait`). They sum to
    1 together with `paused`, `offline` and `unpowered`.
    """
    spans = timeline(run)
    spent = (spans["end"] - spans["begin"]).groupby([spans["device"], spans["state"]], observed=False)
    table = spent.sum().unstack("state").reindex(columns=list(STATES)) / (run.duration or nan)
    busy, transfer = (table[list(states)].sum(axis=1, skipna=False) for states in (BUSY, TRANSFER))
    return table.assign(busy=busy, transfer=transfer, idle=table["wait"])


def contributions(run: Run) -> pd.DataFrame:
    """Return a table with one row per device. Columns:

    - `group`
    - `updates`: number of applied updates of the device
    - `share`: `updates` ÷ number of all applied updates
    - `weight`: q_i, the mean weight per aggregation. Aggregations without updates (empty ticks) count.
    - `effective`: q̃_i = q_i ÷ Σ q
    - `importance`: p_i as planned; NaN if the device was not planned

    According to Fraboni et al. 2023 (FedFix), a run with q̃ ≠ p converges to the optimum of Σ q̃_i f_i,
    not of Σ p_i f_i.
    """
    grouped = run.updates.groupby("client", observed=False)
    updates, weights = grouped.size(), grouped["weight"].sum()
    names = pd.Index(updates.index.astype(object), name="device")
    planned = run.devices.set_index("device")[["group", "importance"]].reindex(names)
    with np.errstate(invalid="ignore"):
        return pd.DataFrame(
            {
                "group": planned["group"].astype(object).to_numpy(),
                "updates": updates.to_numpy(),
                "share": updates.to_numpy() / np.float64(updates.sum()),
                "weight": weights.to_numpy() / np.float64(len(_aggregations(run))),
                "effective": weights.to_numpy() / np.float64(weights.sum()),
                "importance": planned["importance"].to_numpy(),
            },
            index=names,
        )


@dataclass(frozen=True, slots=True)
class Bias:
    """Difference between the effective importance q̃_i and the planned importance p_i of clients (see
    `contributions`)."""

    chi_square: float
    """χ² over the clients with q̃_i > 0."""
    missed: float
    """Σ p_i over the clients with q̃_i = 0."""


def bias(run: Run) -> Bias:
    """Return χ² = Σ (p_i − q̃_i)² ÷ q̃_i over the clients with an applied update, and the total
    importance of the clients without one.

    χ² measures how far the weights in the run are from the planned importance (Fraboni et al. 2023); 0
    means no bias. Both values are NaN if no update was applied, or if no importance is known.
    """
    table = contributions(run)
    p, q = table["importance"].to_numpy(), table["effective"].to_numpy()
    if not len(run.updates) or np.isnan(p).all():
        return Bias(nan, nan)
    p, heard = np.nan_to_num(p), q > 0
    return Bias(float(np.sum((p - q)[heard] ** 2 / q[heard])), float(p[~heard].sum()))


def window(run: Run) -> int:
    """Return the smallest W such that any W consecutive aggregations include an update of every client
    that contributed to the run; 0 without updates. An aggregation without updates (an empty tick)
    counts.

    Fraboni et al. 2023 assume windows over which the weights of each client have a constant sum. Real
    runs have no such windows. W is the part of the assumption that can be measured.
    """
    aggregations = _aggregations(run)
    place = pd.Series(np.searchsorted(aggregations, run.updates["applied_version"]))
    longest = 0
    for _, own in place.groupby(run.updates["client"].cat.codes.to_numpy()):
        heard = np.concatenate([[-1], np.unique(own), [len(aggregations)]])
        longest = max(longest, int(np.diff(heard).max()))
    return longest


def _aggregations(run: Run) -> npt.NDArray[np.int64]:
    """Version after each aggregation, in order. One without updates keeps the version; the first of
    several with the same version made it. Versions whose record is missing at the end of the records
    count, too."""
    recorded = run.versions["version"].to_numpy(np.int64)
    begun = np.setdiff1d(run.updates["applied_version"].to_numpy(np.int64), recorded)
    return np.sort(np.concatenate([recorded, begun]))


def jain(values: npt.ArrayLike) -> float:
    """Return Jain's fairness index (Σx)² ÷ (n Σx²) (Jain, Chiu and Hawe 1984). It is 1 if all values are
    equal, 1/n if only one value is not 0, and NaN if all are 0."""
    x = np.asarray(values, np.float64)
    squares = len(x) * np.sum(x**2)
    return float(x.sum() ** 2 / squares) if squares else nan


def effective_participants(values: npt.ArrayLike) -> float:
    """Return 1 ÷ Σ share², where a share is a value ÷ the sum of all values. This is the number of equal
    contributors that would have the same Σ share². It is equal to n × Jain's index."""
    return jain(values) * np.size(values)


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A mean with its confidence interval."""

    mean: float
    """Mean; NaN if there is no value."""
    low: float
    """Lower end of the 95% interval; NaN if there are too few values."""
    high: float
    """Upper end of the 95% interval; NaN if there are too few values."""
    count: int
    """Number of values."""


def t_interval(values: Sequence[float], level: float = 0.95) -> ConfidenceInterval:
    """Return the mean and Student's confidence interval of values from runs with different seeds.

    With fewer than two values, the ends of the interval are NaN. If a value is NaN, for example because
    a run never reached a target, the mean and the ends are NaN.
    """
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return ConfidenceInterval(float(x[0]) if len(x) else nan, nan, nan, len(x))
    half = _student_t(len(x) - 1, level) * x.std(ddof=1) / np.sqrt(len(x))
    return ConfidenceInterval(float(x.mean()), float(x.mean() - half), float(x.mean() + half), len(x))


@functools.lru_cache(maxsize=1024)
def _student_t(freedom: int, level: float) -> float:
    """t with P(|T| ≤ t) = `level` for Student's T with `freedom` degrees of freedom: a finite series in
    θ = arctan(t/√freedom) (Abramowitz and Stegun, 26.7.3 and 26.7.4), which grows with θ, and is
    searched by halves."""
    odd = freedom % 2

    def probability(theta: float) -> float:
        total, term = 0.0, cos(theta) if odd else 1.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= k / (k + 1) * cos(theta) ** 2
        return 2 / pi * (theta + sin(theta) * total) if odd else sin(theta) * total

    low, high = 0.0, pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return sqrt(freedom) * tan(high)


_MIN_SEEDS = 3
"""With two runs, the interval would be very wide: Student's t is 12.7."""


def seed_interval(values: Sequence[float]) -> ConfidenceInterval:
    """Return `t_interval` of `values`. If there are fewer than three values, the ends of the interval
    are NaN."""
    found = t_interval(values)
    return found if found.count >= _MIN_SEEDS else replace(found, low=nan, high=nan)


@dataclass(frozen=True, slots=True)
class Cost(ConfidenceInterval):
    """Cost of reaching a target, over runs that differ only in their seed. Runs that missed the target
    are censored: their cost is above what was observed.

    `mean`, `low` and `high` are NaN if a run missed the target.
    """

    median: float
    """Kaplan–Meier median: the lowest cost at which at least half of the runs are expected to have
    reached the target; NaN if too few runs reached it."""
    above: float
    """Lower bound of the median if `median` is NaN; otherwise NaN."""


def cost(values: Sequence[float], limits: Sequence[float]) -> Cost:
    """Return the cost of reaching a target. `values`: cost of each run, NaN if the run missed the
    target. `limits`: highest cost that was observed of each run, such as the time of its last
    evaluation."""
    interval = seed_interval(values)
    steps, reached = kaplan_meier(values, limits)
    half = np.flatnonzero(reached >= 0.5 - 1e-9)
    median = float(steps[half[0]]) if len(half) else nan
    above = float(steps[-1]) if len(steps) and isnan(median) else nan
    return Cost(interval.mean, interval.low, interval.high, interval.count, median, above)


def kaplan_meier(
    values: Sequence[float], limits: Sequence[float]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the Kaplan–Meier estimate of the share of runs that have reached a target, as a step
    function: costs in ascending order, and the share (0 to 1) from each cost on. `values` and `limits`
    are as in `cost`. A run with neither a finite value nor a finite limit is left out."""
    x, most = np.asarray(values, np.float64), np.asarray(limits, np.float64)
    known = np.isfinite(most) | np.isfinite(x)
    x, most = x[known], most[known]
    if not len(x):
        return np.empty(0), np.empty(0)
    missed = ~np.isfinite(x)
    costs, place, counts = np.unique(np.where(missed, most, x), return_inverse=True, return_counts=True)
    at_risk = len(x) - np.cumsum(counts) + counts  # runs that had neither reached nor ended before
    left = np.cumprod((at_risk - np.bincount(place, ~missed)) / at_risk)
    return costs, np.asarray(1 - left, np.float64)


def over_seeds(runs: Sequence[Run], metric: Callable[[Run], float], level: float = 0.95) -> pd.DataFrame:
    """Return a table of `mean`, `low`, `high` (Student's interval) and `count` of `metric`. It has one
    row for each set of runs that differ only in their seed, indexed by a short name."""
    sets = by_settings(runs)
    intervals = [t_interval([metric(run) for run in same], level) for same in sets.values()]
    return pd.DataFrame(intervals, index=list(sets), columns=["mean", "low", "high", "count"])
