"""DeFedAvg (Wang et al. 2024, arXiv 2402.11198), Table 1: topologies/papers/defedavg-*.yaml."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from analysis.load import Run
from analysis.metrics import crossed
from analysis.summary import headline
from benchmarks.papers.bench import Bench
from benchmarks.papers.report import Claim, Report

PER_ROUND = 4
"""Updates of a round; 10 in the paper."""
RULES: dict[str, dict[str, dict[str, Any]]] = {
    "niid": {
        "DeFedAvg-nIID": {"name": "defedavg_niid", "sample": PER_ROUND},
        "FedBuff": {"name": "fedbuff", "buffer_size": PER_ROUND, "concurrency": PER_ROUND},
        "FedBuff, all at work": {"name": "fedbuff", "buffer_size": PER_ROUND},
        "FedAvg": {"name": "fedavg", "sample": PER_ROUND},
    },
    "iid": {
        "DeFedAvg-IID": {"name": "defedavg_iid", "buffer_size": PER_ROUND},
        "FedAvg": {"name": "fedavg", "sample": PER_ROUND},
    },
}
PUBLISHED = {"DeFedAvg-nIID": 331.6, "FedBuff": 394.2, "FedAvg": 934.1}
"""Seconds to 60 %, with two classes per client."""
CLAIMS = (
    ("niid", "DeFedAvg-nIID", "FedBuff"),
    ("niid", "DeFedAvg-nIID", "FedBuff, all at work"),
    ("niid", "DeFedAvg-nIID", "FedAvg"),
    ("iid", "DeFedAvg-IID", "FedAvg"),
)


class Key(NamedTuple):
    """One run."""

    data: str
    rule: str
    lr: float


@dataclass(frozen=True, slots=True)
class Extent:
    grid: Mapping[str, tuple[float, ...]]
    """Step sizes, by data."""
    rounds: Mapping[str, int]
    """Of PER_ROUND updates, at most."""
    targets: Mapping[str, float]
    """Accuracy at which a run ends."""


FULL = Extent({"niid": (0.03,), "iid": (0.05,)}, {"niid": 70, "iid": 35}, {"niid": 0.2, "iid": 0.3})
QUICK = Extent({"niid": (0.03,), "iid": (0.05,)}, {"niid": 1, "iid": 1}, {"niid": 0.11, "iid": 0.11})


def report(bench: Bench, *, quick: bool) -> Report:
    extent = QUICK if quick else FULL
    runs = {
        Key(data, setting.variant, setting.lr): run
        for data in RULES
        for setting, run in bench.run(f"defedavg-{data}", _study(data, extent)).items()
    }
    times = {key: crossed(run, "accuracy", extent.targets[key.data]) for key, run in runs.items()}
    best = {pair: _best(times, pair) for pair in dict.fromkeys(key[:2] for key in runs)}
    return Report(
        title="DeFedAvg (Wang et al. 2024), Table 1: CIFAR-10, 100 clients, K = 50",
        notes=_notes(extent),
        header=("", "data", "s to 60 %, published", "s to target", "rounds", "step size"),
        figures=[
            (
                rule,
                "two classes" if data == "niid" else "iid",
                f"{PUBLISHED[rule]:g}" if data == "niid" and rule in PUBLISHED else "",
                _seconds(times[key]),
                str(headline(runs[key]).versions),
                f"{key.lr:g}",
            )
            for (data, rule), key in best.items()
        ],
        claims=[*_claims(times, best, runs)],
        texts=2,
    )


def _study(data: str, extent: Extent) -> dict[str, Any]:
    common = {
        "stop.updates": PER_ROUND * extent.rounds[data],
        "stop.target_accuracy": f"{100 * extent.targets[data]:g}%",
        "evaluate": {"every": "500ms", "samples": 500},
    }
    return {
        "topology": f"defedavg-{data}.yaml",
        "variants": {name: {**common, "rule": rule} for name, rule in RULES[data].items()},
        "grid": {"task.local.lr": extent.grid[data]},
    }


def _best(times: Mapping[Key, float], pair: tuple[str, str]) -> Key:
    """The step size that is soonest at the target."""
    return min((key for key in times if key[:2] == pair), key=lambda key: times[key])


def _claims(
    times: Mapping[Key, float], best: Mapping[tuple[str, str], Key], runs: Mapping[Key, Run]
) -> Iterator[Claim]:
    for data, ours, theirs in CLAIMS:
        published = ""
        if data == "niid" and theirs in PUBLISHED:
            published = f" (60 %: {PUBLISHED[ours]:g} against {PUBLISHED[theirs]:g} s)"
        sooner, later = times[best[data, ours]], times[best[data, theirs]]
        yield Claim(
            f"{ours} reaches the target before {theirs}{published}",
            f"{_seconds(sooner)} against {_seconds(later)} s",
            sooner < later,
            ""
            if math.isfinite(sooner)
            else f"our rounds were over after {runs[best[data, ours]].evaluations['at'].max():.0f} s",
        )


def _notes(extent: Extent) -> str:
    targets, rounds = extent.targets, extent.rounds
    grids = "; ".join(", ".join(f"{lr:g}" for lr in grid) for grid in extent.grid.values())
    return (
        f"Reduced to targets of {targets['niid']:.0%} with two classes per client and "
        f"{targets['iid']:.0%} with iid data, in at most {rounds['niid']} and {rounds['iid']} rounds; "
        f"one seed. Step sizes, the same for all rules: {grids}. The paper's own network of 878,538 "
        f"parameters, with its compute and transfer times; rounds of {PER_ROUND} clients, not of 10. "
        "FedBuff keeps as many at work as FedAvg; with all hundred, it is a row of its own. Accuracy is "
        "on 500 of the test images. Fashion-MNIST, the table's other half, is not run."
    )


def _seconds(time: float) -> str:
    return f"{time:.1f}" if math.isfinite(time) else "not reached"
