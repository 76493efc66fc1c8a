"""Selection of the clients that train next, in the analysis of runs: how evenly devices took part."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from agents import events
from agents.texts import quantity
from analysis import part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from analysis.charts.chart import Chart
    from analysis.load import Run


def participation(run: Run) -> pd.DataFrame:
    """Return a table with one row per device, from the draws of the topology's `selection`. Columns:

    - `group`
    - `eligible`: number of draws in which the device was eligible
    - `chosen`: number of draws that chose the device
    - `eligible_share`: `eligible` ÷ number of draws with an eligible device
    - `chosen_share`: `chosen` ÷ `eligible`; NaN if the device was never eligible

    The table is empty if the run recorded no draws.
    """
    import pandas as pd

    table = run.draws[run.draws["eligible"] > 0]
    eligible, chosen, since = Counter[str](), Counter[str](), dict[str, int]()
    for number, (added, removed) in enumerate(
        zip(run.draws["added"], run.draws["removed"], strict=True)
    ):
        since |= dict.fromkeys(added.split(), number)
        for client in removed.split():
            eligible[client] += number - since.pop(client, number)
    for client, first in since.items():
        eligible[client] += len(run.draws) - first
    for names in run.draws["chosen"]:
        chosen.update(set(names.split()))
    devices = [str(name) for name in run.devices["device"]] if len(table) else []
    rows = np.array([[eligible[name], chosen[name]] for name in devices], np.int64).reshape(-1, 2)
    with np.errstate(invalid="ignore"):
        return pd.DataFrame(
            {
                "group": run.devices["group"].astype(object).to_numpy()[: len(devices)],
                "eligible": rows[:, 0],
                "chosen": rows[:, 1],
                "eligible_share": rows[:, 0] / np.float64(len(table)),
                "chosen_share": rows[:, 1] / rows[:, 0].astype(np.float64),
            },
            index=pd.Index(devices, name="device", dtype=object),
        )


def _chart(runs: Sequence[Run]) -> Chart:
    """A point per device: share of draws in which it was eligible, and share of these that chose it. The
    line is a uniform selection.

    For a single run, each group has a colour; for several, each set of runs that differ only in their
    seed. Runs without draws are left out.
    """
    import pandas as pd

    from analysis.charts.chart import Axis, Chart, Layer, arrays, color
    from analysis.names import by_settings

    layers: list[Layer] = []
    notes: list[str] = []
    for label, same in by_settings(runs).items():
        table = pd.concat([participation(run) for run in same])
        if not len(table):
            continue
        series = table["group"].fillna("no group").astype(str)
        series = series if len(runs) == 1 else pd.Series(label, table.index)
        for name, own in table.groupby(series, sort=False):
            columns = arrays(
                x=100 * own["eligible_share"],
                y=100 * own["chosen_share"],
                device=own.index.astype(str),
                eligible=own["eligible"],
                chosen=own["chosen"],
            )
            hover = {"device": "device", "eligible": "eligible", "chosen": "chosen"}
            layers.append(Layer(str(name), "points", columns, color(len(layers)), hover=hover))
        drawn = sum(len(run.draws) for run in same)
        uniform = table["chosen"].sum() / max(1, table["eligible"].sum())
        notes.append(f"{quantity(drawn, 'draw')}, {uniform:.1%} of the eligible chosen ({label})")
        if len(runs) == 1:
            level = 100 * np.array([uniform, uniform])
            line = arrays(x=np.array([0.0, 100.0]), y=level)
            layers.append(Layer("uniform", "line", line, color="grey", reference=True))
    return Chart(
        "Participation against eligibility",
        Axis("draws in which the device was eligible", "%", limits=(0.0, None)),
        Axis("of these, draws that chose it", "%", limits=(0.0, None)),
        tuple(layers),
        note="; ".join(notes),
    )


class SelectionTables:
    __slots__ = ()
    draws: pd.DataFrame
    """`events.ClientsDrawn`. Empty if the topology has no `selection`."""


PART = part.AnalysisPart(
    records=[
        part.RecordTable(
            events.ClientsDrawn,
            "draws",
            {
                "at": part.AT,
                "draw": part.count(
                    "Number of the draw; a draw with no eligible client repeats the number before"
                ),
                "wanted": part.count("Number of clients that the rule wanted"),
                "eligible": part.count("Number of eligible clients"),
                "chosen": part.TableColumn("Names of the chosen clients, separated by spaces"),
                "added": part.TableColumn("Names of clients that became eligible since the row before"),
                "removed": part.TableColumn(
                    "Names of clients that ceased to be eligible since the row before"
                ),
            },
        )
    ],
    charts={
        "participation": part.FeatureChart(
            _chart, lambda run: bool(run.topology.get("selection")), in_report=True
        )
    },
)
