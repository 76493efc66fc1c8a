"""The page and the metrics answer for their own names only, and no page but their own."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from testbed.rundir.directory import RunDirectory
from testbed.watching import prometheus
from testbed.watching.hosts import OwnHosts
from tests.running import started, told
from tests.waiting import eventually


@pytest.mark.parametrize("host", ["127.0.0.1:5006", "localhost:5006", "LOCALHOST:5006", "[::1]:5006"])
def test_own_host_names_are_accepted(host: str) -> None:
    assert OwnHosts(5006).includes(host, None)
    assert OwnHosts(5006).includes(host, f"http://{host}")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (None, None),
        ("", None),
        ("evil.com", None),
        ("evil.com:5006", None),
        ("localhost:5007", None),
        ("localhost.evil.com:5006", None),
        ("localhost:5006", "http://evil.com"),
        ("localhost:5006", "http://evil.com:5006"),
        ("localhost:5006", "null"),
        ("localhost:5006", "http://localhost:5007"),
    ],
)
def test_foreign_host_names_are_refused(host: str | None, origin: str | None) -> None:
    assert not OwnHosts(5006).includes(host, origin)


def test_metrics_server_refuses_foreign_hosts(tmp_path: Path) -> None:
    with prometheus.serve_metrics(RunDirectory(tmp_path), 0) as url:
        assert status(url) == 200
        assert status(url, {"Host": "evil.com"}) == 403
        assert status(url, {"Origin": "http://evil.com"}) == 403


def test_page_server_refuses_foreign_hosts(tmp_path: Path) -> None:
    with started("dashboard", "--runs", tmp_path) as dashboard:
        url = told(dashboard, r"Dashboard: (\S+)")
        for headers in ({"Host": "evil.com"}, {"Origin": "http://evil.com"}):
            assert status(url, headers) == 403  # also while the charts' server starts
        eventually(lambda: status(url + "static/js/bokeh.min.js") == 200)
        for path in ("", "run", "run?theme=%ff&run=%ff"):
            assert status(url + path) == 200, path
        autoload = "run/autoload.js?bokeh-autoload-element=1"
        for path in ("", "run", "run/ws", "run/metadata", autoload, "static/js/bokeh.min.js"):
            assert status(url + path, {"Host": "evil.com"}) == 403, path
            assert status(url + path, {"Origin": "http://evil.com"}) == 403, path


def status(url: str, headers: Mapping[str, str] | None = None) -> int:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=120)) as connection:
        connection.request("GET", f"{parts.path}?{parts.query}", headers=dict(headers or {}))
        return connection.getresponse().status
