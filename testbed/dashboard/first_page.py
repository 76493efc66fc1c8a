"""The list of runs, and the first page of a set of runs, with their main facts.

On a busy host it takes long to import Bokeh and pandas and to compute charts. This module needs none of
them, so `serving` shows these pages until the web server can take over.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jinja2

from testbed.rundir.directory import RunDirectory
from testbed.rundir.listing import SORTS, RunRow, run_row, sort_value, text_row
from testbed.watching.hosts import OwnHosts

TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
_NUMBERS = ("devices", "duration", "accuracy")
"""Columns of the list that contain numbers."""
_FACTS = ("duration", "accuracy", "devices", "task", "runtime", "started")
_POLL_SECONDS = 0.05
_REQUEST_TIMEOUT_SECONDS = 5.0
"""Browsers also open connections that they may need later."""
_RETRY_MS = 1000


class VisibleRuns:
    """Runs in `named`; all in the folder `runs` if `named` is empty."""

    def __init__(self, named: Sequence[RunDirectory], runs: Path) -> None:
        self._named = {directory.run: directory.path for directory in named}
        self.runs = runs
        self._rows: dict[Path, tuple[float, RunRow]] = {}
        """Modification time of the manifest, and row, of each finished run: browsers request the list
        every few seconds."""

    def paths(self) -> list[Path]:
        return [*self._named.values()] or [path.parent for path in self.runs.glob("*/manifest.json")]

    def path(self, run: str) -> Path | None:
        """None if visitors may not see it."""
        if self._named:
            return self._named.get(run)
        return {path.name: path for path in self.paths()}.get(run)

    def rows(self) -> list[RunRow]:
        """Live runs come first, then newer ones."""
        rows = [self._row(path) for path in self.paths()]
        rows.sort(key=lambda row: row.created or "", reverse=True)
        return sorted(rows, key=lambda row: row.outcome != "running")

    def _row(self, path: Path) -> RunRow:
        directory = RunDirectory(path)
        try:
            changed = directory.manifest.stat().st_mtime
        except OSError:
            changed = 0.0
        if (known := self._rows.get(path)) is not None and known[0] == changed:
            return known[1]
        row = run_row(directory)
        if row.outcome not in ("running", "unreadable"):
            self._rows[path] = changed, row
        return row


def list_page(visible: VisibleRuns) -> str:
    return TEMPLATES.get_template("list.html").render(
        rows=[(row, text_row(row)) for row in visible.rows()],
        folder=visible.runs,
        headings=("run", *(name for name in SORTS if name != "run")),
        numbers=_NUMBERS,
        plain=("started", "rule", "task", "runtime", "outcome"),
        keys=_sorted_by,
    )


def _sorted_by(row: RunRow, name: str) -> str:
    """Empty if the value is unknown."""
    value = sort_value(row, name)
    return "" if value is None else str(value)


def variables(paths: Sequence[Path], theme: str | None, retry_ms: int = 0) -> dict[str, Any]:
    """For the template `wait.html`. If `theme` is None, the page asks the browser for its theme."""
    rows = [text_row(run_row(RunDirectory(path))) for path in paths]
    shown = [(row, [(name, row[name]) for name in _FACTS if row[name] != "–"]) for row in rows]
    return {"rows": shown, "theme": theme, "retry_ms": retry_ms, "unreadable": {}}


def title(paths: Sequence[Path]) -> str:
    return f"{' '.join(path.name for path in paths)} · testbed"


@contextmanager
def served(listening: socket.socket, visible: VisibleRuns) -> Iterator[None]:
    """Answer in threads until the context ends: the list, or the first page of runs, which repeats its
    request until the web server has taken over. `listening` stays open."""
    server = _FirstPageServer(listening, visible)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


class _FirstPageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket, visible: VisibleRuns) -> None:
        address = listening.getsockname()
        super().__init__(address[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.visible = visible
        self.hosts = OwnHosts(address[1])


class _Handler(BaseHTTPRequestHandler):
    server: _FirstPageServer
    timeout = _REQUEST_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        if not self.server.hosts.includes(self.headers.get("Host"), self.headers.get("Origin")):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        url = urlsplit(self.path)
        if url.path not in ("/", "/run", "/logs"):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        page = self._page(url.path, parse_qs(url.query)).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(page)

    def _page(self, path: str, query: Mapping[str, Sequence[str]]) -> str:
        if path == "/":
            return list_page(self.server.visible)
        found = [self.server.visible.path(run) for run in query.get("run", ())]
        known = [directory for directory in found if directory is not None]
        if not known or len(known) < len(found):
            return TEMPLATES.get_template("unknown.html").render()
        (theme,) = query.get("theme", ("",))[:1]
        values = variables(known, theme or None, _RETRY_MS)
        return TEMPLATES.get_template("wait.html").render(title=title(known), **values)

    def log_message(self, *_: object) -> None:
        """stderr is the log of errors."""
