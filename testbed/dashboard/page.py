"""The document of one visitor: headers, figures and tables, updated while the page is open."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from math import isnan, nan
from typing import Any, NamedTuple

from bokeh.document import Document
from bokeh.events import ConnectionLost, DocumentReady
from bokeh.models import CustomJS
from bokeh.models.css import InlineStyleSheet
from bokeh.models.widgets import Div, Select, TextInput, Toggle

from agents import events as records
from analysis import comparison, features, metrics, summary
from analysis.charts import screen
from analysis.charts.action_marks import ActionMarks
from analysis.charts.chart import INKS, Ink, Theme
from analysis.load import Run
from testbed.dashboard import board, first_page
from testbed.dashboard.board import MAX_COLUMNS, Board, DeviceTable, Panel
from testbed.dashboard.feed import Feed
from testbed.dashboard.first_page import TEMPLATES
from testbed.fidelity.validity import Validity, recorded_reasons
from testbed.topology import StopSettings
from testbed.traits import is_simulated

_RATE_SECONDS = 10.0


def header(feed: Feed, name: str = "") -> str:
    """`name`: short name of the run; empty if the page shows only one run."""
    run = feed.run
    if run is None:
        return escape(feed.error)
    line, stop = summary.headline(run), _stop(run)
    running = feed.live and run.ended is None
    facts = {
        "device time": _time(line.duration, stop, running=running),
        "updates": _updates(run, feed.updates, stop, running=running),
        "version": f"{line.versions:,}",
        "accuracy": _accuracy(line.accuracy, stop),
        "loss": "–" if isnan(line.loss) else f"{line.loss:.4g}",
        **features.facts(run),
        "task": str(run.manifest.get("task", "?")),
        "runtime": _runtime(run),
        "validity": _validity(run, feed),
    }
    items = "".join(f"<span>{name} <b>{escape(value)}</b></span> " for name, value in facts.items())
    problems = filter(None, (run.manifest.get("error"), feed.error))
    problem = "".join(f'<p class="problem">{escape(each)}</p>' for each in problems)
    kind, state = _state(run, feed)
    return (
        f"<style>{_STYLE}</style><h1>{escape(name or line.rule)} <small>{escape(run.name)}</small> "
        f'<em class="{kind}">{escape(state)}</em></h1>'
        f"{_progress(run, feed.updates, stop) if running else ''}<p>{items}</p>{problem}"
    )


_STYLE = """
.bk-clearfix { display: block !important; width: 100% }
h1 { font-size: 18px; margin: 0 0 4px; overflow-wrap: anywhere } p { margin: 0 }
small { font-weight: normal; opacity: .75 }
em { font-style: normal; font-size: 13px; border: 1px solid; border-radius: 9px; padding: 1px 8px;
  display: inline-block }
em.live { color: light-dark(#00714f, #2cc295) } em.bad, .problem { color: light-dark(#b24400, #ff9a5a) }
.problem { white-space: pre-wrap; overflow-wrap: anywhere }
span { margin-right: 16px; display: inline-block } b { font-variant-numeric: tabular-nums }
progress { width: 100%; height: 6px; display: block; margin: 4px 0; accent-color: #009E73 }
"""


class _Stop(NamedTuple):
    """Stop conditions, as in `config.StopConditions`."""

    after: float | None = None
    updates: int | None = None
    target_accuracy: float | None = None


def _stop(run: Run) -> _Stop:
    """All are None if the topology has another version and cannot be read."""
    with suppress(ValueError, TypeError):
        stop = StopSettings.model_validate(run.topology.get("stop")).build()
        return _Stop(stop.after, stop.updates, stop.target_accuracy)
    return _Stop()


def _time(seconds: float, stop: _Stop, *, running: bool) -> str:
    if not running or stop.after is None:
        return f"{seconds:,.1f} s"
    return f"{seconds:,.0f} s of {stop.after:,g} s"


def _updates(run: Run, count: int, stop: _Stop, *, running: bool) -> str:
    limit = f" of {stop.updates:,}" if running and stop.updates is not None else ""
    return f"{count:,}{limit} ({_rate(run, count, running=running):,.1f}/s)"


def _rate(run: Run, count: int, *, running: bool) -> float:
    """Over the last seconds if `running`, else over the whole run."""
    if not running:
        return count / run.duration if run.duration else 0.0
    window = min(_RATE_SECONDS, run.duration)
    recent = int((run.updates["applied"] > run.duration - window).sum())
    return recent / window if window else 0.0


def _accuracy(accuracy: float, stop: _Stop) -> str:
    if isnan(accuracy):
        return "–"
    target = "" if stop.target_accuracy is None else f" (target {stop.target_accuracy:.4g})"
    return f"{accuracy:.1%}{target}"


def _progress(run: Run, updates: int, stop: _Stop) -> str:
    """Return HTML; empty if the progress is unknown."""
    shares = [
        run.duration / stop.after if stop.after else nan,
        updates / stop.updates if stop.updates else nan,
    ]
    known = [share for share in shares if not isnan(share)]
    if not known:
        return ""
    share = min(1.0, max(known))
    return f'<progress value="{share:.4f}" aria-label="progress of the run">{share:.0%}</progress>'


def _state(run: Run, feed: Feed) -> tuple[str, str]:
    if feed.live and run.ended is None:
        return "live", "running"
    outcome: str = run.manifest.get("outcome") or (run.ended.reason if run.ended else "crashed")
    if outcome in ("failed", "crashed"):
        return "bad", outcome
    return "over", f"ended: {records.end_reason(outcome)}"


def _runtime(run: Run) -> str:
    runtime, dilation = run.manifest.get("runtime"), run.manifest.get("dilation", 1.0)
    slow = "" if is_simulated(runtime) or dilation == 1 else f", dilation {dilation:g}"
    return f"{runtime}{slow}"


def _validity(run: Run, feed: Feed) -> str:
    judged = run.manifest.get("validity")
    if judged is None and is_simulated(run.manifest.get("runtime")):
        return "simulated"
    if judged is None and feed.live:
        notes = run.notes[["at", "message"]].itertuples(index=False)
        reasons = recorded_reasons([records.Note(at, message) for at, message in notes])
        return f"not valid so far: {'; '.join(reasons)}" if reasons else "judged at the end"
    if judged is None:
        return "unknown"
    validity = Validity.from_dict(judged)
    return ": ".join(filter(None, [validity.verdict, "; ".join(validity.reasons or validity.unjudged)]))


_REFRESH_INTERVAL_MS = 150
_MAX_WAIT_SECONDS = 10.0
"""The browser's answer may be lost, and a page in a hidden tab is not drawn."""
_DRAWN = "if (sent.active) requestAnimationFrame(() => setTimeout(() => { sent.active = false; }))"
_RETRY_MS = 1000
_FEW_DEVICES = 8
"""Above this number, the page has controls to find and sort devices."""
_COLUMN_WRAP = {1: 80, 2: 80, 3: 52}

_UNKNOWN = metrics.cost([], [])


def fill(document: Document, board: Board, theme: Theme | None) -> None:
    """If `theme` is None, the page asks the browser for its theme and reloads."""
    if theme is None:
        wait(document, board, theme)
        return
    board.refresh()
    if not board.runs:
        wait(document, board, theme, _RETRY_MS)
        return
    document.title = first_page.title([feed.path for feed in board.feeds])
    names = " ".join(feed.path.name for feed in board.feeds)
    document.template_variables.update(theme=theme, names=names, ink=INKS[theme])
    document.template = TEMPLATES.get_template("page.html")
    with document.models.freeze():  # otherwise Bokeh collects all models again after each addition
        view = _PageView(document, board, theme)
    document.add_periodic_callback(view.refresh, _REFRESH_INTERVAL_MS)
    lost = "document.getElementById('lost').hidden = false"
    document.js_on_event(ConnectionLost, CustomJS(code=lost))


def wait(document: Document, board: Board, theme: Theme | None, retry_ms: int = 0) -> None:
    """Show the first page, or the reason why a run cannot be read."""
    document.title = first_page.title([feed.path for feed in board.feeds])
    document.template = TEMPLATES.get_template("wait.html")
    known = first_page.variables([feed.path for feed in board.feeds], theme, retry_ms)
    known["unreadable"] = {
        feed.path.name: feed.error for feed in board.feeds if feed.error and feed.run is None
    }
    document.template_variables.update(known)


class _PageView:
    def __init__(self, document: Document, board: Board, theme: Theme) -> None:
        self._document = document
        self._board = board
        self._shown = board.generation
        self._ink = INKS[theme]
        self._headers = [self._div(f"header-{column}") for column in board.columns]
        self._tables = [self._div(f"table-{column}") for column in board.columns]
        self._events = [self._div(f"events-{column}") for column in board.columns]
        if len(board.feeds) > 1:
            self._events.append(self._div("events"))
        self._compared = self._div("compared")
        self._sent, self._sent_at = Toggle(name="sent", active=True), time.monotonic()
        """Active until the browser has drawn the state that was sent last. Without it, a browser that
        draws slowly would fall behind more and more."""
        self._compared.tags = [self._sent]  # thereby it is part of the document
        drawn = CustomJS(args={"sent": self._sent}, code=_DRAWN)
        self._sent.js_on_change("active", drawn)
        document.js_on_event(DocumentReady, drawn)
        self._many = any(len(table.devices) > _FEW_DEVICES for table in board.tables)
        self._controls()
        wrap = _COLUMN_WRAP[max(1, len(board.columns))]
        self._drawn = {panel.name: screen.draw(panel.chart, theme, wrap) for panel in board.panels}
        for panel in board.panels:
            figure = self._drawn[panel.name].figure
            is_wide = len(board.columns) == 1 and panel.name.startswith("devices")
            figure.update(name=panel.name, css_classes=["wide"] * is_wide)
            document.add_root(figure)
        self._join_times()
        self._write()
        document.template_variables.update(
            columns=len(board.columns),
            headers=[div.text for div in self._headers],
            runs=[feed.path.name for feed in board.feeds],
            many=self._many,
            common=[panel.name for panel in board.panels if panel.column is None],
            apart=_rows(board.panels),
            logs=[not is_simulated(run.manifest.get("runtime")) for run in board.runs],
        )

    def refresh(self, *, at_once: bool = False) -> None:
        """Unless `at_once`, wait until the browser has drawn the last state, at most
        `_MAX_WAIT_SECONDS`."""
        self._board.refresh()
        now = time.monotonic()
        if self._sent.active and now < self._sent_at + _MAX_WAIT_SECONDS and not at_once:
            return
        if self._shown != self._board.generation:
            self._shown = self._board.generation
            self._write()
            self._sent.active = False  # so that the next line is a change in any case
            self._sent_at, self._sent.active = now, True

    @property
    def _names(self) -> tuple[str, ...]:
        """A single empty name if there is only one run."""
        return self._board.names if len(self._board.feeds) > 1 else ("",)

    def _write(self) -> None:
        board = self._board
        for column in board.columns:
            self._headers[column].text = header(board.feeds[column], self._names[column])
        for div, events, remarks in zip(self._events, board.marks, board.remarks, strict=True):
            div.update(text=_events(events, remarks), visible=bool(events.marks or remarks))
        self._write_tables()
        compared = _compared(board) if len(board.feeds) > 1 else ""
        self._compared.update(text=compared, visible=bool(compared))
        for panel in board.panels:
            drawn = self._drawn[panel.name]
            drawn.update(panel.chart)
            drawn.figure.visible = panel.shown

    def _write_tables(self) -> None:
        sort, matching, names = self._sort.value, self._filter.value, self._names
        for column, table in enumerate(self._board.tables):
            feed = self._board.feeds[column]
            self._tables[column].text = _table(table, feed, names[column], sort, matching)

    def _controls(self) -> None:
        style = InlineStyleSheet(css=_widget_style(self._ink))
        have = {name for run in self._board.runs for name in features.parts_of_run(run.manifest)}
        sorts: list[str | tuple[Any, str]] = [*board.sorts(have)]
        large = any(len(table.devices) > board.MAX_ROWS for table in self._board.tables)
        first = "fewest updates" if large else "as planned"
        self._sort = Select(title="Sort devices", value=first, options=sorts)
        self._filter = TextInput(title="Find devices", placeholder="name, group or state")
        for name, widget in (("sort", self._sort), ("filter", self._filter)):
            widget.update(name=name, width=200, stylesheets=[style])
            widget.on_change("value", lambda attr, old, new: self._write_tables())
            if self._many:
                self._document.add_root(widget)

    def _div(self, name: str) -> Div:
        div = Div(disable_math=True, sizing_mode="stretch_width")
        div.update(name=name, styles={"color": self._ink.text})
        self._document.add_root(div)
        return div

    def _join_times(self) -> None:
        """Zooming in one of the charts that are compared then zooms the others, too."""
        pairs: list[tuple[str, str]] = [
            ("accuracy", name) for name in ("loss", "loss-by-device") if name in self._drawn
        ]
        for column in self._board.columns[1:]:
            pairs += [(f"{name}-0", f"{name}-{column}") for name in ("devices", "staleness")]
        for first, other in pairs:
            self._drawn[other].share_x_range(self._drawn[first])


def _rows(panels: tuple[Panel, ...]) -> list[list[str]]:
    """Names of the charts of one run: a row per kind, a name per run."""
    kinds: dict[str, list[str]] = {}
    for panel in panels:
        if panel.column is not None:
            kinds.setdefault(panel.name.rpartition("-")[0], []).append(panel.name)
    return list(kinds.values())


def _events(marks: ActionMarks, remarks: Sequence[str]) -> str:
    return TEMPLATES.get_template("events.html").render(key=marks.key, remarks=remarks)


def _table(table: DeviceTable, feed: Feed, name: str, sort: str, matching: str) -> str:
    """Return HTML. `name`: name of the run; empty if there is only one run."""
    every = table.devices
    selected = board.select_rows(every, sort, matching)
    many = len(every) > board.MAX_ROWS
    shown = selected.head(board.SOME_ROWS) if many else selected
    tables: list[tuple[str, Any]] = []
    if many:
        tables.append(
            (
                f"Groups of {len(every):,} devices",
                board.device_cells(board.group_rows(every), grouped=True),
            )
        )
    which = f"{len(shown):,} of {len(selected):,}, {sort}" if len(shown) < len(selected) else ""
    title = " · ".join(filter(None, (table.caption, name)))
    tables.append((": ".join(filter(None, (title, which))), board.device_cells(shown)))
    run = feed.run
    if run is not None and (real := board.real_cells(run.manifest))[1]:
        tables.append(("Real devices: measured", real))
    logged = run is not None and not is_simulated(run.manifest.get("runtime"))
    notes = [f"updates: only the newest {feed.held:,}"] * (feed.held < feed.updates)
    if feed.held_samples < feed.samples and not table.live:
        since = 0.0 if run is None else run.telemetry["at"].min()
        notes.append(f"CPU, rates and memory: from {since:,.0f} s on")
    return TEMPLATES.get_template("devices.html").render(
        tables=tables,
        run=feed.path.name if logged else "",
        planned={*every.index},
        note="; ".join(notes),
    )


def _compared(board: Board) -> str:
    """Return HTML: for each task, what a target accuracy costs. Updates and bytes are left out if not
    all of a run are in memory."""
    tasks, remarks = [], comparison.remarks(board.runs)
    if partial := any(feed.held < feed.updates for feed in board.feeds):
        remarks.append("There are too many updates to count them here: use testbed compare.")
    for task, runs in board.tasks.items():
        target = comparison.common_target(runs)
        compared = comparison.compare(runs, target)
        if partial:
            compared = [replace(row, updates=_UNKNOWN, bytes=_UNKNOWN) for row in compared]
        headings, rows = comparison.texts(compared)
        target_text = None if target is None else comparison.percent(target)
        tasks.append((task, target_text, headings, rows))
    names = list(board.names) if len(board.feeds) > MAX_COLUMNS else []
    return TEMPLATES.get_template("compared.html").render(
        tasks=tasks,
        apart=[*zip(names, [feed.path.name for feed in board.feeds], strict=False)],
        most=MAX_COLUMNS,
        remarks=remarks,
    )


def _widget_style(ink: Ink) -> str:
    return (
        f"label {{ color: {escape(ink.text)} }} "
        f".bk-input {{ background-color: {ink.paper}; color: {ink.text}; border-color: {ink.grid} }}"
    )
