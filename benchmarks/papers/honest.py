"""What may be said of rules that were compared: the rules of honest comparison. Pure.

1. The step size of a rule is its best one. If that is at the edge of its grid, the grid is extended.
2. Rules are compared seed by seed, on at least three seeds that did not choose the step size. A claim
   holds, or does not hold, only if the 95% interval of the differences says so.
3. The seed that chooses may choose wrongly between step sizes that are nearly as good. So a rule, with
   the step size chosen for it, must be ahead of the other rule with each of these.
4. A comparison says nothing about a paper if the baseline is far from the published figure, or has
   hardly learned, or if the best step size is still at the edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf, isnan

from agents.texts import quantity
from analysis.metrics import ConfidenceInterval, t_interval

SEEDS = 3
"""Minimum number of seeds that are compared."""
POINTS = 5.0
"""Points of accuracy: largest distance of a baseline from the published figure, and smallest distance
from the untrained model."""
LEARNED = 0.05
"""Share of the untrained model's loss by which training must reduce it."""
EXTENSIONS = 4
"""Maximum number of step sizes by which a grid is extended."""


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "not separable"
    NOT_TESTED = "not tested"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    interval: ConfidenceInterval
    """Interval of the differences; positive differences support the claim."""
    reason: str = ""


Steps = tuple[float, float]
"""Step sizes: of the rule that a claim is about, and of the other rule."""


def best_step(scores: Mapping[float, float]) -> float:
    """Step size with the highest score; NaN, where training diverged, is lowest.

    Of equal ones it is the one nearest to the middle of the grid, then the smaller. Raises ValueError if
    `scores` is empty.
    """
    grid = sorted(scores)
    middle = (len(grid) - 1) / 2

    def order(lr: float) -> tuple[float, float, float]:
        return _number(scores[lr]), -abs(grid.index(lr) - middle), -lr

    return max(grid, key=order)


def near_best(scores: Mapping[float, float], tolerance: float) -> tuple[float, ...]:
    """The best step size, then, ascending, the others whose score is lower by at most `tolerance` (NaN:
    none)."""
    best = best_step(scores)
    return best, *(lr for lr in sorted(scores) if lr != best and scores[lr] >= scores[best] - tolerance)


def at_edge(scores: Mapping[float, float]) -> bool:
    """Whether the best step size may lie outside the grid.

    A single step size is given, not chosen. If all step sizes of a grid diverge, its best lies below.
    """
    if len(scores) < 2:
        return False
    best = best_step(scores)
    return _number(scores[best]) == -inf or best in (min(scores), max(scores))


def step_to_try(scores: Mapping[float, float], given: int) -> float | None:
    """Next step size by which to extend a grid that had `given` values at first.

    None if the best is inside, or after EXTENSIONS. The grid's own pattern continues: 0.1, 0.3, 1 leads
    to 3.
    """
    if not at_edge(scores) or len(scores) >= given + EXTENSIONS:
        return None
    best = best_step(scores)
    return _further(sorted(scores, reverse=_number(scores[best]) == -inf or best == min(scores)))


def step_beyond(scores: Mapping[float, float], given: int, tolerance: float) -> float | None:
    """Next step size by which to extend a grid to find the largest one that costs at most `tolerance` of
    the best score; None if that is inside, or after EXTENSIONS."""
    tolerated = len(scores) > 1 and scores[max(scores)] >= max(map(_number, scores.values())) - tolerance
    return _further(sorted(scores)) if tolerated and len(scores) < given + EXTENSIONS else None


def _further(grid: Sequence[float]) -> float:
    """Return the value that continues `grid`."""
    *_, second, last = grid
    further = second * (last / grid[-3]) if len(grid) > 2 else last * (last / second)
    return float(f"{further:.6g}")


def judge(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Judgement:
    """Judge whether `ours` is higher than `theirs`, both by seed. Raises ValueError if the seeds
    differ."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"seeds {sorted(ours)} cannot be paired with {sorted(theirs)}")
    if len(ours) < SEEDS:
        reason = f"{quantity(len(ours), 'seed')} compared, of at least {SEEDS}"
        return Judgement(Verdict.NOT_TESTED, _interval(ours, theirs), reason)
    interval = _interval(ours, theirs)
    if isnan(interval.low):
        return Judgement(Verdict.NOT_TESTED, interval, "a run has no figure")
    if interval.low > 0:
        return Judgement(Verdict.HOLDS, interval)
    if interval.high < 0:
        return Judgement(Verdict.FAILS, interval)
    return Judgement(Verdict.OPEN, interval)


def _interval(ours: Mapping[int, float], theirs: Mapping[int, float]) -> ConfidenceInterval:
    return t_interval([ours[seed] - theirs[seed] for seed in sorted(ours)])


def settled(judged: Mapping[Steps, Judgement], chosen: Steps) -> tuple[Steps, Judgement]:
    """Decide a claim that was judged with several step sizes; return the step sizes that decide, too.

    The claim holds if our rule with its chosen step size is ahead of the other with each of its step
    sizes. It does not hold if the other rule with its chosen one is ahead of ours with each. The seeds
    that compare have not chosen a rule's step size, and nothing is chosen in favour of its rival.
    """
    by_mean = sorted(judged, key=lambda steps: _number(judged[steps].interval.mean))
    for_it = [steps for steps in by_mean if steps[0] == chosen[0]]
    against = [steps for steps in by_mean if steps[1] == chosen[1]]
    for steps in by_mean:
        if judged[steps].verdict is Verdict.NOT_TESTED:
            pair = "" if steps == chosen else f", with step sizes {steps[0]:g} and {steps[1]:g}"
            return steps, replace(judged[steps], reason=judged[steps].reason + pair)
    if all(judged[steps].verdict is Verdict.HOLDS for steps in for_it):
        return for_it[0], judged[for_it[0]]
    if all(judged[steps].verdict is Verdict.FAILS for steps in against):
        return against[-1], judged[against[-1]]
    decides = for_it[0] if judged[chosen].verdict is Verdict.HOLDS else against[-1]
    if judged[chosen].verdict is Verdict.OPEN:
        return chosen, judged[chosen]
    reason = f"it {judged[chosen].verdict} with step sizes {chosen[0]:g} and {chosen[1]:g}"
    return decides, replace(judged[decides], verdict=Verdict.OPEN, reason=reason)


def together(judgements: Sequence[Judgement]) -> Judgement:
    """Combine the judgements of a claim against several rules.

    It holds if it does against all, and does not hold if it does not against one. The least favourable
    of the deciding judgements is shown. Raises ValueError if there is none.
    """
    for verdict in (Verdict.FAILS, Verdict.NOT_TESTED, Verdict.OPEN, Verdict.HOLDS):
        if found := [one for one in judgements if one.verdict is verdict]:
            return min(found, key=lambda one: _number(one.interval.mean))
    raise ValueError("no judgements")


def censored(times: Iterable[tuple[float, float]]) -> list[float]:
    """Times (s) to a target, from pairs of such a time and the run's end.

    An infinite time, of a target that was not reached, becomes the end. That makes a difference smaller,
    so a verdict is never bolder; if neither run reached the target, there is no difference.
    """
    return [min(time, ended) for time, ended in times]


def not_the_papers(
    accuracy: float, untrained: float, published: float | None = None, rule: str = "the baseline"
) -> str:
    """Why the baseline's accuracy (%) says nothing about the paper; empty if it does."""
    if not accuracy - untrained >= POINTS:
        return f"{rule} has {accuracy:.1f} %, hardly more than the untrained model's {untrained:.1f} %"
    if published is not None and not abs(accuracy - published) <= POINTS:
        return f"{rule} has {accuracy:.1f} %, in the paper {published:.1f} %: another regime"
    return ""


def not_learned(loss: float, untrained: float, rule: str = "the baseline") -> str:
    """Why the baseline's loss says nothing about the paper; empty if it does. A loss above the untrained
    model's is a finding of its own."""
    if not loss <= untrained:
        return f"{rule} has a loss of {loss:.3f}, above the untrained model's {untrained:.3f}: diverged"
    if loss > (1 - LEARNED) * untrained:
        return f"{rule} has a loss of {loss:.3f}, hardly less than the untrained model's {untrained:.3f}"
    return ""


def _number(score: float) -> float:
    return -inf if isnan(score) else score
