"""Draws the pictures of docs/evidence/privacy.md and prints the rows of its table, from two sweeps.

testbed sweep topologies/privacy/secure.yaml --runtime docker --runs build/privacy/docker --data FOLDER
testbed sweep topologies/privacy/secure.yaml --runtime virtual --runs build/privacy/virtual --data FOLDER
python docs/privacy_figures.py secure build/privacy/docker/secure build/privacy/virtual/secure

testbed sweep topologies/privacy/noise.yaml --runs build/privacy --data FOLDER
python docs/privacy_figures.py noise build/privacy/noise
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from agents.secure.arithmetic import code_of
from agents.secure.secure_messages import share_size, sum_size
from analysis import metrics, privacy
from analysis.charts.chart import PALETTE
from analysis.load import Run, load
from testbed import topology
from testbed.plan.costs import bytes_on_link

PICTURES = Path(__file__).parent / "pictures"
_COLORS = [PALETTE[name] for name in ("blue", "orange", "green", "red")]
Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_PARAMETERS = 7_850
"""Of mnist-logreg."""


def secure(runs: list[Run]) -> Figure:
    """Accuracy against device time and against what was sent; CPU time; staleness: of each run without
    and with secure aggregation, in containers and, dashed, in virtual time."""
    figure = Figure((10.0, 5.6), layout="constrained")
    (by_time, by_bytes), (cpu, stale) = figure.subplots(2, 2)
    for run in runs:
        name = "secure" if run.topology.get("privacy") else "plain"
        color, style = _COLORS[name == "secure"], "--" if _virtual(run) else "-"
        accuracy, at = 100 * run.evaluations["accuracy"], run.evaluations["at"].to_numpy()
        by_time.plot(at, accuracy, style, color=color, label=f"{name}, {_runtime(run)}")
        by_bytes.plot(_sent(run, at) / 1e6, accuracy, style, color=color)
        if not _virtual(run):
            used = _cpu(run)
            place = np.arange(len(used)) + (0.2 if name == "secure" else -0.2)
            cpu.bar(place, 1e3 * used, 0.4, color=color)
            cpu.set_xticks(np.arange(len(used)), [*_devices(run)])
        shares = run.updates["staleness"].value_counts(normalize=True).sort_index()
        stale.plot(shares.index, 100 * shares, f"o{style}", markersize=3, color=color)
    by_time.set(xlabel="device time (s)", ylabel="test accuracy (%)", ylim=(50, 95))
    by_bytes.set(xlabel="sent by the devices (MB)", ylabel="test accuracy (%)", ylim=(50, 95))
    cpu.set(ylabel="CPU time per applied update (ms)")
    stale.set(xlabel="staleness (versions)", ylabel="updates (%)")
    by_time.legend()
    return figure


def rows(runs: list[Run]) -> Iterator[str]:
    """Of the table: updates, staleness of fast and slow devices, MB sent, CPU time per applied update of
    both, final accuracy, verdict."""
    for run in runs:
        name = "secure" if run.topology.get("privacy") else "plain"
        speed = run.updates["client"].astype(str).str.split("-").str[0]
        fast, slow = run.updates["staleness"].groupby(speed).mean()
        sent = _sent(run, np.array([run.evaluations["at"].iloc[-1]]))[-1] / 1e6
        used = "" if _virtual(run) else ", ".join(f"{1e3 * part.mean():.0f}" for part in _halves(run))
        validity = (run.manifest.get("validity") or {}).get("valid")
        final = 100 * run.evaluations["accuracy"].iloc[-1]
        yield (
            f"| {_runtime(run)}, {name} | {len(run.updates)} | {fast:.1f}, {slow:.1f} | {sent:.0f} "
            f"| {used} | {final:.1f} % |  (valid: {validity})"
        )


def _halves(run: Run) -> tuple[Numbers, Numbers]:
    """CPU time per applied update of the three fast devices, and of the slow ones."""
    used = _cpu(run)
    return used[:3], used[3:]


def _devices(run: Run) -> list[str]:
    return [str(name) for name in metrics.contributions(run).index]


def _cpu(run: Run) -> Numbers:
    """Seconds of each device for each of its updates that were applied."""
    used = run.telemetry.groupby("device", observed=True)["cpu"].agg(np.ptp)
    updates = metrics.contributions(run)["updates"]
    return np.asarray(used.reindex(_devices(run)).to_numpy() / updates.to_numpy(), np.float64)


def _virtual(run: Run) -> bool:
    return run.telemetry.dropna(subset=["sent"]).empty


def _runtime(run: Run) -> str:
    return "virtual" if _virtual(run) else "docker"


def _sent(run: Run, at: Numbers) -> Numbers:
    """Bytes that all devices have sent until each time: by their own counters, or in virtual time of all
    messages that the protocol has, with their headers."""
    total = np.zeros(len(at))
    if not _virtual(run):
        for _, own in run.telemetry.dropna(subset=["sent"]).groupby("device", observed=True):
            total += np.interp(at, own["at"], own["sent"] - own["sent"].iloc[0])
        return total
    updates = run.updates.sort_values("sent")
    sizes = np.cumsum([bytes_on_link(size) for size in updates["bytes"]])
    total += _until(at, updates["sent"].to_numpy(), sizes)
    settings = topology.load(run.path / "topology.yaml").secure
    if settings is not None:
        length, devices = code_of(settings, _PARAMETERS).length, len(settings.clients)
        shares = bytes_on_link(share_size(length)) * (devices - 1) * np.arange(1, len(updates) + 1)
        total += _until(at, np.sort(updates["train_start"].to_numpy()), shares)
        made = np.unique(updates["applied"].to_numpy())
        answers = bytes_on_link(sum_size(length)) * devices * np.arange(1, len(made) + 1)
        total += _until(at, made, answers)
    return total


def _until(at: Numbers, times: Numbers, total: npt.NDArray[Any]) -> Numbers:
    """What `total`, which is after each of `times`, is at each of `at`."""
    return np.append(0.0, total)[np.searchsorted(times, at, side="right")]


def noise(runs: list[Run]) -> Figure:
    """Accuracy against the highest ε of a client."""
    figure = Figure((6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for run, color in zip(runs, _COLORS, strict=False):
        settings = privacy.settings(run) or {"noise": 0.0}
        axes.plot(
            privacy.highest(run, run.evaluations["at"]), 100 * run.evaluations["accuracy"], "o-",
            markersize=3, color=color, label=f"z = {settings['noise']:g}",
        )  # fmt: skip
    axes.set(xscale="log", xlabel="highest ε of a client (δ = 1e-5)", ylabel="test accuracy (%)")
    axes.legend()
    return figure


def main() -> None:
    what, *folders = sys.argv[1:]
    runs = [load(path.parent) for folder in folders for path in Path(folder).glob("*/events.jsonl")]
    if what == "noise":
        noisy = [run for run in runs if privacy.settings(run)]
        noisy.sort(key=lambda run: float((privacy.settings(run) or {})["noise"]))
        noise(noisy).savefig(PICTURES / "privacy-noise.png", dpi=110)
        return
    newest = {
        (_virtual(run), bool(run.topology.get("privacy"))): run
        for run in sorted(runs, key=lambda run: run.name)  # one that is not valid is repeated
    }
    runs = [run for _, run in sorted(newest.items())]
    sys.stdout.writelines(f"{row}\n" for row in rows(runs))
    secure(runs).savefig(PICTURES / "privacy-secure.png", dpi=110)


if __name__ == "__main__":
    main()
