"""Judge an experiment's result claim by claim, by the rules of honest comparison (`honest`). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from statistics import fmean

from analysis.metrics import ConfidenceInterval, t_interval
from benchmarks.papers import honest
from benchmarks.papers.experiments import MEASURES, TOLERATED, Claim, Experiment, Figure
from benchmarks.papers.honest import Judgement, Verdict
from benchmarks.papers.results import Result


@dataclass(frozen=True, slots=True)
class Row:
    """A claim and its verdict. Texts are empty if there is nothing to say."""

    claim: str
    published: str
    ours: str
    """Means of the rule that the claim is about and of the other, with their step sizes."""
    difference: str
    """Mean of the differences by seed, with its 95% interval."""
    seeds: int
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Line:
    """Figures of a variant with one step size."""

    variant: str
    lr: float
    chosen: bool
    """Whether it is the best step size on the seed that chooses; else it is nearly as good."""
    at_edge: bool
    shown: str
    """Mean of the seeds that compare, ± half of its interval; else the figure of the seed that chose."""
    seeds: int


def rows(experiment: Experiment, result: Result | None) -> list[Row]:
    if result is None or not result.cells:
        return [
            Row(claim.text, claim.published, "", "", 0, Verdict.NOT_RUN, "")
            for claim in experiment.claims
        ]
    return [_row(experiment, claim, result) for claim in experiment.claims]


def lines(experiment: Experiment, result: Result) -> list[Line]:
    """Return one line per variant and step size that is compared, in the order of the first runs."""
    return [
        _line(experiment, result, variant, lr, tried)
        for variant in dict.fromkeys(cell.variant for cell in result.cells)
        if (tried := _tried(experiment, result, variant))
        for lr in steps(experiment, result, variant)
    ]


def _line(
    experiment: Experiment, result: Result, variant: str, lr: float, tried: Mapping[float, float]
) -> Line:
    measure, best = MEASURES[experiment.figure], honest.best_step(tried)
    alone = {0: _scored(experiment, result, variant)[lr]}
    scores = _compared(result, variant, lr, experiment.figure) or alone
    interval = t_interval(list(scores.values()))
    shown = measure.shown(interval.mean)
    if interval.count > 1:
        half = measure.differs((interval.high - interval.low) / 2).lstrip("+-")
        shown += f" ± {half}"
    seeds = interval.count * (0 not in scores)
    return Line(variant, lr, lr == best, lr == best and honest.at_edge(tried), shown, seeds)


def steps(experiment: Experiment, result: Result, variant: str) -> tuple[float, ...]:
    """Step sizes that are compared: the best on the seed that chooses, and those nearly as good."""
    tried = _tried(experiment, result, variant)
    best = honest.best_step(tried)
    near = result.of_seed(variant, tuning_seed(result), MEASURES[experiment.figure].near)
    return honest.near_best(tried, near[best])


def tuning_seed(result: Result) -> int:
    """The lowest seed: it chooses the step sizes and is not compared."""
    return min(cell.seed for cell in result.cells)


def _tried(experiment: Experiment, result: Result, variant: str) -> dict[float, float]:
    """Step size -> what it is chosen by, on the seed that chooses."""
    return result.of_seed(variant, tuning_seed(result), MEASURES[experiment.figure].choice)


def _scored(experiment: Experiment, result: Result, variant: str) -> dict[float, float]:
    """Step size -> score, on the seed that chooses."""
    return result.of_seed(variant, tuning_seed(result), MEASURES[experiment.figure].score)


def _compared(result: Result, variant: str, lr: float, figure: Figure) -> dict[int, float]:
    """Seed -> score, for the seeds that compare."""
    scores = result.by_seed(variant, lr, MEASURES[figure].score)
    return {seed: score for seed, score in scores.items() if seed != tuning_seed(result)}


def _row(experiment: Experiment, claim: Claim, result: Result) -> Row:
    figure = claim.figure or experiment.figure
    variants = (claim.ours, *claim.others)
    tried = {variant: _tried(experiment, result, variant) for variant in variants}
    if missing := [variant for variant in variants if not tried[variant]]:
        return _unjudged(claim, Verdict.NOT_RUN, f"no runs of {', '.join(missing)}")
    near = {variant: steps(experiment, result, variant) for variant in variants}
    best = {variant: own[0] for variant, own in near.items()}
    if figure == "tolerance":  # a property of all step sizes, not of one
        near = {variant: (lr,) for variant, lr in best.items()}
        scores = {(variant, lr): _tolerances(result, variant) for variant, lr in best.items()}
    else:
        scores = {
            (variant, lr): _compared(result, variant, lr, figure)
            for variant, own in near.items()
            for lr in own
        }
    reason = _unfit(experiment, claim, result, best)
    for variant in variants:
        if not reason and honest.at_edge(tried[variant]):
            reason = f"the best step size of {variant}, {best[variant]:g}, is the edge of what was tried"
    for variant in claim.others if figure == "tolerance" else ():
        if not reason and log10(max(tried[variant])) in scores[variant, best[variant]].values():
            reason = f"{variant} tolerates the largest step size tried, {max(tried[variant]):g}"
    judged = {other: _settled(claim.ours, other, near, scores) for other in claim.others}
    whole = honest.together([judgement for _, judgement in judged.values()])
    other, lrs = next((name, lrs) for name, (lrs, judgement) in judged.items() if judgement is whole)
    sides = (claim.ours, lrs[0]), (other, lrs[1])
    paired = scores[sides[0]].keys() & scores[sides[1]].keys()
    ours, theirs = (
        _shown(
            figure,
            {seed: scores[side][seed] for seed in paired},
            _scored(experiment, result, side[0])[side[1]],
            side[1],
        )
        for side in sides
    )
    return Row(
        claim.text,
        claim.published,
        f"{ours} / {theirs} ({other.rpartition(', ')[2]})",
        _difference(figure, whole.interval),
        whole.interval.count,
        Verdict.NOT_TESTED if reason else whole.verdict,
        reason or whole.reason,
    )


def _settled(
    ours: str,
    other: str,
    near: Mapping[str, Sequence[float]],
    scores: Mapping[tuple[str, float], Mapping[int, float]],
) -> tuple[honest.Steps, Judgement]:
    """Decide the claim that `ours` is better than `other`: the chosen step size of each, with all of the
    other's that are to be compared."""
    chosen = near[ours][0], near[other][0]
    pairs = [(chosen[0], lr) for lr in near[other]] + [(lr, chosen[1]) for lr in near[ours][1:]]
    judged = {pair: _paired(scores[ours, pair[0]], scores[other, pair[1]]) for pair in pairs}
    return honest.settled(judged, chosen)


def _unjudged(claim: Claim, verdict: Verdict, reason: str) -> Row:
    return Row(claim.text, claim.published, "", "", 0, verdict, reason)


def _paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Judgement:
    """Judge by the seeds that both have."""
    both = ours.keys() & theirs.keys()
    return honest.judge({seed: ours[seed] for seed in both}, {seed: theirs[seed] for seed in both})


def _unfit(experiment: Experiment, claim: Claim, result: Result, best: Mapping[str, float]) -> str:
    """Why the claim's runs say nothing about the paper; empty if they do."""
    cells = {
        variant: [cell for cell in result.cells if (cell.variant, cell.lr) == (variant, best[variant])]
        for variant in (claim.ours, *claim.others)
    }
    if invalid := sum(not cell.valid for cell in result.cells if cell.variant in cells):
        return f"devices did not have what was asked for in {invalid} of the runs"
    if experiment.figure == "loss":
        for variant, own in cells.items():
            loss, untrained = fmean(c.loss for c in own), fmean(c.untrained_loss for c in own)
            if reason := honest.not_learned(loss, untrained, variant):
                return reason
        return ""
    accuracy = {variant: 100 * fmean(cell.accuracy for cell in own) for variant, own in cells.items()}
    baseline = max(claim.others, key=lambda variant: accuracy[variant])
    untrained = 100 * fmean(cell.untrained_accuracy for cell in cells[baseline])
    published = None if claim.baseline != claim.baseline else claim.baseline
    if reason := honest.not_the_papers(accuracy[baseline], untrained, published, baseline):
        return reason
    compared = [cell for own in cells.values() for cell in own if cell.seed != tuning_seed(result)]
    reached = any(cell.reached <= cell.ended for cell in compared)
    if experiment.target is not None and compared and not reached:
        return f"none has reached {experiment.target:.0%} on the seeds that compare"
    return ""


def _tolerances(result: Result, variant: str) -> dict[int, float]:
    """Seed -> log10 of the largest tolerated step size; only seeds that went through the whole grid."""
    score, found = MEASURES["accuracy"].score, {}
    grid = result.of_seed(variant, tuning_seed(result), score).keys()
    for seed in sorted({cell.seed for cell in result.cells}):
        accuracies = result.of_seed(variant, seed, score)
        if len(accuracies) > 1 and accuracies.keys() >= grid:
            least = max(accuracies.values()) - TOLERATED
            found[seed] = max(log10(lr) for lr, accuracy in accuracies.items() if accuracy >= least)
    return found


def _shown(figure: Figure, scores: Mapping[int, float], alone: float, lr: float) -> str:
    """Format a mean. `alone`: score of the seed that chooses, used if no seed compares."""
    measure = MEASURES[figure]
    if figure == "tolerance":
        return measure.shown(fmean(scores.values())) if scores else "?"
    mean = fmean(scores.values()) if scores else alone
    return f"{measure.shown(mean)} ({lr:g})"


def _difference(figure: Figure, interval: ConfidenceInterval) -> str:
    differs = MEASURES[figure].differs
    if interval.count == 0:
        return ""
    if interval.count == 1:
        return differs(interval.mean)
    ends = interval.low, interval.high
    low, high = reversed(ends) if figure in ("loss", "time") else ends
    return f"{differs(interval.mean)} ({differs(low)} to {differs(high)})"
