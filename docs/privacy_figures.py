"""Draws the pictures of docs/privacy.md from the runs of its sweeps.

    testbed sweep topologies/privacy/secure.yaml --data FOLDER
    testbed sweep topologies/privacy/noise.yaml --data FOLDER
    python docs/privacy_figures.py PLAIN SECURE RUN...

PLAIN and SECURE are runs of the first sweep, the others those of the second, with noise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from analysis import metrics, privacy
from analysis.charts.chart import PALETTE
from analysis.charts.progress import uploaded_bytes
from analysis.load import Run, load

PICTURES = Path(__file__).parent / "pictures"
_COLORS = [PALETTE[name] for name in ("blue", "orange", "green", "red")]


def secure(plain: Run, masked: Run) -> Figure:
    """Accuracy against device time and against what was sent; CPU time; staleness."""
    figure = Figure((10.0, 5.6), layout="constrained")
    (by_time, by_bytes), (cpu, stale) = figure.subplots(2, 2)
    for name, run, color in zip(("plain", "secure"), (plain, masked), _COLORS, strict=False):
        accuracy = 100 * run.evaluations["accuracy"]
        by_time.plot(run.evaluations["at"], accuracy, color=color, label=name)
        by_bytes.plot(_sent(run) / 1e6, accuracy, color=color)
        used = run.telemetry.groupby("device", observed=True)["cpu"].agg(np.ptp)
        place = np.arange(len(used)) + (0.2 if name == "secure" else -0.2)
        cpu.bar(place, used / metrics.contributions(run)["updates"][used.index] * 1e3, 0.4, color=color)
        cpu.set_xticks(np.arange(len(used)), used.index)
        shares = run.updates["staleness"].value_counts(normalize=True).sort_index()
        stale.plot(shares.index, 100 * shares, "o-", markersize=3, color=color)
    by_time.set(xlabel="device time (s)", ylabel="test accuracy (%)", ylim=(50, 95))
    by_bytes.set(xlabel="sent by the devices (MB)", ylabel="test accuracy (%)", ylim=(50, 95))
    cpu.set(ylabel="CPU time per applied update (ms)")
    stale.set(xlabel="staleness (versions)", ylabel="updates (%)")
    by_time.legend()
    return figure


def _sent(run: Run) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Bytes that all devices have sent until each evaluation, of the devices' own counters where they
    have some, else the payloads of updates."""
    samples = run.telemetry.dropna(subset=["sent"])
    if samples.empty:
        return np.asarray(uploaded_bytes(run), np.float64)
    total = np.zeros(len(run.evaluations))
    for _, own in samples.groupby("device", observed=True):
        total += np.interp(run.evaluations["at"], own["at"], own["sent"] - own["sent"].iloc[0])
    return total


def noise(runs: list[Run]) -> Figure:
    """Accuracy against the highest ε of a client."""
    figure = Figure((6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for run, color in zip(runs, _COLORS, strict=False):
        settings = privacy.settings(run) or {"noise": 0.0}
        axes.plot(
            privacy.highest(run), 100 * run.evaluations["accuracy"], "o-",
            markersize=3, color=color, label=f"z = {settings['noise']:g}",
        )  # fmt: skip
    axes.set(xscale="log", xlabel="highest ε of a client (δ = 1e-5)", ylabel="test accuracy (%)")
    axes.legend()
    return figure


def main() -> None:
    plain, masked, *noisy = map(load, sys.argv[1:])
    secure(plain, masked).savefig(PICTURES / "privacy-secure.png", dpi=110)
    noise(noisy).savefig(PICTURES / "privacy-noise.png", dpi=110)


if __name__ == "__main__":
    main()
