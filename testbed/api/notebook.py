"""A run as HTML, with a live display in notebooks.

Each update replaces the whole output. HTML with pictures is used because it looks the same in
JupyterLab, VS Code and Colab, is saved in the notebook's file, and needs no extension. A thread of low
priority draws the run.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.dashboard.feed import Feed
from testbed.errors import BadInputError

if TYPE_CHECKING:
    from analysis.load import Run as Result
    from testbed.api.handle import RunHandle

_MAX_SHARE = 0.2
"""Share of a core that drawing a live run may use."""
_NICE = 10
_MAX_DEVICES = 20
"""Devices in the table. If there are more, the table shows groups."""


def is_notebook() -> bool:
    shell = _shell()
    return shell is not None and getattr(shell, "kernel", None) is not None


def html(path: Path, charts: Sequence[str] = ()) -> str:
    """Headline, table of devices, and `charts`."""
    feed = Feed(path)
    feed.refresh()
    return _page(feed, charts)


def show(run: RunHandle, charts: Sequence[str], every: float) -> None:
    """A thread updates the cell's output at most once per `every` seconds until the run ends.

    Raises BadInputError for an unknown chart.
    """
    from IPython.display import display

    from analysis.charts import CHARTS

    if unknown := [name for name in charts if name not in CHARTS]:
        raise BadInputError(f"unknown chart {unknown[0]!r}, expected one or more of {', '.join(CHARTS)}")
    feed = Feed(run.path)
    feed.refresh()
    page = _html(_page(feed, charts))
    shown: Any = display(page, display_id=True)  # type: ignore[no-untyped-call]
    threading.Thread(
        target=_keep_up_to_date,
        args=(run, feed, charts, every, lambda page: shown.update(_html(page))),
        name=f"display of {run.id}",
        daemon=True,
    ).start()


def _keep_up_to_date(
    run: RunHandle, feed: Feed, charts: Sequence[str], every: float, update: Any
) -> None:
    with suppress(OSError, AttributeError):  # on Linux each thread has its own niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    generation, live = -1, True
    while live:
        live = run.live  # before reading, so that the final state is shown
        feed.refresh()
        begin = time.thread_time()
        if feed.generation != generation:
            generation = feed.generation
            update(_page(feed, charts))
        pause = max(every, (time.thread_time() - begin) / _MAX_SHARE)
        until = time.monotonic() + pause
        while live and run.live and time.monotonic() < until:
            time.sleep(0.1)


def _page(feed: Feed, charts: Sequence[str]) -> str:
    name = escape(feed.path.name)
    if feed.error:
        return f"<p><b>{name}</b>: {escape(feed.error)}</p>"
    if feed.run is None:
        return f"<p><b>{name}</b> is being prepared</p>"
    return "\n".join(
        [_headline(feed.run, live=feed.live), _devices(feed.run), *_chart_images(feed, feed.run, charts)]
    )


def _headline(run: Result, *, live: bool) -> str:
    from agents import events
    from analysis import summary

    line = summary.headline(run)
    ended = "not ended" if line.ended is None else events.end_reason(line.ended)
    state = "running" if live else f"{ended}, {summary.verdict(run)}"
    return (
        f"<p><b>{escape(run.name)}</b> ({escape(line.rule)}), {line.duration:.1f} s, {escape(state)}<br>"
        f"{escape(line.quality)}; {escape(line.applied)}</p>"
    )


def _devices(run: Result) -> str:
    from analysis import summary

    table = summary.devices(run)
    if len(table) > _MAX_DEVICES:
        table = summary.groups(table)
    shares = [name for name in summary.SHARES if (table[name] > 0).any()]
    columns = [name for name in ("count", "updates", "staleness", "share") if name in table]
    percent = "{:.0%}".format
    return str(
        table[[*columns, *shares]].to_html(
            border=0,
            na_rep="–",
            formatters={
                "staleness": "{:.1f}".format, "share": percent, **dict.fromkeys(shares, percent)
            },
        )
    )  # fmt: skip


def _chart_images(feed: Feed, run: Result, charts: Sequence[str]) -> list[str]:
    from analysis.charts import paper
    from testbed.dashboard.board import chart

    pictures = []
    for name in charts:
        drawn = paper.draw(chart(name, feed, run))
        with io.BytesIO() as file:
            drawn.savefig(file, format="png", dpi=96)
            data = base64.b64encode(file.getvalue()).decode("ascii")
        pictures.append(f'<img alt="{escape(name)}" src="data:image/png;base64,{data}">')
    return pictures


def _html(page: str) -> Any:
    from IPython.display import HTML

    return HTML(page)  # type: ignore[no-untyped-call]


def _shell() -> Any:
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
