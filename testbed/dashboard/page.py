"""One visitor's document: headers and figures, brought up to date as long as they look."""

from __future__ import annotations

from html import escape
from math import isnan
from pathlib import Path

import jinja2
from bokeh.document import Document
from bokeh.events import ConnectionLost
from bokeh.models import CustomJS
from bokeh.models.widgets import Div

from agents import events
from analysis import summary
from analysis.charts import screen
from analysis.charts.chart import INKS, Theme
from analysis.load import Run
from testbed.dashboard.board import BY_DEVICE, Board
from testbed.dashboard.feed import Feed
from testbed.fidelity.validity import Validity
from testbed.traits import is_simulated

_REFRESH_INTERVAL_MS = 150
"""Milliseconds between two looks at whether the board has something new."""

_FOLDER = Path(__file__).parent
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True)


def fill(document: Document, board: Board, theme: Theme | None) -> None:
    """Make `document` show `board`. Without `theme` it asks the browser for one, and is loaded again."""
    names = " ".join(feed.path.name for feed in board.feeds)
    document.title = f"{names} · testbed"
    document.template_variables.update(theme=theme, names=names, ink=theme and INKS[theme])
    board.refresh()
    if theme is None or not board.runs:
        document.template = TEMPLATES.get_template("wait.html")
        return
    document.template = TEMPLATES.get_template("page.html")
    document.template_variables["columns"] = range(len(board.feeds))
    view = _View(document, board, theme)
    document.add_periodic_callback(view.refresh, _REFRESH_INTERVAL_MS)
    lost = "document.getElementById('lost').hidden = false"
    document.js_on_event(ConnectionLost, CustomJS(code=lost))


class _View:
    def __init__(self, document: Document, board: Board, theme: Theme) -> None:
        self._board = board
        self._shown = board.generation
        self._headers: list[Div] = []
        for column, feed in enumerate(board.feeds):
            div = Div(text=header(feed), disable_math=True, sizing_mode="stretch_width")
            div.update(name=f"header-{column}", styles={"color": INKS[theme].text})
            document.add_root(div)
            self._headers.append(div)
        self._drawn = {panel.name: screen.draw(panel.chart, theme) for panel in board.panels}
        for name, drawn in self._drawn.items():
            drawn.figure.name = name
            document.add_root(drawn.figure)
        self._join_times()
        document.template_variables["panels"] = board.panels

    def refresh(self) -> None:
        self._board.refresh()
        if self._shown == self._board.generation:
            return
        self._shown = self._board.generation
        for div, feed in zip(self._headers, self._board.feeds, strict=True):
            div.text = header(feed)
        for panel in self._board.panels:
            self._drawn[panel.name].update(panel.chart)

    def _join_times(self) -> None:
        """Axes of time that are compared are zoomed together."""
        pairs = [("accuracy", name) for name in ("loss", BY_DEVICE) if name in self._drawn]
        for column in range(1, len(self._board.feeds)):
            pairs += [(f"{name}-0", f"{name}-{column}") for name in ("devices", "staleness")]
        for first, other in pairs:
            self._drawn[other].figure.x_range = self._drawn[first].figure.x_range


def header(feed: Feed) -> str:
    """What a run is and where it stands, as HTML."""
    run = feed.run
    if run is None:
        return escape(feed.error)
    line = summary.headline(run)
    facts = {
        "device time": f"{line.duration:,.1f} s",
        "version": f"{line.versions:,}",
        "updates": f"{feed.updates:,}",
        "accuracy": "–" if isnan(line.accuracy) else f"{line.accuracy:.1%}",
        "loss": "–" if isnan(line.loss) else f"{line.loss:.4g}",
        "runtime": _runtime(run),
        "validity": _validity(run, feed),
    }
    items = "".join(f"<span>{name} <b>{escape(value)}</b></span> " for name, value in facts.items())
    problem = f'<p class="problem">{escape(feed.error)}</p>' if feed.error else ""
    kind, state = _state(run, feed)
    return (
        f"<style>{_STYLE}</style><h1>{escape(line.rule)} <small>{escape(run.name)}</small> "
        f'<em class="{kind}">{escape(state)}</em></h1><p>{items}</p>{problem}'
    )


_STYLE = """
h1 { font-size: 18px; margin: 0 0 4px } small { font-weight: normal; opacity: .75 } p { margin: 0 }
em { font-style: normal; font-size: 13px; border: 1px solid; border-radius: 9px; padding: 1px 8px }
em.live { color: #009E73 } em.bad, .problem { color: #D55E00 } span { margin-right: 16px }
b { font-variant-numeric: tabular-nums }
"""


def _state(run: Run, feed: Feed) -> tuple[str, str]:
    """A class, and words."""
    if feed.live and run.ended is None:
        return "live", "live"
    outcome: str | None = run.manifest.get("outcome", run.ended.reason if run.ended else None)
    if outcome is None:
        return "bad", "crashed"
    state = "bad" if outcome == "failed" else "over"
    return state, f"ended: {events.ended_by(outcome)}"


def _runtime(run: Run) -> str:
    runtime, dilation = run.manifest.get("runtime"), run.manifest.get("dilation", 1.0)
    return str(runtime) if is_simulated(runtime) else f"{runtime}, dilation {dilation:g}"


def _validity(run: Run, feed: Feed) -> str:
    judged = run.manifest.get("validity")
    if judged is None and is_simulated(run.manifest.get("runtime")):
        return "simulated"
    if judged is None:
        return "judged at the end" if feed.live else "unknown"
    validity = Validity.from_dict(judged)
    return ": ".join(filter(None, [validity.verdict, "; ".join(validity.reasons or validity.unjudged)]))
