"""AREA (Iakovidou & Kim 2024, arXiv 2405.10123), Tables 3 and 4: topologies/papers/area.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from analysis.metrics import final
from benchmarks.papers.bench import Bench
from benchmarks.papers.report import Claim, Report

RULES: dict[str, dict[str, Any]] = {
    "s-fedavg": {"name": "fedavg", "sample": 4},
    "as_fedavg": {"name": "as_fedavg", "every": 4},
    "fedbuff": {"name": "fedbuff", "buffer_size": 4},
    "area": {"name": "area", "criterion": "every", "every": 4},
}
OTHERS = ("s-fedavg", "as_fedavg", "fedbuff")
ASYNCHRONOUS = ("as_fedavg", "fedbuff", "area")
RATES: dict[str, Any] = {
    "uniform": 10,
    "non-uniform": {"distribution": "normal", "mean": 10, "std": 5, "low": 0.1},
}
PUBLISHED = {("uniform", 50): (88.0, 84.2), ("non-uniform", 50): (87.3, 85.1)}
"""Final accuracy in % of the best AREA and of the best of the others."""
HURTS = 1.0
"""Points of accuracy that non-uniform rates must cost for us to say that they hurt."""
TOLERATED = 2.0
"""A step size is tolerated where the accuracy is within so many points of the rule's best."""


Group = tuple[str, int, str]
"""Rates, local steps and rule."""


class Key(NamedTuple):
    """One run."""

    rates: str
    steps: int
    rule: str
    lr: float
    seed: int


@dataclass(frozen=True, slots=True)
class Extent:
    grids: Mapping[int, tuple[float, ...]]
    """Step sizes, by local steps."""
    seeds: tuple[int, ...]
    """The first goes through the grid, the others run the best step size of each rule again."""
    horizons: Mapping[int, float]
    """Seconds, by local steps."""


FULL = Extent(
    {1: (0.03, 0.1, 0.3, 1, 3, 10), 50: (0.003, 0.01, 0.1, 0.3, 1, 3)},
    (1, 2),
    {1: 15, 50: 2},
)
QUICK = Extent({1: (0.1,), 50: (0.1,)}, (1,), {1: 1, 50: 0.1})


def report(bench: Bench, *, quick: bool) -> Report:
    extent = QUICK if quick else FULL
    groups = [
        (rates, steps, rule)
        for steps in extent.grids
        for rule in reversed(RULES)  # s-fedavg has done in a second: last
        for rates in RATES
    ]
    accuracy: dict[Key, float] = {}
    for steps, grid in extent.grids.items():
        variants = {group: _changes(group, extent) for group in groups if group[1] == steps}
        over: dict[str, Any] = {"task.local.lr": grid, "seed": extent.seeds[:1]}
        accuracy |= _final_accuracy(bench, f"area-{steps}", variants, over)
    best = {group: _best(accuracy, group) for group in groups}
    if others := extent.seeds[1:]:
        again = {
            group: {**_changes(group, extent), "task.local.lr": key.lr} for group, key in best.items()
        }
        accuracy |= _final_accuracy(bench, "area-seeds", again, {"seed": others})
    found = {group: _mean(accuracy, key, extent.seeds) for group, key in best.items()}
    tolerated = {group: _tolerated(accuracy, group, extent.seeds[0]) for group in best}
    return Report(
        title="AREA (Iakovidou & Kim 2024), Tables 3 and 4: MNIST, 128 clients, dirichlet 0.1",
        notes=_notes(extent),
        header=("", "uniform %", "step", "tolerated", "non-uniform %", "step", "tolerated"),
        figures=[
            (
                f"{rule}, {_steps(steps)}",
                *(
                    text
                    for group in ((rates, steps, rule) for rates in RATES)
                    for text in (
                        f"{found[group]:.1f}",
                        f"{best[group].lr:g}",
                        f"to {tolerated[group]:g}",
                    )
                ),
            )
            for steps in extent.grids
            for rule in RULES
        ],
        claims=[*_ranking(found, _spread(accuracy, best)), _hurt(found), *_tolerance(tolerated, found)],
    )


def _notes(extent: Extent) -> str:
    grids = "; ".join(f"{_listed(grid)} for {_steps(n)}" for n, grid in extent.grids.items())
    horizons = " and ".join(f"{seconds:g} s for {_steps(n)}" for n, seconds in extent.horizons.items())
    return (
        f"Horizons as in the paper: {horizons}. It does not say how the images are scaled (here from 0 "
        f"to 1): compare claims, not digits. One grid of step sizes for all rules: {grids}. The best "
        f"one's accuracy is the mean over {len(extent.seeds)} seeds and the last fifth of the time. A "
        f"step size is tolerated where it costs at most {TOLERATED:g} points of the rule's best."
    )


def _changes(group: Group, extent: Extent) -> dict[str, Any]:
    rates, steps, rule = group
    seconds = extent.horizons[steps]
    return {
        "rule": RULES[rule],
        "task.local.steps": steps,
        "devices[0].speed": RATES[rates],
        "stop.after": f"{1000 * seconds:g}ms",
        "evaluate.every": f"{50 * seconds:g}ms",
    }


def _final_accuracy(
    bench: Bench, name: str, variants: Mapping[Group, Any], grid: Mapping[str, Any]
) -> dict[Key, float]:
    """Of each run of a sweep, as a share."""
    groups = {", ".join(map(str, group)): group for group in variants}
    study = {
        "topology": "area.yaml",
        "variants": {variant: variants[group] for variant, group in groups.items()},
        "grid": grid,
    }
    return {
        Key(*groups[setting.variant], setting.lr, setting.seed): final(run, "accuracy")
        for setting, run in bench.run(name, study).items()
    }


def _best(accuracy: Mapping[Key, float], group: Group) -> Key:
    """The step size of the highest final accuracy."""
    return max((key for key in accuracy if key[:3] == group), key=lambda key: accuracy[key])


def _tolerated(accuracy: Mapping[Key, float], group: Group, seed: int) -> float:
    """The largest step size that is tolerated, by the runs of `seed`, which went through the grid."""
    by_lr = {key.lr: value for key, value in accuracy.items() if (*key[:3], key.seed) == (*group, seed)}
    least = max(by_lr.values()) - TOLERATED / 100
    return max(lr for lr, value in by_lr.items() if value >= least)


def _mean(accuracy: Mapping[Key, float], best: Key, seeds: Sequence[int]) -> float:
    """Final accuracy in %, over `seeds`."""
    return 100 * fmean(accuracy[best._replace(seed=seed)] for seed in seeds)


def _spread(accuracy: Mapping[Key, float], best: Mapping[Group, Key]) -> float:
    """The most points by which two seeds of one setting differ."""
    finals = [
        [100 * value for other, value in accuracy.items() if other[:4] == key[:4]]
        for key in best.values()
    ]
    return max(max(values) - min(values) for values in finals)


def _ranking(found: Mapping[Group, float], spread: float) -> Iterator[Claim]:
    for (rates, steps), (area, other) in PUBLISHED.items():
        rule = max(OTHERS, key=lambda rule: found[rates, steps, rule])
        ours, theirs = found[rates, steps, "area"], found[rates, steps, rule]
        yield Claim(
            f"{_steps(steps)}, {rates} rates: the best AREA beats the best of the others, "
            f"{area} against {other} %",
            f"{ours:.1f} against {theirs:.1f} % ({rule})",
            ours > theirs,
            f"seeds alone differ by up to {spread:.1f} points" if theirs - ours < spread else "",
        )


def _hurt(found: Mapping[Group, float]) -> Claim:
    lost = {rule: found["uniform", 1, rule] - found["non-uniform", 1, rule] for rule in RULES}
    most = max(ASYNCHRONOUS, key=lambda rule: lost[rule])
    return Claim(
        "One local step: non-uniform rates hurt S-FedAvg and hardly the asynchronous rules",
        f"S-FedAvg loses {lost['s-fedavg']:.1f} points, of the others {most} most: {lost[most]:.1f}",
        lost["s-fedavg"] >= HURTS and lost[most] < lost["s-fedavg"] / 2,
    )


def _tolerance(tolerated: Mapping[Group, float], found: Mapping[Group, float]) -> Iterator[Claim]:
    for steps in (1, 50):
        most = {
            rates: max((tolerated[rates, steps, rule], rule) for rule in OTHERS)[1] for rates in RATES
        }
        ratios = {
            rates: tolerated[rates, steps, "area"] / tolerated[rates, steps, rule]
            for rates, rule in most.items()
        }
        closest = min(RATES, key=lambda rates: ratios[rates])
        rule = most[closest]
        yield Claim(
            f"{_steps(steps)}: AREA tolerates step sizes about 10 times larger",
            ", ".join(f"{ratio:.0f} times, {rates} rates" for rates, ratio in ratios.items()),
            min(ratios.values()) >= 9,
            f"{rule} tolerates large ones too, at a best of {found[closest, steps, rule]:.1f} %",
        )


def _steps(steps: int) -> str:
    return "1 local step" if steps == 1 else f"{steps} local steps"


def _listed(grid: Sequence[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in grid)
