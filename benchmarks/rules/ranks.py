"""Ranks of rules over conditions, what differs between them, and how sure that is. Pure.

A run that missed the target costs more than each that reached it; such runs share the last ranks.
Within a condition, rules are ranked with each seed, then by the mean of these ranks. Two statistics say
how sure a mean rank over conditions is:

- Its interval resamples the seeds (bootstrap): the rank that other seeds would give under these same
  conditions.
- Friedman's test and Nemenyi's critical difference (Demšar 2006, JMLR 7) take the conditions as a
  sample: what to expect under others of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isnan, nan, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from analysis.metrics import ConfidenceInterval, t_interval
from benchmarks.rules.definition import Condition
from benchmarks.rules.results import Cell

Cost = Literal["seconds", "updates", "bytes", "joules"]
COSTS: tuple[Cost, ...] = ("seconds", "updates", "bytes", "joules")
LEVEL = 0.05
_RESAMPLES = 2000
_MIN_CONDITIONS = 10
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """Costs of the runs that compare rules: shape (conditions, rules, seeds)."""

    conditions: tuple[Condition, ...]
    rules: tuple[str, ...]
    costs: Floats
    """Cost until the target, or until the last evaluation if the run missed it."""
    reached: NDArray[np.bool_]

    @property
    def ranks(self) -> Floats:
        """Ranks of the rules under each condition, shape (conditions, rules). 1 is best; equal ones
        share their mean."""
        return _ranks(np.where(self.reached, self.costs, inf))

    def only(self, wanted: Callable[[Condition], bool]) -> Scores:
        """Return the scores of some of the conditions."""
        chosen = [index for index, condition in enumerate(self.conditions) if wanted(condition)]
        conditions = tuple(self.conditions[index] for index in chosen)
        return replace(
            self, conditions=conditions, costs=self.costs[chosen], reached=self.reached[chosen]
        )


def scores(
    cells: Iterable[Cell],
    conditions: Sequence[Condition],
    rules: Sequence[str],
    seeds: Sequence[int],
    cost: Cost = "seconds",
) -> Scores:
    """Arrange the cells with one of `seeds`. Raises KeyError if one is missing."""
    by_place = {(cell.condition, cell.rule, cell.seed): cell for cell in cells if cell.seed in seeds}
    table = [[[by_place[one, rule, seed] for seed in seeds] for rule in rules] for one in conditions]
    shape = (len(conditions), len(rules), len(seeds))
    flat = [cell for rows in table for row in rows for cell in row]
    costs = np.array([getattr(cell, cost) for cell in flat], np.float64).reshape(shape)
    reached = np.array([cell.reached for cell in flat], bool).reshape(shape)
    return Scores(tuple(conditions), tuple(rules), costs, reached)


def _ranks(costs: Floats) -> Floats:
    by_seed = _ranked(np.moveaxis(costs, -1, 0))  # (seeds, conditions, rules)
    return _ranked(by_seed.mean(axis=0).round(9))


def _ranked(values: Floats) -> Floats:
    """Rank along the last axis. Many times as fast as SciPy's for arrays of this size."""
    this, other = values[..., :, None], values[..., None, :]
    ranks: Floats = 0.5 + (this > other).sum(axis=-1) + (this == other).sum(axis=-1) / 2
    return ranks


def mean_ranks(scored: Scores) -> dict[str, ConfidenceInterval]:
    """Return each rule's mean rank over conditions, with the 95% interval over resampled seeds."""
    draws = np.random.default_rng(0)
    count = scored.costs.shape[-1]
    costs = np.where(scored.reached, scored.costs, inf)
    samples = np.array(
        [_ranks(costs[..., draws.integers(0, count, count)]).mean(axis=0) for _ in range(_RESAMPLES)]
    )
    low, high = np.quantile(samples, [0.025, 0.975], axis=0)
    means = scored.ranks.mean(axis=0)
    return {
        rule: ConfidenceInterval(float(means[i]), float(low[i]), float(high[i]), count)
        for i, rule in enumerate(scored.rules)
    }


@dataclass(frozen=True, slots=True)
class Friedman:
    p: float
    """Probability of such different mean ranks if all rules were equal."""
    critical_difference: float
    """Least difference of two mean ranks that Nemenyi's test calls one, at 5 %."""


def friedman(scored: Scores) -> Friedman:
    """Test whether mean ranks differ over conditions. NaN with fewer than ten conditions or three
    rules, for which its approximation is poor."""
    from scipy import stats

    ranks = scored.ranks
    count, rules = ranks.shape
    if count < _MIN_CONDITIONS or rules < 3 or (ranks == ranks[:, :1]).all():
        return Friedman(nan, nan)
    p = float(stats.friedmanchisquare(*ranks.T).pvalue)
    q = float(stats.studentized_range.ppf(1 - LEVEL, rules, inf)) / sqrt(2)
    return Friedman(p, q * sqrt(rules * (rules + 1) / (6 * count)))


@dataclass(frozen=True, slots=True)
class Behind:
    """How far a rule is behind the fastest one."""

    factor: ConfidenceInterval
    """Its time ÷ that of the fastest: geometric mean, with the 95% interval over seeds (Student's t)."""
    is_separable: bool
    """Whether it is slower, at 5 % after Holm's correction for all rules that are compared."""


def behind_fastest(scored: Scores) -> dict[str, Behind]:
    """Compare every rule with the fastest one over the conditions, seed by seed; sorted, the fastest
    first.

    A run that missed the target counts with its end, which makes differences smaller. The interval is
    that of the mean over the conditions, which are fixed.
    """
    times = np.log(np.maximum(scored.costs, 1e-9)).mean(axis=0)  # (rules, seeds)
    order = np.argsort(times.mean(axis=1), kind="stable")
    fastest = times[order[0]]
    intervals = [t_interval(list(times[index] - fastest)) for index in order]
    probabilities = [_p(times[index] - fastest) for index in order[1:]]
    separable = [False, *holm(probabilities)]
    found = {}
    for index, one, differs in zip(order, intervals, separable, strict=True):
        factor = ConfidenceInterval(exp(one.mean), exp(one.low), exp(one.high), one.count)
        found[scored.rules[index]] = Behind(factor, differs)
    return found


def _p(differences: Floats) -> float:
    """Return the two-sided probability of Student's t test that the mean is 0."""
    from scipy import stats

    if len(differences) < 2:
        return nan
    if np.ptp(differences) == 0:
        return 0.0 if differences[0] else 1.0
    return float(stats.ttest_1samp(differences, 0).pvalue)


def holm(probabilities: Sequence[float]) -> list[bool]:
    """Return which of the hypotheses Holm's procedure rejects at 5 %."""
    rejected = [False] * len(probabilities)
    for done, index in enumerate(sorted(range(len(probabilities)), key=lambda i: probabilities[i])):
        p = probabilities[index]
        if isnan(p) or p > LEVEL / (len(probabilities) - done):
            break
        rejected[index] = True
    return rejected
