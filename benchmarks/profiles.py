"""Speeds of device profiles in training, fitted to published training times.

    python -m benchmarks.profiles          the fits, with errors of held-out networks
    python -m benchmarks.profiles count    work of a step of each network; needs timm
    python -m benchmarks.profiles host     steps on this host, compared with predictions; needs timm

The table is in docs/evidence/profiles.md.

training_times.csv has, for each network, Gflop and GB of one step with 16 images of 224×224, as
testbed.plan.model_check counts them in timm's networks (1.0.31), and the seconds of such a step if they
are published: github.com/jafermarq/federated-embedded-vision, 20 steps in PyTorch on all cores, SGD
without momentum, images read from files. Raspberry Pi 5: its README.md and plot.ipynb. Raspberry Pi 4:
plot.ipynb; for MnasNet and GhostNetV2 the results behind it (results/blog/rpi4_bench_results.pkl).

The model: a time is the sum of work ÷ speed over the kinds of work. The fit keeps speeds positive and
minimises the sum of squared relative errors. A network's error is that of the fit to all other networks;
the stricter one also leaves out its whole family (all ResNets, ...).
"""

from __future__ import annotations

import csv
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import nnls

from testbed import speed
from testbed.plan import model_check
from testbed.speed import KINDS, Work
from testbed.topology import profiles

TIMES = Path(__file__).with_name("training_times.csv")
DEVICES = ("raspberry-pi-4", "raspberry-pi-5")
_BATCH = 16
_MUCH = 0.1
"""Minimum share of a network's operations: the speed of a kind that is rarer in all networks is not
fitted."""


@dataclass(frozen=True)
class Fit:
    """Fit of one device."""

    speeds: Mapping[str, float]
    """Kind of work -> speed; only kinds that can be fitted."""
    errors: Mapping[str, float]
    """Network -> prediction by the fit to all other networks, over the measurement, minus 1."""
    family_errors: Mapping[str, float]
    """Network -> the same by the fit to all other families, if these have its kinds of work."""

    @property
    def error(self) -> float:
        """Mean absolute error."""
        return statistics.fmean(map(abs, self.errors.values()))

    @property
    def family_error(self) -> float:
        return statistics.fmean(map(abs, self.family_errors.values()))

    def entry(self) -> dict[str, float]:
        """Values of `training` in the catalogue."""
        return {
            **{kind: _rounded(speed) for kind, speed in self.speeds.items()},
            "error": _rounded(self.error, 2),
        }


def fit(device: str) -> Fit:
    rows = [(row["network"], _work(row), float(row[device])) for row in _rows() if row[device]]
    errors, family_errors = {}, {}
    for name, each, seconds in rows:
        others = _speeds([(w, s) for other, w, s in rows if other != name])
        errors[name] = _seconds(each, others) / seconds - 1
        strangers = _speeds([(w, s) for other, w, s in rows if _family(other) != _family(name)])
        if all(_part(each, kind) <= _MUCH for kind in KINDS if kind not in strangers):
            family_errors[name] = _seconds(each, strangers) / seconds - 1
    return Fit(_speeds([(each, seconds) for _, each, seconds in rows]), errors, family_errors)


def table(fits: Mapping[str, Fit]) -> str:
    """Format as a table in Markdown."""
    lines = ["| network | " + " | ".join(f"{device}, s | held out" for device in fits) + " |"]
    lines.append("|---" * (1 + 2 * len(fits)) + "|")
    for row in _rows():
        cells = [
            f"{float(row[device]):.2f} | {found.errors[row['network']]:+.0%}" if row[device] else " | "
            for device, found in fits.items()
        ]
        lines.append(f"| {row['network']} | " + " | ".join(cells) + " |")
    for what, errors in (
        ("mean absolute error", [found.error for found in fits.values()]),
        ("the same, families held out", [found.family_error for found in fits.values()]),
    ):
        lines.append(f"| {what} | " + " | ".join(f" | {error:.0%}" for error in errors) + " |")
    return "\n".join(lines)


def ratios() -> str:
    """Describe how many times as long a step takes on the first device as on the second."""
    first, second = DEVICES
    fits = {device: fit(device) for device in DEVICES}
    both = [row for row in _rows() if row[first] and row[second]]
    measured = [float(row[first]) / float(row[second]) for row in both]
    told = [
        ratio * (1 + fits[first].errors[row["network"]]) / (1 + fits[second].errors[row["network"]])
        for row, ratio in zip(both, measured, strict=True)
    ]
    known = profiles.load()
    hpl = (known.device(second).gflops or 0) / (known.device(first).gflops or 1)
    off = statistics.fmean(abs(a / b - 1) for a, b in zip(told, measured, strict=True))
    worst = max(abs(a / b - 1) for a, b in zip(told, measured, strict=True))
    return (
        f"{first} takes {min(measured):.2f} to {max(measured):.2f} times as long as {second} "
        f"({len(both)} networks); of networks held out the fits say {min(told):.2f} to {max(told):.2f} "
        f"(off by {off:.0%} in the mean, {worst:.0%} at most), HPL says {hpl:.2f}."
    )


def _rows() -> list[dict[str, str]]:
    with TIMES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _family(network: str) -> str:
    """Return the family of a network: `resnet` of `resnet18`."""
    return re.split(r"[^a-z]", network)[0]


def _work(row: Mapping[str, str]) -> Work:
    return Work(**{kind: float(row[kind]) for kind in KINDS})


def _part(each: Work, kind: str) -> float:
    """Share of a kind in the operations; 1 for memory."""
    flop = each.convolution + each.depthwise + each.matrix
    return 1.0 if kind == "memory" else float(getattr(each, kind)) / flop


def _speeds(points: list[tuple[Work, float]]) -> dict[str, float]:
    kinds = [kind for kind in KINDS if any(_part(each, kind) > _MUCH for each, _ in points)]
    relative = np.array([[getattr(each, kind) / seconds for kind in kinds] for each, seconds in points])
    found, _ = nnls(relative, np.ones(len(points)))
    return {kind: 1 / inverse for kind, inverse in zip(kinds, found, strict=True) if inverse > 0}


def _seconds(each: Work, speeds: Mapping[str, float]) -> float:
    return math.fsum(getattr(each, kind) / speed for kind, speed in speeds.items())


def _rounded(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")


def _count() -> None:
    for row in _rows():
        found = model_check.count_work(_step(row["network"], "meta"))
        print(row["network"], *(f"{getattr(found, kind):.4g}" for kind in KINDS), sep=",")


def _host() -> None:
    torch.set_num_threads(1)
    found = speed.calibrate()
    for row in _rows():
        if row["network"] not in _ON_HOST:
            continue
        run = _step(row["network"], "cpu")
        run()  # initializes the libraries
        begin = time.thread_time()
        run()
        took = time.thread_time() - begin
        told = sum(speed.work_seconds(_work(row), found.training).values())
        print(f"{row['network']}: took {took:.2f} s, predicted {told:.2f} s ({told / took - 1:+.0%})")


def _step(network: str, device: str) -> Callable[[], None]:
    from timm import create_model  # type: ignore[import-not-found]

    net = create_model(_TIMM.get(network, network), num_classes=1000).to(device)
    x = torch.zeros(_BATCH, 3, 224, 224, device=device)
    y = torch.zeros(_BATCH, dtype=torch.int64, device=device)
    return partial(model_check.gradient_step, net, x, y, torch.nn.functional.cross_entropy)


_TIMM = {f"vit_{size}": f"vit_{size}_patch16_224" for size in ("tiny", "small", "base")}
_ON_HOST = ("resnet18", "mobilenetv2_100", "vit_tiny", "mnasnet_100", "ghostnetv2_100")
"""One of each family."""


def main() -> None:
    if command := {"count": _count, "host": _host}.get("".join(sys.argv[1:])):
        command()
        return
    fits = {device: fit(device) for device in DEVICES}
    print(table(fits), "", ratios(), "", sep="\n")
    for device, found in fits.items():
        shown = ", ".join(f"{key}: {value:g}" for key, value in found.entry().items())
        print(f"{device}:\n    training: {{{shown}}}")


if __name__ == "__main__":
    main()
