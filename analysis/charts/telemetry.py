"""CPU, memory, network rates and other figures of the devices over time, from their telemetry."""

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
"""Above this number of devices, each group has a mean and a band."""
_MAX_POINTS, _MIN_STEP_SECONDS = 150, 2.0
"""Points per line, and minimum between two of them: lines with shorter steps look jagged."""
_MAX_GAP = 3.0
"""Sampling periods without a sample after which a device counts as absent."""

_Values = npt.NDArray[np.float64]
_Figure = Callable[[pd.DataFrame, _Values, float], _Values]
"""Function that computes a figure from the samples of a device and a grid of n + 1 times in seconds. The
function returns n values, one per step of the grid."""


def cpu(runs: Sequence[Run]) -> Chart:
    share = Axis("share of a core", "%", limits=(0.0, None))
    return with_actions(_chart(runs, "CPU used", share, {"": _rate("cpu", 100.0)}), runs)


def memory(runs: Sequence[Run]) -> Chart:
    return _chart(
        runs, "Memory used", Axis("memory", "MiB", limits=(0.0, None)), {"": _level("memory", 2**-20)}
    )


def rates(runs: Sequence[Run]) -> Chart:
    """Rates over all networks of a device."""
    figures = {"up": _rate("sent", 8e-3), "down": _rate("received", 8e-3)}
    chart = _chart(runs, "Sent and received", Axis("rate", "kbit/s", limits=(0.0, None)), figures)
    return with_actions(chart.with_note("solid: up, dashed: down"), runs)


def growth_of(
    runs: Sequence[Run], title: str, y: tuple[str, str], table: str, column: str, what: str
) -> Chart:
    """Growth per second of the counter `column`. `table`: attribute of `Run`. `y`: label and unit.
    `what`: the lines in a sentence."""
    axis = Axis(*y, limits=(0.0, None))
    return with_actions(_chart(runs, title, axis, {"": _rate(column, 1.0)}, table, what), runs)


def share_of(runs: Sequence[Run], title: str, y: str, table: str, column: str, what: str) -> Chart:
    """The share `column`, in percent. The parameters are those of `growth_of`."""
    axis = Axis(y, "%", limits=(0.0, 100.0))
    return with_actions(_chart(runs, title, axis, {"": _level(column, 100.0)}, table, what), runs)


def _chart(
    runs: Sequence[Run],
    title: str,
    y: Axis,
    figures: dict[str, _Figure],
    table: str = "telemetry",
    what: str = "CPU, memory and rates",
) -> Chart:
    layers: list[Layer] = []
    series = 0
    several = len(runs) > 1
    by_group = any(len(run.devices) > _MAX_LINES for run in runs)
    for name, run in distinct(runs).items():
        samples: pd.DataFrame = getattr(run, table)
        grid = _grid(samples["at"])
        # In virtual time a device without samples is not away: nothing has changed.
        max_gap = _MAX_GAP if table == "telemetry" or "monotonic_zero" in run.manifest else np.inf
        values = {
            figure: {device: compute(own, grid, max_gap) for device, own in _by_device(samples)}
            for figure, compute in figures.items()
        }
        for label, devices in _series(run, by_group=by_group):
            title_of_line = f"{name} · {label}" if several else label
            for dashed, (figure, by_device) in enumerate(values.items()):
                known = [by_device[device] for device in devices if device in by_device]
                hue, own = color(series), " ".join(filter(None, (title_of_line, figure)))
                layers += _lines(own, title_of_line, grid, known, y, hue, dashed=bool(dashed))
            series += 1
    remarks = (f"{what}: lines are means of groups, bands lowest to highest",) * by_group
    time = Axis("device time", "s", limits=(0.0, None))
    return Chart(title, time, y, tuple(layers), remarks=remarks)


def _lines(
    name: str, label: str, grid: _Values, known: list[_Values], y: Axis, hue: str, *, dashed: bool
) -> Iterator[Layer]:
    """Line of a device, or mean and band of a group; nothing if all values are NaN."""
    table = np.array(known).reshape(len(known), max(0, len(grid) - 1))
    has_value = ~np.isnan(table)
    if not has_value.any():
        return
    count = has_value.sum(axis=0)
    x, shown = (grid[:-1] + grid[1:]) / 2, count > 0
    low = np.where(has_value, table, np.inf).min(axis=0)
    high = np.where(has_value, table, -np.inf).max(axis=0)
    with np.errstate(invalid="ignore"):
        mean = np.where(has_value, table, 0.0).sum(axis=0) / count  # NaN: a gap in the line
    if len(known) > 1 and not dashed:
        band = arrays(x=x[shown], low=low[shown], high=high[shown])
        yield Layer(band_of(name), "band", band, hue, legend=False)
    hover = {"devices": "$name", y.title: "y", "device time (s)": "x"}
    columns = arrays(x=x, y=mean)
    yield Layer(name, "line", columns, hue, label=label, legend=not dashed, dashed=dashed, hover=hover)


def _series(run: Run, *, by_group: bool) -> Iterator[tuple[str, list[str]]]:
    """Label and devices of each line."""
    names = run.devices["device"].astype(str)
    if not by_group:
        yield from ((name, [name]) for name in names)
        return
    for group, own in names.groupby(run.devices["group"], observed=True, sort=False):
        yield f"{group} ×{len(own)}" if len(own) > 1 else str(group), [*own]


def _by_device(samples: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    samples = samples[samples["at"].notna()]
    for device, own in samples.groupby("device", observed=True):
        yield str(device), own


def _grid(at: pd.Series[float]) -> _Values:
    """Edges of the steps in seconds, from the first sample to the last. `at`: times of the samples."""
    at = at[at >= 0]
    if len(at) < 2:
        return np.zeros(0)
    first, last = float(at.min()), float(at.max())
    step = max(_MIN_STEP_SECONDS, (last - first) / _MAX_POINTS)
    return np.asarray(first + step * np.arange(int((last - first) / step) + 1), np.float64)


def _rate(column: str, scale: float) -> _Figure:
    """Growth of a counter per second, times `scale`. It restarts from 0 when the device restarts."""

    def rate(samples: pd.DataFrame, grid: _Values, max_gap: float) -> _Values:
        counter, at = _known(samples, column)
        if len(at) < 2 or len(grid) < 2:
            return np.full(max(0, len(grid) - 1), np.nan)
        grown = np.diff(counter)
        grown = np.where(grown < 0, counter[1:], grown)
        total = np.interp(grid, at, np.append(0.0, np.cumsum(grown)))
        rates = scale * np.diff(total) / np.diff(grid)
        return np.where(_present(at, grid, max_gap), rates, np.nan)

    return rate


def _level(column: str, scale: float) -> _Figure:
    """Interpolated `column`, times `scale`."""

    def level(samples: pd.DataFrame, grid: _Values, max_gap: float) -> _Values:
        values, at = _known(samples, column)
        if len(at) < 2 or len(grid) < 2:
            return np.full(max(0, len(grid) - 1), np.nan)
        middle = (grid[:-1] + grid[1:]) / 2
        return np.where(_present(at, grid, max_gap), scale * np.interp(middle, at, values), np.nan)

    return level


def _known(samples: pd.DataFrame, column: str) -> tuple[_Values, _Values]:
    """Values that are not NaN, and their times in seconds."""
    known = samples[samples[column].notna()]
    return known[column].to_numpy(np.float64), known["at"].to_numpy(np.float64)


def _present(at: _Values, grid: _Values, max_gap: float) -> npt.NDArray[np.bool_]:
    """Return one value per step: whether the device was present in the middle of the step. A device
    counts as present if the samples before and after the middle are at most `max_gap` sampling periods
    apart."""
    middle = (grid[:-1] + grid[1:]) / 2
    periods = np.diff(at)
    usual = np.median(periods[periods > 0]) if (periods > 0).any() else np.inf
    long = np.concatenate([[True], periods > max_gap * usual, [True]])
    edge = np.abs(middle - np.clip(middle, at[0], at[-1])) <= (grid[1:] - grid[:-1]) / 2
    inside = np.clip(np.searchsorted(at, middle), 1, len(at) - 1)
    return np.asarray(edge & ~long[inside])
