"""Report of runs as one self-contained HTML page: charts, tables, topology, manifest, validity,
fidelity.

Text from files is escaped, and never used as markup.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agents import events
from agents.texts import quantity
from analysis import comparison, metrics, summary
from analysis.charts import CHARTS, ONE_TASK, PER_DEVICE, REPORT_CHARTS, screen
from analysis.charts.action_marks import describe
from analysis.charts.chart import INKS, Chart, remarks
from analysis.charts.learning_curves import target_reached
from analysis.features import SUMMARY
from analysis.load import Run
from analysis.names import by_settings, distinct

_MAX_RUNS_WITH_LANES = 8
"""Maximum number of runs in charts of `PER_DEVICE`."""
_ROWS = 60
"""Rows of a table; of more devices, the groups are shown."""
_FIGURES = {"cpu": ("cpu (cores)", 1.0), "up": ("up (Mbit/s)", 1e-6), "down": ("down (Mbit/s)", 1e-6),
            "rtt": ("rtt (ms)", 1e3), "jitter": ("jitter (ms)", 1e3),
            "loss": ("loss (%)", 100.0)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _ReportTable:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    """Columns from the left with words, aligned left."""


def html(runs: Sequence[Run], target: float | None = None) -> str:
    """`target`: accuracy (share) whose cost is compared; None for the highest that all runs of a task
    reached."""
    charts = _charts(runs, target)
    figures = [screen.draw(replace(chart, remarks=())).figure for chart in charts]
    for drawn in figures:  # transparent, so that the page's background shows, light or dark
        drawn.update(background_fill_color=None, border_fill_color=None)
    script, divs = components(figures) if figures else ("", ())
    several = len(runs) > 1
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    ).get_template("report.html")
    return page.render(
        title=f"{len(runs)} runs" if several else runs[0].name,
        subtitle=", ".join(by_settings(runs)) if several else _headline(runs[0]),
        resources=Markup(Resources(mode="inline", components=["bokeh", "bokeh-gl"]).render()),  # noqa: S704
        script=Markup(script),  # noqa: S704  (Bokeh's own, which escapes what it holds)
        chart_remarks=remarks(charts),
        charts=[
            (Markup(div), key)  # noqa: S704
            for div, key in zip(divs, _new_keys(charts), strict=True)
        ],
        comparisons=[*_comparisons(runs, target)] if several else [],
        remarks=comparison.remarks(runs),
        runs=[_run_section(name, run) for name, run in distinct(runs).items()],
        inks={theme: asdict(ink) for theme, ink in INKS.items()},
    )


def _comparisons(runs: Sequence[Run], target: float | None) -> Iterator[tuple[str, _ReportTable]]:
    """Caption and table for each task, of what the runs needed to reach the target."""
    tasks = comparison.by_task(runs)
    for task, own in tasks.items():
        reached = target or comparison.common_target(own)
        rows = comparison.compare(own, reached)
        title = task if len(tasks) > 1 else ""
        table = _ReportTable(title, *comparison.texts(rows))
        yield comparison.caption(rows, given=target is not None), table


def _charts(runs: Sequence[Run], target: float | None) -> list[Chart]:
    """Charts that have something to show. `target`: as in `html`."""
    several = len(comparison.by_task(runs)) > 1
    names = [name for name in REPORT_CHARTS if not (several and name in ONE_TASK)]
    first = [same[0] for same in by_settings(runs).values()][:_MAX_RUNS_WITH_LANES]
    draw: dict[str, Callable[[Sequence[Run]], Chart]] = dict(CHARTS)
    draw["target-reached"] = partial(target_reached, target=target)
    made = (draw[name](first if name in PER_DEVICE else runs) for name in names)
    return [chart for chart in made if not chart.is_bare]


def _new_keys(charts: Sequence[Chart]) -> Iterator[tuple[str, ...]]:
    """Empty if an earlier chart has the same key."""
    seen: set[tuple[str, ...]] = set()
    for chart in charts:
        yield () if chart.key in seen else chart.key
        seen.add(chart.key)


def _run_section(name: str, run: Run) -> dict[str, Any]:
    validity = run.manifest.get("validity") or {}
    return {
        "name": run.name if name == run.name else f"{name}: {run.name}",
        "headline": _headline(run),
        "verdict": summary.verdict(run),
        "reasons": validity.get("reasons", ()),
        "unjudged": validity.get("unjudged", ()),
        "error": run.manifest.get("error"),
        "tables": [
            table
            for table in (
                _devices(run),
                _parts(run, "class"),
                _parts(run, "device"),
                _participation(run),
                _fidelity(run),
                _actions(run),
            )
            if table.rows
        ],
        "topology": yaml.safe_dump(dict(run.topology), sort_keys=False, allow_unicode=True, width=100),
        "manifest": json.dumps(dict(run.manifest), indent=2, ensure_ascii=False),
    }


def _headline(run: Run) -> str:
    line = summary.headline(run)
    task, runtime = run.manifest.get("task", "?"), run.manifest.get("runtime", "?")
    ended = "not ended" if line.ended is None else f"ended: {events.end_reason(line.ended)}"
    fleet = f"{line.rule} on {task}, {quantity(len(run.devices), 'device')} ({runtime})"
    unused = summary.unused_devices(run)
    facts = f"{line.quality}; {line.applied}, {line.duration:.1f} s of device time, {ended}"
    return f"{fleet}: {facts}" + (f". {unused}" if unused else "")


def _devices(run: Run) -> _ReportTable:
    table, left = summary.devices(run), 3
    if len(table) > _ROWS:
        table, left = summary.groups(table), 2
    table = table.drop(columns=["cpu"], errors="ignore")  # the profile implies it
    shares = ("share", *summary.SHARES)
    rows = [
        [
            str(name),
            *(_text(row[column], 100.0 if column in shares else 1.0) for column in table.columns),
        ]
        for name, row in table.iterrows()
    ]
    units = dict.fromkeys(shares, " (%)") | {one.name: f" ({one.unit})" for one in SUMMARY if one.unit}
    named = [f"{column}{units.get(str(column), '')}" for column in table.columns]
    return _ReportTable("Devices", [str(table.index.name), *named], rows, left)


def _participation(run: Run) -> _ReportTable:
    """How evenly the devices contributed, and the staleness of their updates; empty without updates."""
    if run.updates.empty:
        return _ReportTable("", (), ())
    given, bias = metrics.contributions(run), metrics.bias(run)
    figures = {
        "bias χ² (0: each device counts by its importance)": bias.chi_square,
        "importance of devices without any update (%)": 100 * bias.missed,
        "Jain's index of updates": metrics.jain(given["updates"]),
        "effective participants": metrics.effective_participants(given["updates"]),
        "aggregations until every device contributed, at most (W)": metrics.window(run),
        "mean staleness": float(run.updates["staleness"].mean()),
        "highest staleness": int(run.updates["staleness"].max()),
    }
    rows = [[words, _text(value, 1.0)] for words, value in figures.items()]
    return _ReportTable("Participation", ["figure", "value"], rows)


def _parts(run: Run, part: str) -> _ReportTable:
    """Last evaluation by class or device; of many, only the best and the worst."""
    last = summary.last_parts(run, part)
    shown = last if len(last) <= _ROWS else pd.concat([last.head(_ROWS // 2), last.tail(_ROWS // 2)])
    rows = [
        [name, _text(samples, 1.0), _text(loss, 1.0), _text(accuracy, 100.0)]
        for name, samples, loss, accuracy in shown[["name", "samples", "loss", "accuracy"]].itertuples(
            index=False
        )
    ]
    title = f"Last evaluation by {part}, lowest loss first"
    return _ReportTable(title, [part, "samples", "loss", "accuracy (%)"], rows)


def _fidelity(run: Run) -> _ReportTable:
    """One row per requested figure of a device; of many, only the worst of each figure in each group."""
    requested = run.fidelity[run.fidelity["asked"].notna()]
    if len(requested) > 4 * _ROWS:
        worst = requested["error"].abs().fillna(0.0)
        requested = requested.loc[
            worst.groupby([requested["group"], requested["figure"]], observed=True).idxmax()
        ]
    rows = []
    for device, figure, ask, got, error in requested[
        ["device", "figure", "asked", "got", "error"]
    ].itertuples(index=False):
        words, scale = _FIGURES.get(figure, (figure, 1.0))
        rows.append([str(device), words, _text(ask, scale), _text(got, scale), _text(error, 1.0)])
    return _ReportTable(
        "Requested and measured", ["device", "figure", "requested", "measured", "error (%)"], rows, 2
    )


def _actions(run: Run) -> _ReportTable:
    columns = ["device", "details", "source", "at"]
    actions: Iterable[Any] = run.scenario[columns].head(_ROWS).itertuples(index=False)
    rows = [
        [str(device), describe(details), source, _text(at, 1.0)]
        for device, details, source, at in actions
    ]
    more = len(run.scenario) - len(rows)
    title = "Actions on devices" + (f" (and {more:,} more)" if more > 0 else "")
    return _ReportTable(title, ["device", "action", "by", "at (s)"], rows, 3)


def _text(value: Any, scale: float) -> str:
    if isinstance(value, str):
        return value
    if value is None or pd.isna(value):
        return "–"
    return f"{value * scale:,.4g}" if isinstance(value, float) else f"{value:,}"
