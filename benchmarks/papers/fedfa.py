"""FedFa (Xu et al. 2024, arXiv 2404.11015), Tables 2 and 6: topologies/papers/fedfa.yaml."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from analysis.load import Run
from analysis.metrics import crossed
from analysis.summary import headline
from benchmarks.papers.bench import Bench
from benchmarks.papers.report import Claim, Report

WINDOW = 5
"""Updates in FedFa's window, in FedBuff's buffer, and that Port waits for."""
DELTA = {"name": "fedfa", "window_size": WINDOW, "variant": "delta", "server_lr": 1 / WINDOW}
"""Each update counts WINDOW times."""
PROX = {"task.local.proximal": 0.01}
NOVA = {"task.local.fednova": True}
RUNS: dict[str, dict[str, Any]] = {
    "FedAvg": {"rule": {"name": "fedavg"}},
    "FedAsync": {"rule": {"name": "fedasync"}},
    "FedBuff": {"rule": {"name": "fedbuff", "buffer_size": WINDOW, "reply": "after_aggregation"}},
    "Port": {"rule": {"name": "port", "min_updates": WINDOW, "urgent": False}},
    "Port, urgent": {"rule": {"name": "port", "min_updates": WINDOW}},
    "FedFa-Param": {"rule": {"name": "fedfa", "window_size": WINDOW}},
    "FedFa-Delta": {"rule": DELTA},
    "FedProx": {"rule": {"name": "fedavg"}, **PROX},
    "FedProx + FedFa": {"rule": DELTA, **PROX},
    "FedNova": {"rule": {"name": "fedavg"}, **NOVA},
    "FedNova + FedFa": {"rule": DELTA, **NOVA},
}
"""What each differs in from the topology."""
SYNCHRONOUS, SEMI = ("FedAvg",), ("FedBuff", "Port", "Port, urgent")
FEDFA = ("FedFa-Param", "FedFa-Delta")
FALL = 0.1
"""A fall of the accuracy, between two evaluations, by which we call a run unstable."""


@dataclass(frozen=True, slots=True)
class Extent:
    seeds: tuple[int, ...]
    updates: int
    """Per run, at most."""
    target: float
    """Accuracy at which a run ends."""


FULL = Extent((1,), 600, 0.3)
QUICK = Extent((1,), 12, 0.15)


def report(bench: Bench, *, quick: bool) -> Report:
    extent = QUICK if quick else FULL
    runs: dict[str, list[Run]] = {name: [] for name in RUNS}
    for setting, run in bench.run("fedfa", _study(extent)).items():
        runs[setting.variant].append(run)
    times = {
        name: fmean(crossed(run, "accuracy", extent.target) for run in same)
        for name, same in runs.items()
    }
    return Report(
        title="FedFa (Xu et al. 2024), Tables 2 and 6: CIFAR-10, long-tailed delays, 10 at work",
        notes=_notes(extent),
        header=("", "s to target", "times FedAvg's speed", "best accuracy %", "largest fall"),
        figures=[
            (
                name,
                _seconds(times[name]),
                f"{times['FedAvg'] / times[name]:.1f}"
                if max(times[name], times["FedAvg"]) < math.inf
                else "",
                f"{100 * max(headline(run).best_accuracy for run in runs[name]):.1f}",
                f"{100 * max(map(_fall, runs[name])):.1f}",
            )
            for name in RUNS
        ],
        claims=[*_claims(times, runs)],
    )


def _study(extent: Extent) -> dict[str, Any]:
    common = {
        "stop.updates": extent.updates,
        "stop.target_accuracy": f"{100 * extent.target:g}%",
        "evaluate": {"every": "5s", "samples": 1000},
    }
    return {
        "topology": "fedfa.yaml",
        "variants": {name: {**common, **changes} for name, changes in RUNS.items()},
        "grid": {"seed": extent.seeds},
    }


def _claims(times: Mapping[str, float], runs: Mapping[str, list[Run]]) -> Iterator[Claim]:
    for what, rules, published in (
        ("synchronous FedAvg", SYNCHRONOUS, 6),
        ("FedBuff and Port", SEMI, 4),
    ):
        fedfa, other = (min(names, key=lambda name: times[name]) for names in (FEDFA, rules))
        yield Claim(
            f"FedFa reaches the target before {what} (up to {published} times as fast)",
            f"{fedfa} {_seconds(times[fedfa])} s, {other} {_seconds(times[other])} s",
            times[fedfa] < times[other],
        )
    prox, combined = times["FedProx"], times["FedProx + FedFa"]
    yield Claim(
        "FedProx reaches the target sooner with FedFa",
        f"{_seconds(combined)} against {_seconds(prox)} s",
        combined < prox,
    )
    fall = max(map(_fall, runs["FedNova + FedFa"]))
    late = times["FedNova + FedFa"]
    yield Claim(
        "FedNova is unstable with FedFa-Delta",
        f"its accuracy falls by up to {100 * fall:.1f} points; target: {_seconds(late)} s",
        fall >= FALL or math.isinf(late),
    )


def _fall(run: Run) -> float:
    """The largest fall of the accuracy from one evaluation to the next."""
    return max((before - after for before, after in pairwise(run.evaluations["accuracy"])), default=0.0)


def _notes(extent: Extent) -> str:
    return (
        f"Reduced to a target of {extent.target:.0%} in at most {extent.updates} updates; seeds: "
        f"{len(extent.seeds)}. Ten clients that are always at work stand for ten of a hundred, LeNet-5 "
        f"for ResNet-18. The paper's window and delays are not known here: {WINDOW} updates, for "
        "FedBuff and Port too; Pareto delays of 3 s on average. FedFa-Delta's server_lr is 1/window. "
        "All rules have one step size. Accuracy is on 1,000 of the test images."
    )


def _seconds(time: float) -> str:
    return f"{time:.1f}" if math.isfinite(time) else "not reached"
