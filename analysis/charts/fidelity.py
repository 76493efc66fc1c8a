"""Measured CPU shares and link rates against requested ones. On the diagonal, both are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.charts.chart import Axis, Chart, Layer, arrays, color
from analysis.load import Run
from analysis.names import distinct


def cpu(runs: Sequence[Run]) -> Chart:
    return _chart(runs, "CPU: measured against requested", "share of a core", "%", 100.0, {"cpu": ""})


def rates(runs: Sequence[Run]) -> Chart:
    """Link rates, as measured before the run started."""
    figures = {"up": "uplink", "down": "downlink"}
    title = "Link rates: measured against requested"
    chart = _chart(runs, title, "rate", "Mbit/s", 1e-6, figures)
    return chart.with_note("measured before the start")


def _chart(
    runs: Sequence[Run], title: str, label: str, unit: str, scale: float, figures: Mapping[str, str]
) -> Chart:
    layers, unknown = [Layer("as requested", "diagonal", {}, color="grey", dashed=True)], 0
    for name, run in distinct(runs).items():
        for figure, label_part in figures.items():
            requested = run.fidelity[(run.fidelity["figure"] == figure) & run.fidelity["asked"].notna()]
            if requested.empty:
                continue
            known = requested[requested["got"].notna()]
            unknown += len(requested) - len(known)
            series = " · ".join(part for part in (name if len(runs) > 1 else "", label_part) if part)
            layers.append(_points(series or "devices", known, scale, color(len(layers) - 1)))
    limits = _limits(layers)  # the same for both axes, so that equal values are on the diagonal
    return Chart(
        title,
        Axis(f"requested {label}", unit, log=True, limits=limits),
        Axis(f"measured {label}", unit, log=True, limits=limits),
        tuple(layers),
        note=f"{unknown} not shown: never busy, or never measured" if unknown else "",
    )


def _limits(layers: Sequence[Layer]) -> tuple[float, float]:
    found = [layer.columns[axis] for layer in layers[1:] for axis in "xy"]
    values = np.concatenate(found) if found else np.array([])
    values = values[values > 0]
    return (float(values.min() / 1.5), float(values.max() * 1.5)) if len(values) else (0.1, 10.0)


def _points(name: str, known: pd.DataFrame, scale: float, colour: str) -> Layer:
    columns = arrays(
        x=known["asked"] * scale,
        y=known["got"] * scale,
        device=known["device"].astype(str),
        group=known["group"].astype(str),
        error=known["error"],
    )
    hover = {
        "device": "device",
        "group": "group",
        "requested": "x",
        "measured": "y",
        "error (%)": "error",
    }
    return Layer(name, "points", columns, color=colour, hover=hover)
