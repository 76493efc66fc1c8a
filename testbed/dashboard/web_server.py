"""The web server: on the loopback interface, for its own pages, and only to read."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import tornado.web
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.core.validation import silence
from bokeh.core.validation.warnings import MISSING_RENDERERS
from bokeh.document import Document
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from bokeh.settings import settings
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.routing import AnyMatches, Matcher, Rule, RuleRouter

from analysis.charts.chart import Theme
from testbed.dashboard import page
from testbed.dashboard.board import Board
from testbed.dashboard.feed import Feed, is_live
from testbed.errors import BadInputError
from testbed.run import logs
from testbed.rundir.directory import RunDirectory
from testbed.rundir.listing import SORTS, run_row, text_row
from testbed.watching.hosts import OwnHosts

_LOG_LINES = 500
"""Lines of a log that are shown: the last ones."""
_NUMBERS = ("devices", "duration", "accuracy")
_FLUSH_SECONDS = 0.3
"""Seconds for what has been sent to arrive."""


class Site:
    """What may be looked at: `named` runs, or where there are none, all of the folder `runs`."""

    def __init__(self, named: Sequence[RunDirectory], runs: Path) -> None:
        self._named = {directory.run: directory.path for directory in named}
        self.runs = runs
        # As long as somebody looks at them.
        self._feeds = WeakValueDictionary[Path, Feed]()
        self._boards = WeakValueDictionary[tuple[Path, ...], Board]()
        self._rows: dict[Path, tuple[float, dict[str, Any]]] = {}
        """Of runs that are over, with the time of their manifest: a list is asked for every few
        seconds."""

    def rows(self) -> list[dict[str, Any]]:
        """For the list of runs: live ones first, then the newest."""
        paths = self._named.values() or [path.parent for path in self.runs.glob("*/manifest.json")]
        rows = sorted(map(self._row, paths), key=lambda row: row["created"] or "", reverse=True)
        return sorted(rows, key=lambda row: row["outcome"] != "running")

    def _row(self, path: Path) -> dict[str, Any]:
        directory = RunDirectory(path)
        try:
            changed = directory.manifest.stat().st_mtime
        except OSError:
            changed = 0.0
        if self._rows.get(path, (None,))[0] != changed:
            self._rows[path] = changed, run_row(directory)
        found = self._rows[path][1]
        if found["outcome"] in ("running", "unreadable"):
            del self._rows[path]
        return found

    def path(self, run: str) -> Path | None:
        """The directory of `run`, if it may be looked at."""
        if self._named:
            return self._named.get(run)
        paths = {path.parent.name: path.parent for path in self.runs.glob("*/manifest.json")}
        return paths.get(run)

    def board(self, paths: tuple[Path, ...]) -> Board:
        board = self._boards.get(paths)
        if board is None:
            feeds = [self._feeds.get(path) or Feed(path) for path in paths]
            self._feeds.update(zip(paths, feeds, strict=True))
            board = self._boards[paths] = Board(feeds)
        return board

    def refresh(self) -> None:
        """Read what is new for all who look, at once."""
        for board in self._boards.values():
            board.refresh(at_once=True)

    def open(self, document: Document) -> None:
        """Fill a new visitor's document, as its address asks."""
        request = getattr(document.session_context, "request", None)
        query = request.arguments if request is not None else {}
        names = list(dict.fromkeys(name.decode(errors="replace") for name in query.get("run", ())))
        paths = [path for path in map(self.path, names) if path is not None]
        theme = query.get("theme", [b""])[0].decode(errors="replace")
        if not paths or len(paths) < len(names):
            document.template = page.TEMPLATES.get_template("unknown.html")
            return
        known = cast(Theme, theme) if theme in ("light", "dark") else None
        page.fill(document, self.board(tuple(paths)), known)


class _List(tornado.web.RequestHandler):
    def initialize(self, site: Site) -> None:
        self._site = site

    def get(self) -> None:
        rows = [(row, text_row(row)) for row in self._site.rows()]
        template = page.TEMPLATES.get_template("list.html")
        self.write(
            template.render(
                rows=rows,
                folder=self._site.runs,
                headings=("run", *(name for name in SORTS if name != "run")),
                numbers=_NUMBERS,
                plain=("started", "rule", "task", "runtime", "outcome"),
                keys=_sorted_by,
            )
        )


def _sorted_by(row: dict[str, Any], name: str) -> str:
    """What a browser sorts a cell by; empty is what is not known."""
    value = row["created" if name == "started" else name]
    return "" if value is None else str(value)


class _Logs(tornado.web.RequestHandler):
    """The log of one process of a run."""

    def initialize(self, site: Site) -> None:
        self._site = site

    async def get(self) -> None:
        run = self.get_query_argument("run", "")
        component = self.get_query_argument("component", None)
        path = self._site.path(run)
        if path is None:
            self.set_status(404)
            self.write(page.TEMPLATES.get_template("unknown.html").render())
            return
        # An engine may be asked for them.
        names, shown, text = await IOLoop.current().run_in_executor(None, _logs, path, component)
        template = page.TEMPLATES.get_template("logs.html")
        live = is_live(path)
        self.write(
            template.render(
                run=run, components=names, component=shown, text=text, live=live, most=_LOG_LINES
            )
        )


def _logs(path: Path, component: str | None) -> tuple[list[str], str, str]:
    """The processes that have a log, the one that is shown (`component`, else the first one that has
    said something), and what it says."""
    try:
        found = dict(logs.read(RunDirectory(path), None, _LOG_LINES))
    except (BadInputError, OSError) as error:
        return [], "", str(error)
    if component is None:
        component = next((name for name, text in found.items() if text), next(iter(found), ""))
    return [*found], component, found.get(component, f"There is no log of {component}.")


class _Ours(Matcher):
    """Requests for our own names, from no page but ours."""

    def __init__(self, hosts: OwnHosts) -> None:
        self._hosts = hosts

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        headers = request.headers
        return {} if self._hosts.includes(headers.get("Host"), headers.get("Origin")) else None


def no_early_leaver(record: logging.LogRecord) -> bool:
    """False for what Bokeh's server raises where a visitor has left before the page was made: it prints
    a traceback, and nothing is wrong."""
    error = None if record.exc_info is None else record.exc_info[1]
    if not isinstance(error, AssertionError):
        return True
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return raised.parts[-3:] != ("bokeh", "server", "connection.py")


def serve(listening: socket.socket, site: Site) -> None:
    """Serve until SIGINT or SIGTERM. `listening` is bound to the loopback interface."""
    silence(MISSING_RENDERERS, silence=True)  # of a chart that has nothing to show, and is hidden
    logging.getLogger("tornado.application").addFilter(no_early_leaver)
    logging.getLogger("bokeh.server.views.ws").setLevel(logging.ERROR)  # no news of those who have left
    settings.resources = "server"  # nothing from other hosts, whatever the environment says
    hosts = OwnHosts(listening.getsockname()[1])
    bokeh = BokehTornado(
        {"/run": Application(FunctionHandler(site.open))},
        extra_websocket_origins=hosts.names,
        extra_patterns=[("/", _List, {"site": site}), ("/logs", _Logs, {"site": site})],
        use_index=False,
        keep_alive_milliseconds=10_000,
    )
    refuse = tornado.web.Application([(".*", tornado.web.ErrorHandler, {"status_code": 403})])
    http = HTTPServer(RuleRouter([Rule(_Ours(hosts), bokeh), Rule(AnyMatches(), refuse)]))
    listening.settimeout(0.0)
    http.add_sockets([listening])
    server = BaseServer(IOLoop.current(), bokeh, http)
    server.start()

    def end(*_: object) -> None:
        server.io_loop.add_callback_from_signal(_end, server, site)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    server.io_loop.start()


async def _end(server: BaseServer, site: Site) -> None:
    """Show the last of it to whoever looks, and stop."""
    site.refresh()
    for session in server.get_sessions():
        for callback in session.document.session_callbacks:
            shown: Any = session.with_document_locked(callback.callback)
            await shown  # until it has been sent
    await asyncio.sleep(_FLUSH_SECONDS)
    server.io_loop.stop()
