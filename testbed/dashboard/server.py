"""The web server: on the loopback interface, for its own pages, and only to read."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import tornado.web
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
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
from testbed.dashboard.feed import Feed
from testbed.rundir.directory import RunDirectory, listing, row
from testbed.watching.hosts import OwnHosts

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

    def rows(self) -> list[dict[str, Any]]:
        """For the list of runs: live ones first, then the newest."""
        if self._named:
            rows = [row(RunDirectory(path)) for path in self._named.values()]
        else:
            rows = listing(self.runs)[::-1]
        return sorted(rows, key=lambda row: row["outcome"] != "running")

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
        template = page.TEMPLATES.get_template("list.html")
        self.write(template.render(rows=self._site.rows(), folder=self._site.runs))


class _Ours(Matcher):
    """Requests for our own names, from no page but ours."""

    def __init__(self, hosts: OwnHosts) -> None:
        self._hosts = hosts

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        headers = request.headers
        return {} if self._hosts.includes(headers.get("Host"), headers.get("Origin")) else None


def serve(listening: socket.socket, site: Site) -> None:
    """Serve until SIGINT or SIGTERM. `listening` is bound to the loopback interface."""
    settings.resources = "server"  # nothing from other hosts, whatever the environment says
    hosts = OwnHosts(listening.getsockname()[1])
    bokeh = BokehTornado(
        {"/run": Application(FunctionHandler(site.open))},
        extra_websocket_origins=hosts.names,
        extra_patterns=[("/", _List, {"site": site})],
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
