"""Losses of the global model on the data of each device: how unequally the model fits them."""

from __future__ import annotations

from collections.abc import Sequence

from agents.texts import quantity
from analysis.charts.action_marks import with_actions
from analysis.charts.chart import Axis, Chart, Layer, arrays, color
from analysis.load import Run
from analysis.names import by_settings, distinct


def losses(runs: Sequence[Run]) -> Chart:
    """Return a chart of the losses of each run. A line shows the unweighted mean over the run's devices,
    and dashed lines show the lowest and the highest loss (Fraboni et al. 2023, FedFix, Figure 2).

    The chart has only runs that evaluate by device (`evaluate: {devices: 200}`). Runs that differ only
    in their seed have the same colour.
    """
    names = {id(run): name for name, run in distinct(runs).items()}
    layers, notes = [], []
    for index, (label, same) in enumerate(by_settings(runs).items()):
        for run in same:
            parts = run.parts[run.parts["part"] == "device"]
            known = parts.dropna(subset=["loss"])
            if lost := parts["version"].nunique() - known["version"].nunique():
                notes.append(f"{names[id(run)]}: {quantity(lost, 'evaluation')} without a finite loss")
            if known.empty:
                continue
            grouped = known.groupby("version")
            at, loss = grouped["at"].first(), grouped["loss"]
            ends = {"lowest": loss.idxmin(), "highest": loss.idxmax()}
            columns = arrays(x=at, y=loss.mean(), deviation=loss.std(ddof=0), version=at.index)
            hover = {"run": "$name", "mean loss": "y", "standard deviation": "deviation",
                     "version": "version", "device time (s)": "x"}  # fmt: skip
            own = names[id(run)]
            shown = len(runs) > 1 and run is same[0]
            layers.append(
                Layer(own, "line", columns, color(index), label=label, legend=shown, hover=hover)
            )
            for end, places in ends.items():
                name, chosen = f"{own}, {end}", run.parts.loc[places]
                columns = arrays(x=at, y=chosen["loss"], device=chosen["name"].astype(str))
                hover = {"device": "device", f"{end} loss": "y", "device time (s)": "x"}
                line = Layer(name, "line", columns, color(index), legend=False, dashed=True, hover=hover)
                layers.append(line)
            if len(runs) == 1:
                last = loss.std(ddof=0).iloc[-1]
                notes.append(f"standard deviation over the devices at the end: {last:.3g}")
    chart = Chart(
        "Loss of the global model by device: mean, lowest and highest",
        Axis("device time", "s", limits=(0.0, None)),
        Axis("loss on the device's data", limits=(0.0, None)),
        tuple(layers),
        note="; ".join(notes),
    )
    return with_actions(chart, runs)
