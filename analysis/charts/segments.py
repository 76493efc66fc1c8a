"""Use of a run's segments over time."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.charts.action_marks import with_actions
from analysis.charts.chart import Axis, Chart, Layer, arrays, color
from analysis.load import Run
from analysis.names import distinct

_MAX_SEGMENTS = 8


def over_time(runs: Sequence[Run]) -> Chart:
    """Rates in each direction of the segments that carried the most; empty if the runs have none."""
    layers: list[Layer] = []
    series = 0
    for name, run in distinct(runs).items():
        use = run.network
        total = (
            use.groupby(["segment", "way"], observed=True)["bytes"].sum().sort_values(ascending=False)
        )
        for segment, way in list(total.index)[:_MAX_SEGMENTS]:
            own = use[(use["segment"] == segment) & (use["way"] == way)]
            label = f"{segment} {way}" if len(runs) == 1 else f"{name} · {segment} {way}"
            for is_background in (False, True):
                part = own[own["device"] == ""] if is_background else own
                sums = part.groupby(["at", "seconds"])["bytes"].sum().reset_index()
                if sums.empty:
                    continue
                columns = arrays(
                    x=(sums["at"] - sums["seconds"] / 2).to_numpy(),
                    y=(8e-3 * sums["bytes"] / sums["seconds"]).to_numpy(),
                )
                layers.append(
                    Layer(
                        f"{label} background" if is_background else label,
                        "line",
                        columns,
                        color(series),
                        label=label,
                        legend=not is_background,
                        dashed=is_background,
                        hover={"segment": "$name", "kbit/s": "y", "device time (s)": "x"},
                    )
                )
            series += 1
    time, rate = Axis("device time", "s", limits=(0.0, None)), Axis("rate", "kbit/s", limits=(0.0, None))
    chart = Chart("Use of segments", time, rate, tuple(layers))
    return with_actions(chart.with_note("solid: all traffic, dashed: background"), runs)
