"""FedFix (Fraboni et al. 2023, arXiv 2206.10189), Figures 2 and 4: topologies/papers/fedfix-*.yaml."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.papers.report import Claim, Report
from benchmarks.papers.trials import Bench, Curve, Judge, Trial

PARTITIONS: dict[str, dict[str, Any]] = {
    "MNIST": {"scheme": "dirichlet", "alpha": 0.1},
    "MNIST-shard": {"scheme": "pathological", "classes_per_client": 1},
}
WEIGHTS = ("identical", "time_based")
RULES: dict[str, dict[str, Any]] = {
    "sync": {"name": "fedavg"},
    "async": {"name": "async_fedavg", "weights": "time_based"},
    "fedfix": {"name": "fedfix", "period": "500ms"},
}


class Key(NamedTuple):
    """One run."""

    data: str
    rule: str
    """Or weights, of asynchronous FedAvg on MNIST."""
    lr: float
    seed: int


@dataclass(frozen=True, slots=True)
class Extent:
    mnist_grid: tuple[float, ...]
    mnist_seeds: tuple[int, ...]
    mnist_horizon: str
    cifar_grid: tuple[float, ...]
    cifar_seeds: tuple[int, ...]
    cifar_horizon: str


FULL = Extent((0.01, 0.03, 0.1), (1, 2), "200s", (0.003, 0.01, 0.03), (1,), "30s")
QUICK = Extent((0.1,), (1,), "20s", (0.01,), (1,), "2s")


def report(bench: Bench, *, quick: bool) -> Report:
    extent = QUICK if quick else FULL
    trials = {
        Key("CIFAR-10", rule, lr, seed): _cifar(rule, lr, seed, extent)
        for rule in reversed(RULES)  # the longest first
        for lr in extent.cifar_grid
        for seed in extent.cifar_seeds
    }
    trials |= {
        Key(data, weights, lr, seed): _mnist(data, weights, lr, seed, extent)
        for data in PARTITIONS
        for weights in WEIGHTS
        for lr in extent.mnist_grid
        for seed in extent.mnist_seeds
    }
    curves = bench.run("FedFix", trials)
    groups = dict.fromkeys(key[:3] for key in curves)
    loss = {g: fmean(c.final_loss for key, c in curves.items() if key[:3] == g) for g in groups}
    best: dict[tuple[str, str], float] = {}
    for data, rule, lr in sorted(loss, key=lambda group: -loss[group]):
        best[data, rule] = lr  # the least loss comes last, and stays
    return Report(
        title="FedFix (Fraboni et al. 2023), Figures 2 and 4: MNIST and CIFAR-10, F80",
        notes=_notes(extent),
        header=("", "rule", "federated loss", "step size"),
        figures=[
            (data, rule, f"{loss[data, rule, best[data, rule]]:.3f}", f"{best[data, rule]:g}")
            for data in (*PARTITIONS, "CIFAR-10")
            for rule in (WEIGHTS if data in PARTITIONS else RULES)
        ],
        claims=[*_weights(loss, extent), _in_time(curves, best, extent)],
        texts=2,
    )


def _notes(extent: Extent) -> str:
    return (
        f"Reduced to {extent.mnist_horizon} on MNIST (10 clients, seeds: {len(extent.mnist_seeds)}) and "
        f"{extent.cifar_horizon} on CIFAR-10 (20 clients, seeds: {len(extent.cifar_seeds)}). One grid "
        f"of step sizes for all rules: {_listed(extent.mnist_grid)}; {_listed(extent.cifar_grid)}. The "
        "federated loss is the mean over the clients' training data, each client alike, and over the "
        "last fifth of the time. LeNet-5 in batches of 16 stands for the authors' CNN in batches of 64."
    )


def _mnist(data: str, weights: str, lr: float, seed: int, extent: Extent) -> Trial:
    changes = {
        "seed": seed,
        "rule.weights": weights,
        "task.partition": PARTITIONS[data],
        "task.local.lr": lr,
        "stop.after": extent.mnist_horizon,
        "evaluate.every": "1900ms",  # no multiple of the clients' update times
    }
    return Trial("fedfix-mnist", changes, Judge("clients", 300))


def _cifar(rule: str, lr: float, seed: int, extent: Extent) -> Trial:
    changes = {
        "seed": seed,
        "rule": RULES[rule],
        "task.local.lr": lr,
        "stop.after": extent.cifar_horizon,
        "evaluate.every": "1s",
    }
    return Trial("fedfix-cifar10", changes, Judge("clients", 50))


def _weights(loss: Mapping[tuple[str, str, float], float], extent: Extent) -> Iterator[Claim]:
    for data in PARTITIONS:
        identical, timed = (
            {lr: loss[data, weights, lr] for lr in extent.mnist_grid} for weights in WEIGHTS
        )
        lower = sum(timed[lr] < identical[lr] for lr in extent.mnist_grid)
        yield Claim(
            f"{data}: time_based weights reach a lower federated loss than identical ones",
            f"{min(timed.values()):.3f} against {min(identical.values()):.3f}; lower with {lower} of "
            f"{len(extent.mnist_grid)} step sizes",
            min(timed.values()) < min(identical.values()),
        )


def _in_time(
    curves: Mapping[Key, Curve], best: Mapping[tuple[str, str], float], extent: Extent
) -> Claim:
    """How long each rule takes to the loss that synchronous FedAvg ends with."""
    times = {}
    for rule in RULES:
        pairs = [
            (curves[Key("CIFAR-10", rule, best["CIFAR-10", rule], seed)],
             curves[Key("CIFAR-10", "sync", best["CIFAR-10", "sync"], seed)].final_loss)
            for seed in extent.cifar_seeds
        ]  # fmt: skip
        times[rule] = fmean(curve.time_to_loss(target) for curve, target in pairs)
    return Claim(
        "CIFAR-10: FedFix (Δt 0.5 s) beats synchronous FedAvg in time",
        f"to FedAvg's final loss: FedFix {_seconds(times['fedfix'])}, FedAvg "
        f"{_seconds(times['sync'])}, asynchronous FedAvg {_seconds(times['async'])}",
        times["fedfix"] < times["sync"],
    )


def _listed(grid: tuple[float, ...]) -> str:
    return ", ".join(f"{lr:g}" for lr in grid)


def _seconds(time: float) -> str:
    return f"{time:.1f} s" if math.isfinite(time) else "never"
