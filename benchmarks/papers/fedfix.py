"""FedFix (Fraboni et al. 2023, arXiv 2206.10189), Figures 2 and 4: topologies/papers/fedfix-*.yaml."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from analysis.load import Run
from analysis.metrics import crossed, final
from benchmarks.papers.bench import Bench
from benchmarks.papers.report import Claim, Report

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
    shakespeare_grid: tuple[float, ...]
    shakespeare_horizon: str


FULL = Extent((0.01, 0.03, 0.1), (1, 2), "200s", (0.003, 0.01, 0.03), (1,), "30s", (0.3, 1.0), "12s")
QUICK = Extent((0.1,), (1,), "6s", (0.01,), (1,), "2s", (1.0,), "1s")


def report(bench: Bench, *, quick: bool) -> Report:
    extent = QUICK if quick else FULL
    studies = {
        "fedfix-shakespeare": _rules(
            "Shakespeare",
            "fedfix-shakespeare.yaml",
            extent.shakespeare_horizon,
            extent.shakespeare_grid,
            (1,),
        ),
        "fedfix-cifar10": _rules(
            "CIFAR-10",
            "fedfix-cifar10.yaml",
            extent.cifar_horizon,
            extent.cifar_grid,
            extent.cifar_seeds,
        ),
        "fedfix-mnist": _mnist(extent),
    }
    runs: dict[Key, Run] = {}
    for name, study in studies.items():
        for setting, run in bench.run(name, study).items():
            data, rule = setting.variant.split(", ")
            runs[Key(data, rule, setting.lr, setting.seed)] = run
    groups = dict.fromkeys(key[:3] for key in runs)
    loss = {
        group: fmean(final(run, "loss") for key, run in runs.items() if key[:3] == group)
        for group in groups
    }
    best: dict[tuple[str, str], float] = {}
    for data, rule, lr in sorted(loss, key=lambda group: -loss[group]):
        best[data, rule] = lr  # the least loss comes last, and stays
    return Report(
        title="FedFix (Fraboni et al. 2023), Figures 2 and 4, and Shakespeare: F80",
        notes=_notes(extent),
        header=("", "rule", "federated loss", "step size"),
        figures=[
            (data, rule, f"{loss[data, rule, best[data, rule]]:.3f}", f"{best[data, rule]:g}")
            for data in (*PARTITIONS, "CIFAR-10", "Shakespeare")
            for rule in (WEIGHTS if data in PARTITIONS else RULES)
        ],
        claims=[
            *_weights(loss, extent),
            _in_time("CIFAR-10", runs, best, extent.cifar_seeds),
            _in_time("Shakespeare", runs, best, (1,)),
        ],
        texts=2,
    )


def _notes(extent: Extent) -> str:
    return (
        f"Reduced to {extent.mnist_horizon} on MNIST (10 clients, seeds: {len(extent.mnist_seeds)}) and "
        f"{extent.cifar_horizon} on CIFAR-10 (20 clients, seeds: {len(extent.cifar_seeds)}) and "
        f"{extent.shakespeare_horizon} on Shakespeare (10 clients, one seed). One grid of step sizes "
        f"for all rules: {_listed(extent.mnist_grid)}; {_listed(extent.cifar_grid)}; "
        f"{_listed(extent.shakespeare_grid)}. The federated loss is the mean over the clients' training "
        "data, each client alike, and over the last fifth of the time. On CIFAR-10 LeNet-5 in batches "
        "of 16 stands for the authors' CNN in batches of 64; on Shakespeare it is their LSTM, in "
        "batches of 16."
    )


def _mnist(extent: Extent) -> dict[str, Any]:
    common = {
        "stop.after": extent.mnist_horizon,
        # 1.9 s is no multiple of the clients' update times.
        "evaluate": {"every": "1900ms", "on": "clients", "samples": 300},
    }
    return {
        "topology": "fedfix-mnist.yaml",
        "variants": {
            f"{data}, {weights}": {**common, "task.partition": partition, "rule.weights": weights}
            for data, partition in PARTITIONS.items()
            for weights in WEIGHTS
        },
        "grid": {"task.local.lr": extent.mnist_grid, "seed": extent.mnist_seeds},
    }


def _rules(
    data: str, topology: str, horizon: str, grid: tuple[float, ...], seeds: tuple[int, ...]
) -> dict[str, Any]:
    common = {
        "stop.after": horizon,
        "evaluate": {"every": "1s", "on": "clients", "samples": 50},
    }
    return {
        "topology": topology,
        "variants": {
            f"{data}, {rule}": {**common, "rule": RULES[rule]}
            for rule in reversed(RULES)  # the longest first
        },
        "grid": {"task.local.lr": grid, "seed": seeds},
    }


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
    data: str,
    runs: Mapping[Key, Run],
    best: Mapping[tuple[str, str], float],
    seeds: tuple[int, ...],
) -> Claim:
    """How long each rule takes to the loss that synchronous FedAvg ends with."""

    def run(rule: str, seed: int) -> Run:
        return runs[Key(data, rule, best[data, rule], seed)]

    times = {
        rule: fmean(crossed(run(rule, seed), "loss", final(run("sync", seed), "loss")) for seed in seeds)
        for rule in RULES
    }
    return Claim(
        f"{data}: FedFix (Δt 0.5 s) beats synchronous FedAvg in time",
        f"to FedAvg's final loss: FedFix {_seconds(times['fedfix'])}, FedAvg "
        f"{_seconds(times['sync'])}, asynchronous FedAvg {_seconds(times['async'])}",
        times["fedfix"] < times["sync"],
    )


def _listed(grid: tuple[float, ...]) -> str:
    return ", ".join(f"{lr:g}" for lr in grid)


def _seconds(time: float) -> str:
    return f"{time:.1f} s" if math.isfinite(time) else "never"
