"""The dashboard's web server. It listens on the loopback interface, refuses requests to foreign host
names and requests from pages of other sites, and changes nothing."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote
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
from bokeh.util.token import check_token_signature, get_token_payload
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.routing import AnyMatches, Matcher, Rule, RuleRouter

from analysis.charts.chart import Theme
from testbed.dashboard import page
from testbed.dashboard.board import Board
from testbed.dashboard.feed import Feed, is_live
from testbed.dashboard.first_page import TEMPLATES, VisibleRuns, list_page
from testbed.errors import BadInputError
from testbed.run import live_runs
from testbed.rundir.directory import RunDirectory
from testbed.watching.hosts import OwnHosts

_LOG_LINES = 500
"""Maximum that are shown: the last ones."""
_ANSWER_SECONDS = 0.05
"""Before the charts of a new board are computed: time to send the first page."""
_KEEP_SECONDS = 60.0
"""A visitor can request the charts of its new board for this long after they were computed."""
_FLUSH_SECONDS = 0.3
"""For the final state to arrive before the server stops."""


class Site:
    def __init__(self, visible: VisibleRuns) -> None:
        self.visible = visible
        # Weak references: a feed or board exists as long as a visitor has it open.
        self._feeds = WeakValueDictionary[Path, Feed]()
        self._boards = WeakValueDictionary[tuple[Path, ...], Board]()

    def board(self, paths: tuple[Path, ...]) -> Board:
        """All visitors of the same runs get the same board."""
        board = self._boards.get(paths)
        if board is None:
            feeds = [self._feeds.get(path) or Feed(path) for path in paths]
            self._feeds.update(zip(paths, feeds, strict=True))
            board = self._boards[paths] = Board(feeds)
        return board

    def refresh(self) -> None:
        for board in self._boards.values():
            board.refresh(at_once=True)

    def open(self, document: Document) -> None:
        """The page's address names the runs."""
        request = getattr(document.session_context, "request", None)
        query = request.arguments if request is not None else {}
        names = list(dict.fromkeys(name.decode(errors="replace") for name in query.get("run", ())))
        paths = [path for path in map(self.visible.path, names) if path is not None]
        theme = query.get("theme", [b""])[0].decode(errors="replace")
        if not paths or len(paths) < len(names):
            document.template = TEMPLATES.get_template("unknown.html")
            return
        known = cast(Theme, theme) if theme in ("light", "dark") else None
        board = self.board(tuple(paths))
        if board.generation >= 0:
            page.fill(document, board, known)
            return
        page.wait(document, board, known)
        IOLoop.current().call_later(_ANSWER_SECONDS, _prepare, board)


def _prepare(board: Board) -> None:
    board.refresh()
    IOLoop.current().call_later(_KEEP_SECONDS, lambda kept: None, board)


class _ListHandler(tornado.web.RequestHandler):
    def initialize(self, site: Site) -> None:
        self._site = site

    def get(self) -> None:
        self.write(list_page(self._site.visible))


class _LogsHandler(tornado.web.RequestHandler):
    def initialize(self, site: Site) -> None:
        self._site = site

    async def get(self) -> None:
        run = self.get_query_argument("run", "")
        component = self.get_query_argument("component", None)
        path = self._site.visible.path(run)
        if path is None:
            self.set_status(404)
            self.write(TEMPLATES.get_template("unknown.html").render())
            return
        # In a thread, because logs may come from a container engine.
        names, shown, text = await IOLoop.current().run_in_executor(None, _logs, path, component)
        template = TEMPLATES.get_template("logs.html")
        live = is_live(path)
        self.write(
            template.render(
                run=run, components=names, component=shown, text=text, live=live, most=_LOG_LINES
            )
        )


def _logs(path: Path, component: str | None) -> tuple[list[str], str, str]:
    """Return the processes that have a log, the one to show, and its log. If `component` is None, show
    the first non-empty log."""
    try:
        texts = dict(live_runs.read_logs(RunDirectory(path), None, _LOG_LINES))
    except (BadInputError, OSError) as error:
        return [], "", str(error)
    if component is None:
        component = next((name for name, text in texts.items() if text), next(iter(texts), ""))
    return [*texts], component, texts.get(component, f"There is no log of {component}.")


class _OwnRequests(Matcher):
    """Matches requests to one of this server's own host names that no page of another site has
    caused."""

    def __init__(self, hosts: OwnHosts) -> None:
        self._hosts = hosts

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        headers = request.headers
        return {} if self._hosts.includes(headers.get("Host"), headers.get("Origin")) else None


class _BrokenRequests(Matcher):
    """Matches requests that Bokeh's server would answer with a traceback in its log: a path with a NUL,
    and a websocket without a valid token."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        if "\0" in unquote(request.path):
            return {}
        is_socket = request.headers.get("Upgrade", "").lower() == "websocket"
        return {} if is_socket and not self._has_token(request.headers) else None

    def _has_token(self, headers: HTTPHeaders) -> bool:
        protocol, _, signed = headers.get("Sec-WebSocket-Protocol", "").partition(",")
        try:
            return (
                protocol == "bokeh"
                and check_token_signature(signed.strip(), self._key, signed=True)
                and get_token_payload(signed.strip())["session_expiry"] > time.time()
            )
        except Exception:  # noqa: BLE001  # Bokeh checks nothing before it decodes
            return False


def is_not_early_leave(record: logging.LogRecord) -> bool:
    """False for the error that Bokeh's server logs if a visitor leaves before the page is ready: nothing
    is wrong."""
    error = None if record.exc_info is None else record.exc_info[1]
    if not isinstance(error, AssertionError):
        return True
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return raised.parts[-3:] != ("bokeh", "server", "connection.py")


def without_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback from an error about a visitor's message or request, which may be wrong in any
    way. The log keeps the error. Errors of pages keep their traceback."""
    if record.msg == "Uncaught exception" and record.exc_info:  # tornado has not come to any page
        record.msg = f"Unreadable request: {record.exc_info[1]}"
    elif record.name == "tornado.application":
        return True
    record.exc_info = None
    return True


def serve(listening: socket.socket, site: Site) -> None:
    """Ends by SIGINT or SIGTERM."""
    silence(MISSING_RENDERERS, silence=True)  # charts without data are hidden
    logging.getLogger("tornado.application").addFilter(is_not_early_leave)
    logging.getLogger("bokeh.server.views.ws").setLevel(
        logging.ERROR
    )  # no messages about visitors who left
    for name in ("tornado.application", "bokeh.server.views.ws", "bokeh.server.protocol_handler"):
        logging.getLogger(name).addFilter(without_traceback)
    settings.resources = "server"  # load nothing from other hosts, whatever the environment says
    hosts = OwnHosts(listening.getsockname()[1])
    key = secrets.token_bytes(32)
    bokeh = BokehTornado(
        {"/run": Application(FunctionHandler(site.open))},
        extra_websocket_origins=hosts.names,
        extra_patterns=[("/", _ListHandler, {"site": site}), ("/logs", _LogsHandler, {"site": site})],
        use_index=False,
        sign_sessions=True,
        secret_key=key,
        keep_alive_milliseconds=10_000,
    )
    broken = Rule(_BrokenRequests(key), _refusal(400))
    own, others = Rule(_OwnRequests(hosts), bokeh), Rule(AnyMatches(), _refusal(403))
    http = HTTPServer(RuleRouter([broken, own, others]))
    listening.settimeout(0.0)
    http.add_sockets([listening])
    server = BaseServer(IOLoop.current(), bokeh, http)
    server.start()

    def end(*_: object) -> None:
        server.io_loop.add_callback_from_signal(_end, server, site)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    server.io_loop.start()


def _refusal(status: int) -> tornado.web.Application:
    return tornado.web.Application([(".*", tornado.web.ErrorHandler, {"status_code": status})])


async def _end(server: BaseServer, site: Site) -> None:
    """Visitors get the final state first."""
    site.refresh()
    for session in server.get_sessions():
        for callback in session.document.session_callbacks:
            shown: Any = session.with_document_locked(callback.callback, at_once=True)
            await shown  # wait until it was sent
    await asyncio.sleep(_FLUSH_SECONDS)
    server.io_loop.stop()
