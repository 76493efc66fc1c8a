"""The first page of a visitor: name and main facts of the runs, while their charts are prepared.

On a busy host it takes long to import Bokeh and pandas and to compute charts. This module needs
neither, so `serving` shows this page until the web server can take over.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jinja2

from testbed.rundir.directory import RunDirectory
from testbed.rundir.listing import run_row, text_row
from testbed.watching.hosts import OwnHosts

TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
_FACTS = ("duration", "accuracy", "devices", "task", "runtime", "started")
_POLL_SECONDS = 0.05
_REQUEST_TIMEOUT_SECONDS = 5.0
"""Maximum number of seconds to wait for a request: browsers also open connections that they may need
later."""
_RETRY_MS = 500
"""Milliseconds until the page asks again whether the web server is ready."""


class VisibleRuns:
    """The runs that visitors may see: those in `named` or, if it is empty, all in the folder `runs`."""

    def __init__(self, named: Sequence[RunDirectory], runs: Path) -> None:
        self._named = {directory.run: directory.path for directory in named}
        self.runs = runs

    def paths(self) -> list[Path]:
        """Return the directories of all runs."""
        return [*self._named.values()] or [path.parent for path in self.runs.glob("*/manifest.json")]

    def path(self, run: str) -> Path | None:
        """Return the directory of `run`; None if visitors may not see it."""
        if self._named:
            return self._named.get(run)
        return {path.name: path for path in self.paths()}.get(run)


def variables(paths: Sequence[Path], theme: str | None, retry_ms: int = 0) -> dict[str, Any]:
    """Return the variables of the template `wait.html` for the runs in `paths`. If `theme` is None, the
    page asks the browser for its theme. The page asks again after `retry_ms` milliseconds."""
    rows = [text_row(run_row(RunDirectory(path))) for path in paths]
    shown = [(row, [(name, row[name]) for name in _FACTS if row[name] != "–"]) for row in rows]
    return {"rows": shown, "theme": theme, "retry_ms": retry_ms, "unreadable": {}}


@contextmanager
def served(listening: socket.socket, visible: VisibleRuns) -> Iterator[None]:
    """Answer all requests with the first page, in threads, until the context ends. `listening` stays
    open."""
    server = _Server(listening, visible)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket, visible: VisibleRuns) -> None:
        address = listening.getsockname()
        super().__init__(address[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.visible = visible
        self.hosts = OwnHosts(address[1])


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        if not self.server.hosts.includes(self.headers.get("Host"), self.headers.get("Origin")):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        found = map(self.server.visible.path, query.get("run", ()) if url.path == "/run" else ())
        theme = query.get("theme", [""])[0]
        known = variables([path for path in found if path], theme or None, _RETRY_MS)
        page = TEMPLATES.get_template("wait.html").render(title="testbed", **known).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Log nothing: stderr is the log of errors."""
