"""The papers' experiments: for each a sweep in topologies/papers/sweeps, its measure, and the claims.

Published figures are those that we know; a claim without figures is made in words or in a chart of the
paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import log10, nan
from typing import Literal

from benchmarks.papers.results import Cell

MNIST, SHAKESPEARE = "ylecun/mnist", "flwrlabs/shakespeare"
NEAR_POINTS, NEAR = 1.0, 0.05
"""Points of accuracy, and share of a loss or time, that a step size may lose against the best one on the
seed that chooses: on other seeds it may be the best."""
Paper = Literal["area", "fedfix", "defedavg", "fedfa"]
Figure = Literal["accuracy", "loss", "time", "fall", "tolerance"]


@dataclass(frozen=True, slots=True)
class Measure:
    name: str
    score: Callable[[Cell], float]
    """Higher is better."""
    shown: Callable[[float], str]
    """A score, or a mean of scores, in the table."""
    differs: Callable[[float], str]
    """A difference of scores, in the table."""
    near: Callable[[Cell], float] = lambda best: nan
    """How much lower a run's score than the best run's may be for its step size to be nearly as good;
    NaN: no other step size is."""
    chosen_by: Callable[[Cell], float] | None = None
    """What chooses a rule's step size; higher is better. None: the score."""

    def choice(self, cell: Cell) -> float:
        return (self.chosen_by or self.score)(cell)


def _time(cell: Cell) -> float:
    """Log of the time to the target; a target that was not reached counts as reached at the end
    (`honest`)."""
    return -min(cell.reached, cell.ended)


def _time_then_accuracy(cell: Cell) -> float:
    """If no step size reaches the target, the most accurate one is best. NaN if the model is no more
    accurate than the untrained one: there training diverges."""
    if cell.reached <= cell.ended:
        return -cell.reached
    return -cell.ended - (1 - cell.accuracy) if cell.accuracy > cell.untrained_accuracy else nan


def _power(exponent: float) -> str:
    """Format 10 to the `exponent` with two digits."""
    return f"{float(f'{10**exponent:.2g}'):,g}"


MEASURES: Mapping[Figure, Measure] = {
    "accuracy": Measure(
        "final accuracy %",
        lambda cell: 100 * cell.accuracy,
        "{:.1f}".format,
        "{:+.1f}".format,
        lambda best: NEAR_POINTS,
    ),
    "loss": Measure(
        "federated loss",
        lambda cell: -cell.loss,
        lambda x: f"{-x:.3f}",
        lambda x: f"{-x:+.3f}",
        lambda best: NEAR * best.loss,
    ),
    "time": Measure(
        "s to target",
        _time,
        lambda x: f"{-x:.1f}",
        lambda x: f"{0 - x:+.1f}",  # 0 - 0.0 avoids a negative 0
        lambda best: NEAR * best.reached if best.reached <= best.ended else nan,
        _time_then_accuracy,
    ),
    "fall": Measure(
        "largest fall, points", lambda cell: 100 * cell.fall, "{:.1f}".format, "{:+.1f}".format
    ),
    # A property of the step sizes, not of a run (`judging`).
    "tolerance": Measure(
        "largest step size", lambda cell: log10(cell.lr), _power, lambda x: f"×{_power(x)}"
    ),
}
TOLERATED = 2.0
"""Points of accuracy that a step size may lose against the rule's best one to be tolerated."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim that one variant of an experiment does better than each of others."""

    text: str
    ours: str
    others: tuple[str, ...]
    published: str = ""
    """Published figures: of the one, and of the best of the others."""
    baseline: float = nan
    """Published accuracy (%) of the best of the others; NaN: unknown."""
    figure: Figure | None = None
    """Measure of the claim; None: the experiment's."""


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    """Name of its results, and of its sweep unless `sweep` names another."""
    paper: Paper
    title: str
    figure: Figure
    """Measure that chooses the step size, and that claims are about."""
    claims: tuple[Claim, ...] = ()
    target: float | None = None
    """Target accuracy, from 0 to 1; None: no target."""
    differs: str = ""
    """How it differs from the paper's experiment; empty: it does not."""
    data: str = "uoft-cs/cifar10"
    """Name of the dataset."""
    sweep: str = ""
    """Experiment whose sweep it runs; empty: it has its own."""
    runtime: Literal["docker", "process", "virtual"] = "virtual"
    """Runtime of the runs that compare; step sizes are chosen in virtual time."""
    fits: bool = False
    """Whether `make papers` runs it: together with the others it fits into 20 minutes on 2 cores."""

    @property
    def file(self) -> str:
        """File of its sweep, in topologies/papers/sweeps."""
        return f"{self.sweep or self.name}.yaml"


def _area(rates: str, published: str = "", baseline: float = nan) -> tuple[Claim, ...]:
    others = ("FedBuff", "AS-FedAvg", "S-FedAvg")
    ours, theirs = f"{rates}, AREA", tuple(f"{rates}, {rule}" for rule in others)
    return (
        Claim(
            f"{rates} rates: the best AREA is more accurate than the best of the others",
            ours,
            theirs,
            published,
            baseline,
        ),
        *(
            Claim(
                f"{rates} rates: AREA tolerates larger step sizes than {rule}",
                ours,
                (f"{rates}, {rule}",),
                "about ×10",
                figure="tolerance",
            )
            for rule in others
        ),
    )


def _scaled(scaling: str) -> Claim:
    return Claim(
        f"images {scaling}: AREA is more accurate than FedBuff",
        f"{scaling}, AREA",
        (f"{scaling}, FedBuff",),
    )


def _fedfix(period: str) -> tuple[Claim, ...]:
    return tuple(
        Claim(f"FedFix (Δt {period}) has a lower loss than {words} FedAvg", f"FedFix {period}", (rule,))
        for words, rule in (("synchronous", "FedAvg"), ("asynchronous", "Async FedAvg"))
    )


def _defedavg(target: str, published: Mapping[str, str] | None = None) -> tuple[Claim, ...]:
    """Claims on DeFedAvg. `published`: other rule -> figures."""
    return tuple(
        Claim(
            f"DeFedAvg-nIID is sooner at {target} than {rule}",
            "DeFedAvg-nIID",
            (rule,),
            (published or {}).get(rule, ""),
        )
        for rule in ("FedBuff", "FedAvg")
    )


_FEDFIX = _fedfix("0.5 s")
_FEDFA = (
    Claim(
        "FedFa is sooner at the target than synchronous FedAvg",
        "FedFa-Param",
        ("FedAvg",),
        "up to 6 times",
    ),
    Claim(
        "FedFa is sooner at the target than FedBuff and Port",
        "FedFa-Param",
        ("FedBuff", "Port", "Port, urgent"),
        "up to 4 times",
    ),
    Claim("FedProx is sooner at the target with FedFa", "FedProx + FedFa", ("FedProx",)),
    Claim("FedNova is less stable with FedFa-Delta", "FedNova + FedFa", ("FedNova",), figure="fall"),
)


def _fleet(
    paper: Paper, figure: Figure, claims: tuple[Claim, ...], differs: str, target: float | None = None
) -> tuple[Experiment, Experiment]:
    """Make the claims on a fleet of eight throttled devices: in containers, and in virtual time."""
    data = "MNIST" if target is None else f"MNIST to {target:.0%}"
    title = "Eight throttled devices in {}: logistic regression on {}, 40 s".format
    name = f"{paper}-fleet"
    in_containers = Experiment(
        name,
        paper,
        title("containers", data),
        figure,
        claims,
        target,
        differs,
        MNIST,
        runtime="docker",
    )
    in_virtual_time = replace(
        in_containers,
        name=f"{name}-virtual",
        title=title("virtual time", data),
        sweep=name,
        runtime="virtual",
    )
    return in_containers, in_virtual_time


EXPERIMENTS = (
    Experiment(
        "area-50-steps",
        "area",
        "MNIST, 128 clients, dirichlet 0.1, 50 local steps, 2 s",
        "accuracy",
        (*_area("uniform", "88.0 / 84.2", 84.2), *_area("non-uniform", "87.3 / 85.1", 85.1)),
        differs="The paper does not say how the images are scaled: here from 0 to 1.",
        fits=True,
        data=MNIST,
    ),
    Experiment(
        "area-1-step",
        "area",
        "MNIST, 128 clients, dirichlet 0.1, one local step, 15 s",
        "accuracy",
        (*_area("uniform"), *_area("non-uniform")),
        differs="The paper does not say how the images are scaled: here from 0 to 1.",
        data=MNIST,
    ),
    Experiment(
        "area-scaling",
        "area",
        "How the images are scaled: non-uniform rates, 50 local steps",
        "accuracy",
        tuple(_scaled(scaling) for scaling in ("signed", "standardised")),
        differs="Left out in the paper: from −1 to 1 (signed), or mean 0 and variance 1 (standardised).",
        data=MNIST,
    ),
    Experiment(
        "fedfix-mnist",
        "fedfix",
        "Logistic regression on MNIST, 10 clients, F80, one local step, 200,000 s",
        "loss",
        _weights := tuple(
            Claim(
                f"{data}: time_based weights end with a lower federated loss than identical ones",
                f"{data}, time_based",
                (f"{data}, identical",),
            )
            for data in ("dirichlet 0.1", "one class each")
        ),
        data=MNIST,
    ),
    Experiment(
        "fedfix-mnist-short",
        "fedfix",
        "Logistic regression on MNIST, 10 clients, F80, one local step, 1,000 s",
        "loss",
        _weights,
        differs="200,000 s in the paper, with step sizes from 0.0001: here a two hundredth of the time.",
        fits=True,
        data=MNIST,
    ),
    Experiment(
        "fedfix-mnist-steps",
        "fedfix",
        "Logistic regression on MNIST, 10 clients, F80, 1, 5 and 20 local steps, 10,000 s",
        "loss",
        data=MNIST,
    ),
    Experiment(
        "fedfix-cifar10-20",
        "fedfix",
        "CNN on CIFAR-10, 20 clients, F80, 10 local steps of 64, 5,000 s",
        "loss",
        _FEDFIX,
    ),
    Experiment(
        "fedfix-cifar10-50",
        "fedfix",
        "CNN on CIFAR-10, 50 clients, F80, 10 local steps of 64, 5,000 s",
        "loss",
        _FEDFIX,
    ),
    *(
        Experiment(
            f"fedfix-cifar10-{clients}-f0",
            "fedfix",
            f"CNN on CIFAR-10, {clients} clients, F0: all take as long, 10 local steps of 64, 5,000 s",
            "loss",
        )
        for clients in (20, 50)
    ),
    Experiment(
        "fedfix-shakespeare",
        "fedfix",
        "LSTM on Shakespeare, 20 clients, F80, 10 local steps of 64, 5,000 s",
        "loss",
        _FEDFIX,
        differs="Tiny Shakespeare, cut per role as LEAF does, in place of all of Shakespeare.",
        data=SHAKESPEARE,
    ),
    Experiment(
        "fedfix-shakespeare-short",
        "fedfix",
        "LSTM on Shakespeare, 5 clients, F80, 10 local steps of 16, 10 s",
        "loss",
        _FEDFIX,
        differs="5 of 20 clients, batches of 16 in place of 64, and a five hundredth of the time.",
        data=SHAKESPEARE,
    ),
    *(
        Experiment(
            f"fedfix-shakespeare-{clients}{suffix}",
            "fedfix",
            f"LSTM on Shakespeare, {clients} clients, {times}, 10 local steps of 64, 5,000 s",
            "loss",
            claims,
            differs="Tiny Shakespeare, cut per role as LEAF does, in place of all of Shakespeare.",
            data=SHAKESPEARE,
        )
        for clients, suffix, times, claims in (
            (50, "", "F80", _FEDFIX),
            (20, "-f0", "F0: all take as long", ()),
            (50, "-f0", "F0: all take as long", ()),
        )
    ),
    Experiment(
        "defedavg-iid",
        "defedavg",
        "Table 1: CIFAR-10, iid, 100 clients, 10 per round, K = 50, to 60 %",
        "time",
        (Claim("DeFedAvg-IID is sooner at 60 % than FedAvg", "DeFedAvg-IID", ("FedAvg",)),),
        target=0.6,
    ),
    Experiment(
        "defedavg-iid-short",
        "defedavg",
        "CIFAR-10, iid, 10 clients, 2 per round, K = 20, to 25 %",
        "time",
        (Claim("DeFedAvg-IID is sooner at 25 % than FedAvg", "DeFedAvg-IID", ("FedAvg",)),),
        target=0.25,
        differs="2 of 10 clients per round in place of 10 of 100, 20 local steps in place of 50, to 25 "
        "in place of 60 %; an update takes as long as in the paper.",
    ),
    Experiment(
        "defedavg-niid-short",
        "defedavg",
        "Two classes per client, with 10 clients, 10 per round, K = 20, to 25 %",
        "time",
        _defedavg("25 %"),
        target=0.25,
        differs="10 of 10 clients per round in place of 10 of 100, 20 local steps in place of 50, to 25 "
        "in place of 60 %; an update takes as long as in the paper.",
    ),
    Experiment(
        "defedavg-niid",
        "defedavg",
        "Table 1: CIFAR-10, two classes per client, 100 clients, 10 per round, K = 50, to 60 %",
        "time",
        _defedavg("60 %", {"FedBuff": "331.6 / 394.2 s", "FedAvg": "331.6 / 934.1 s"}),
        target=0.6,
    ),
    Experiment(
        "fedfa-resnet18",
        "fedfa",
        "Tables 2 and 6: ResNet-18 on CIFAR-10, 10 of 100 at work, long-tailed delays, to 60 %",
        "time",
        _FEDFA,
        target=0.6,
        differs="Window, delays and target are not known here: 5 updates, Pareto of 3 s, 60 %.",
    ),
    Experiment(
        "fedfa-lenet",
        "fedfa",
        "LeNet-5 on CIFAR-10, 10 of 100 at work, long-tailed delays, to 50 %",
        "time",
        _FEDFA,
        target=0.5,
        differs="LeNet-5 stands for ResNet-18, and the target is 50 %.",
    ),
    Experiment(
        "fedfa-window",
        "fedfa",
        "FedFa's window and the clients at work, with LeNet-5, to 50 %",
        "time",
        target=0.5,
        differs="The paper varies both; the values are ours, as is LeNet-5.",
    ),
    *_fleet(
        "area",
        "accuracy",
        (
            Claim(
                "AREA is more accurate than the best of the others",
                "AREA",
                ("FedBuff", "AS-FedAvg", "S-FedAvg"),
            ),
        ),
        "8 of 128 clients, of three speeds; the images from 0 to 1.",
    ),
    *_fleet(
        "fedfix",
        "loss",
        _fedfix("2 s"),
        "Another model and dataset than in the paper's figures, 8 clients of three speeds.",
    ),
    *_fleet(
        "defedavg",
        "time",
        _defedavg("the target"),
        "Another model and dataset, 3 of 8 clients per round in place of 10 of 100; two classes each.",
        0.75,
    ),
    *_fleet(
        "fedfa",
        "time",
        (
            Claim("FedFa is sooner at the target than synchronous FedAvg", "FedFa-Param", ("FedAvg",)),
            Claim(
                "FedFa is sooner at the target than FedBuff and Port", "FedFa-Param", ("FedBuff", "Port")
            ),
        ),
        "Another model and dataset, 8 clients that all work; dirichlet 0.5.",
        0.9,
    ),
)
