"""CPU, memory and link rates of the devices over time, from their telemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.charts.action_marks import with_actions
from analysis.charts.chart import Axis, Chart, Layer, arrays, band_of, color
from analysis.load import Run
from analysis.names import distinct

_MAX_LINES = 8
"""Devices up to which each has a line; of more, each group has its mean, with a band."""
_MAX_POINTS, _MIN_STEP_SECONDS = 150, 2.0
"""Of a line: shorter steps jump."""
_MAX_GAP = 3.0
"""Periods of sampling without a sample, after which a device counts as away."""

_Values = npt.NDArray[np.float64]
_Figure = Callable[[pd.DataFrame, _Values], _Values]
"""Of a device's samples, a value for each step of a grid of times."""


def cpu(runs: Sequence[Run]) -> Chart:
    share = Axis("share of a core", "%", limits=(0.0, None))
    return with_actions(_chart(runs, "CPU used", share, {"": _rate("cpu", 100.0)}), runs)


def memory(runs: Sequence[Run]) -> Chart:
    return _chart(runs, "Memory used", Axis("memory", "MiB", limits=(0.0, None)), {"": _memory})


def rates(runs: Sequence[Run]) -> Chart:
    """On all of a device's networks."""
    figures = {"up": _rate("sent", 8e-3), "down": _rate("received", 8e-3)}
    chart = _chart(runs, "Sent and received", Axis("rate", "kbit/s", limits=(0.0, None)), figures)
    return with_actions(chart.with_note("solid: up, dashed: down"), runs)


def _chart(runs: Sequence[Run], title: str, y: Axis, figures: dict[str, _Figure]) -> Chart:
    layers: list[Layer] = []
    series = 0
    several = len(runs) > 1
    by_group = any(len(run.devices) > _MAX_LINES for run in runs)
    for name, run in distinct(runs).items():
        grid = _grid(run)
        values = {
            figure: {device: of(samples, grid) for device, samples in _by_device(run)}
            for figure, of in figures.items()
        }
        for label, devices in _series(run, by_group=by_group):
            whole = f"{name} · {label}" if several else label
            for dashed, (figure, of_figure) in enumerate(values.items()):
                known = [of_figure[device] for device in devices if device in of_figure]
                hue, own = color(series), " ".join(filter(None, (whole, figure)))
                layers += _lines(own, whole, grid, known, y, hue, dashed=bool(dashed))
            series += 1
    note = "each group: mean of its devices, band: lowest to highest" if by_group else ""
    time = Axis("device time", "s", limits=(0.0, None))
    return Chart(title, time, y, tuple(layers), note=note)


def _lines(
    name: str, label: str, grid: _Values, known: list[_Values], y: Axis, hue: str, *, dashed: bool
) -> Iterator[Layer]:
    """The line of a device, or mean and band of a group; without a value none."""
    table = np.array(known).reshape(len(known), max(0, len(grid) - 1))
    there = ~np.isnan(table)
    if not there.any():
        return
    count = there.sum(axis=0)
    x, shown = (grid[:-1] + grid[1:]) / 2, count > 0
    low = np.where(there, table, np.inf).min(axis=0)
    high = np.where(there, table, -np.inf).max(axis=0)
    with np.errstate(invalid="ignore"):
        mean = np.where(there, table, 0.0).sum(axis=0) / count  # NaN: a gap in the line
    if len(known) > 1 and not dashed:
        band = arrays(x=x[shown], low=low[shown], high=high[shown])
        yield Layer(band_of(name), "band", band, hue, legend=False)
    hover = {"devices": "$name", y.title: "y", "device time (s)": "x"}
    columns = arrays(x=x, y=mean)
    yield Layer(name, "line", columns, hue, label=label, legend=not dashed, dashed=dashed, hover=hover)


def _series(run: Run, *, by_group: bool) -> Iterator[tuple[str, list[str]]]:
    """What has a line, and the devices that it stands for."""
    names = run.devices["device"].astype(str)
    if not by_group:
        yield from ((name, [name]) for name in names)
        return
    for group, own in names.groupby(run.devices["group"], observed=True, sort=False):
        yield f"{group} ×{len(own)}" if len(own) > 1 else str(group), [*own]


def _by_device(run: Run) -> Iterator[tuple[str, pd.DataFrame]]:
    samples = run.telemetry[run.telemetry["at"].notna()]
    for device, own in samples.groupby("device", observed=True):
        yield str(device), own


def _grid(run: Run) -> _Values:
    """The ends of the steps, from the first sample in the run to the last."""
    at = run.telemetry["at"]
    at = at[at >= 0]
    if len(at) < 2:
        return np.zeros(0)
    first, last = float(at.min()), float(at.max())
    step = max(_MIN_STEP_SECONDS, (last - first) / _MAX_POINTS)
    return np.asarray(first + step * np.arange(int((last - first) / step) + 1), np.float64)


def _rate(column: str, scale: float) -> _Figure:
    """By how much a counter grew per second. It begins anew with its device."""

    def rate(samples: pd.DataFrame, grid: _Values) -> _Values:
        counter, at = _known(samples, column)
        if len(at) < 2 or len(grid) < 2:
            return np.full(max(0, len(grid) - 1), np.nan)
        grown = np.diff(counter)
        grown = np.where(grown < 0, counter[1:], grown)
        total = np.interp(grid, at, np.append(0.0, np.cumsum(grown)))
        rates = scale * np.diff(total) / np.diff(grid)
        return np.where(_present(at, grid), rates, np.nan)

    return rate


def _memory(samples: pd.DataFrame, grid: _Values) -> _Values:
    used, at = _known(samples, "memory")
    if len(at) < 2 or len(grid) < 2:
        return np.full(max(0, len(grid) - 1), np.nan)
    middle = (grid[:-1] + grid[1:]) / 2
    return np.where(_present(at, grid), np.interp(middle, at, used) / 2**20, np.nan)


def _known(samples: pd.DataFrame, column: str) -> tuple[_Values, _Values]:
    """Values and times."""
    known = samples[samples[column].notna()]
    return known[column].to_numpy(np.float64), known["at"].to_numpy(np.float64)


def _present(at: _Values, grid: _Values) -> npt.NDArray[np.bool_]:
    """In the middle of which steps the device was there: between samples that are not far apart."""
    middle = (grid[:-1] + grid[1:]) / 2
    periods = np.diff(at)
    long = np.concatenate([[True], periods > _MAX_GAP * np.median(periods), [True]])
    edge = np.abs(middle - np.clip(middle, at[0], at[-1])) <= (grid[1:] - grid[:-1]) / 2
    inside = np.clip(np.searchsorted(at, middle), 1, len(at) - 1)
    return np.asarray(edge & ~long[inside])
