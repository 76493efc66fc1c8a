"""Draws the pictures of docs/guide/rules.md: the same four devices under each rule, in virtual time.

    python docs/figures.py        # writes docs/pictures/rule-*.png, in about a minute

Each device has a quadratic of its own, so the optimum is known, and the slowest device's is far from
the others'. A rule that listens more to fast devices therefore ends away from the optimum.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.charts.chart import PALETTE
from analysis.load import Run
from testbed import simulate

PICTURES = Path(__file__).parent / "pictures"
SHOWN = 12.0
"""Seconds of device time in the left half of a picture."""
CENTERS = {"fast": 0.0, "quick": 1.0, "medium": 3.0, "slow": 8.0}
OPTIMUM = float(np.mean(list(CENTERS.values())))
TOPOLOGY = """
name: rule
seed: 1
task: {name: quadratic, centers: [[0], [1], [3], [8]], local: {steps: 5, lr: 0.1}}
rule: {name: fedavg}
devices:
  - {name: fast, timing: 1s}
  - {name: quick, timing: 1.3s}
  - {name: medium, timing: 2.1s}
  - {name: slow, timing: 4.7s}
evaluate: {every: 250ms}
stop: {after: 60s}
runtime: {name: virtual}
"""
RULES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedasync": {"mixing": 0.3},
    "async_fedavg": {"server_lr": 0.25},
    "asysg": {"gradients": 3, "server_lr": 0.4},
    "fedbuff": {"buffer_size": 3},
    "fedfa": {"window_size": 3},
    "port": {"min_updates": 3, "staleness_bound": 2},
    "as_fedavg": {"every": 3},
    "defedavg_iid": {"buffer_size": 3},
    "fedfix": {"period": "2s"},
    "defedavg_niid": {"sample": 2, "server_lr": 0.3},
    "favano": {"period": "2s", "sample": 2},
    "area": {"criterion": "every", "every": 3},
}


def main() -> None:
    """Draw them all."""
    PICTURES.mkdir(exist_ok=True)
    for name, parameters in RULES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = simulate(TOPOLOGY, runs=folder, rule={"name": name, **parameters})
            drawn(run).savefig(PICTURES / f"rule-{name.replace('_', '-')}.png", dpi=110)


def drawn(run: Run) -> Figure:
    """Left: what each device did, and when the model changed. Right: how far it was from the optimum."""
    figure = Figure(figsize=(7.2, 1.9), layout="constrained")
    lanes, distance = figure.subplots(1, 2, width_ratios=[2.6, 1])
    draw_lanes(lanes, run)
    draw_distance(distance, run)
    return figure


def draw_lanes(axes: Axes, run: Run) -> None:
    devices = list(CENTERS)
    for at in run.versions["at"][run.versions["updates"] > 0]:
        axes.axvline(at, color=PALETTE["grey"], linewidth=0.7, zorder=0)
    columns = ["client", "train_start", "train_end", "arrived", "applied", "staleness"]
    for client, start, end, arrived, applied, staleness in run.updates[columns].to_numpy():
        lane = devices.index(client)
        axes.broken_barh(
            [(start, end - start)], (lane - 0.3, 0.6), color=PALETTE["blue"], edgecolor="white"
        )
        if (middle := (start + end) / 2) < SHOWN:
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "fontsize": 7}
            axes.text(middle, lane, f"{staleness}", **style)
        below = lane + 0.4
        axes.plot([arrived, applied], [below] * 2, color=PALETTE["orange"], linewidth=1.6)
        axes.plot(applied, below, "o", color=PALETTE["orange"], markersize=3.5)
    axes.set(xlim=(0, SHOWN), ylim=(len(devices) - 0.4, -0.5), xlabel="device time (s)")
    axes.set_yticks(range(len(devices)), devices)
    _plain(axes)


def draw_distance(axes: Axes, run: Run) -> None:
    """|w − w*|, of the loss: f(w) = ½ (w − w*)² + what remains at the optimum."""
    least = float(np.mean([(center - OPTIMUM) ** 2 / 2 for center in CENTERS.values()]))
    away = np.sqrt(2 * np.clip(run.evaluations["loss"] - least, 0, None))
    axes.plot(run.evaluations["at"], away, color=PALETTE["blue"], linewidth=1.2)
    axes.set(xlabel="device time (s)", ylim=(0, OPTIMUM * 1.05), xlim=(0, 60))
    axes.set_title("distance from the optimum", fontsize=8, loc="left")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=7)
    axes.xaxis.label.set_fontsize(8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
