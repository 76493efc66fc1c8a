"""The dashboard in a real browser, for a running run and for finished ones."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from shutil import copytree
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from analysis.charts import chart
from analysis.charts.lanes import lanes as lanes_chart
from analysis.load import Run, load
from testbed import simulate
from testbed.host import docker_engine
from tests import browser
from tests.browser import Browser
from tests.conftest import unavailable
from tests.running import children_running, cli, left_as_processes, started, told, write_small_topology
from tests.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.hosts]
SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"


@pytest.fixture(autouse=True)
def _with_a_browser() -> None:
    if lacking := browser.missing():
        unavailable("browser", f"no {lacking}")


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs in virtual time, of two rules."""
    folder = tmp_path_factory.mktemp("over")
    timing = {"distribution": "exponential", "mean": "1s"}
    shared: dict[str, Any] = {
        "devices": [{"name": "pi", "count": 8, "timing": timing}],
        "stop": {"after": "20s"},
        "runtime": {"name": "virtual"},
    }
    for rule in ("fedbuff", "fedasync"):
        topology = write_small_topology(folder, rule={"name": rule}, **shared)
        simulate(topology, runs=folder / "runs")
    return folder / "runs"


def test_page_follows_a_running_run(tmp_path: Path) -> None:
    runs, runtime = tmp_path / "runs", "docker" if docker_engine.is_available() else "process"
    devices = [  # which mostly wait: the cores are for the browser
        {"name": "fast", "cpu": 0.3, "timing": "500ms"},
        {"name": "slow", "cpu": 0.1, "timing": "1s"},
    ]
    topology = write_small_topology(
        tmp_path, devices=devices, stop={"after": "10min"}, evaluate={"every": "1s"}
    )
    asked = ("--dashboard", "--metrics-port", "0")
    with started("up", topology, "--runtime", runtime, "--runs", runs, *asked) as up:
        metrics = told(up, r"Prometheus: (\S+)")
        url = told(up, r"Dashboard: (\S+)")
        server = page_server_at_usual_priority(up.pid)
        told(up, "(the run clock starts)")
        (path,) = runs.iterdir()
        with browser.opened() as page:
            page.open(url)
            assert all(address.startswith("http://127.0.0.1:") for address in page.requests())
            eventually(
                lambda: " s of 600 s" in page.header() and len(drawn(page, "accuracy", "fedbuff")) > 1
            )
            before = drawn(page, "accuracy", "fedbuff"), lanes(page)
            eventually(lambda: len(drawn(page, "accuracy", "fedbuff")) > len(before[0]))
            eventually(lambda: len(lanes(page)) > len(before[1]))
            eventually(lambda: not page.model("sent", "active"))  # the server sends the next state
            assert "sequence" in eventually(lambda: hovered(page))
            eventually(lambda: "working" in page.words("table-0"))
            assert {"fast", "slow"} <= set(eventually(lambda: page.layers("cpu-over-time-0")))
            log = fetched(url.replace("/run?", "/logs?") + "&component=aggregator")[1]
            assert "<option selected>aggregator</option>" in log
            assert cli("kill", str(path), "slow").returncode == 0
            eventually(lambda: ("slow", "offline") in lanes(page))
            eventually(lambda: "1: crash slow" in page.words("events-0"))
            keep(page, "live")
            seen = counted(metrics)
            assert seen["testbed_updates_total", "fast"] > 0
            assert seen["testbed_cpu_asked_cores", "slow"] == pytest.approx(0.1)
            assert page.complaints() == []
            up.terminate()
            eventually(lambda: "ended: interrupted" in page.header())
            eventually(lambda: not page.run("return document.getElementById('lost').hidden"))
            assert "unknown" not in page.header()  # validity: what ends early is judged, too
        up.wait(30)
        assert not server.is_running()
    assert left_as_processes(path.name) == []


def test_report_tables_fit_the_page_width(over: Path, tmp_path: Path) -> None:
    """For every device: its profile, its work, its time in five shares."""
    file = tmp_path / "report.html"
    done = cli("report", *map(str, over.iterdir()), "--to", file)
    assert done.returncode == 0, done.stderr
    with browser.opened(size=(1300, 900)) as page:
        page.open(file.as_uri())
        wide = "[...document.querySelectorAll('.wide')]"
        assert page.run(f"return {wide}.map(table => table.scrollWidth - table.clientWidth)") == [0] * 5


def test_page_compares_finished_runs(over: Path, tmp_path: Path) -> None:
    names = [path.name for path in over.iterdir()]
    runs = copytree(over, tmp_path / "runs")
    long = long_run(tmp_path / "long")
    with served(runs) as url, browser.opened("dark") as page:
        page.driver.get(url)
        find = page.driver.find_element("id", "find")
        find.send_keys("fedbuff")
        assert page.driver.find_element("id", "count").text == "1 of 3 runs"
        find.clear()
        find.send_keys("time is up")
        page.driver.find_element("css selector", "[data-sort=rule]").click()
        rules = "return [...document.querySelectorAll('tbody tr')].map(row => row.cells[3].innerText)"
        assert page.run(rules) == ["area", "fedasync", "fedbuff"]
        for name in names:
            page.driver.find_element("css selector", f"input[value='{name}']").click()
        page.driver.find_element("css selector", "button").click()
        eventually(page.drawn)
        assert "theme=dark" in page.driver.current_url
        assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(22, 25, 29)"
        for rule in ("fedbuff", "fedasync"):
            assert len(drawn(page, "accuracy", rule)) > 2
        assert {state for _, state in lanes(page)} == {"train", "unfinished"}
        assert lanes(page, 1)
        assert all(name in page.driver.page_source for name in names)
        keep(page, "side-by-side-dark")
        assert gaps(page) == []
        page.open(f"{url}run?run={long.name}&theme=dark")
        short_intervals_are_shares_of_time(page, load(long))
        assert gaps(page) == []
        keep(page, "long-dark")
        assert page.complaints() == []


def long_run(folder: Path) -> Path:
    """A run of 100 s, whose first device has 20 rounds per second, and whose second has one in 20 s."""
    folder.mkdir()
    link = {"up": "2mbit"}  # so that it sends for a part of each round
    devices = [{"name": "fast", "timing": "40ms", "link": link}, {"name": "slow", "timing": "20s"}]
    changes = {"devices": devices, "rule": {"name": "area", "every": 1}, "stop": {"after": "100s"}}
    topology = write_small_topology(folder, **changes, runtime={"name": "virtual"})
    return simulate(topology, runs=folder.parent / "runs").path


def short_intervals_are_shares_of_time(page: Browser, run: Run) -> None:
    """The browser draws what `time_shares` computes and, once a visitor has zoomed in, the intervals."""

    def bars(name: str) -> list[Any]:
        return page.column("devices-0", "devices, shares of time", name)

    eventually(lambda: len(bars("y")) > 0)
    step = max(end - begin for begin, end in zip(bars("begin"), bars("end"), strict=True))
    spans = lanes_chart([run]).layers[0].columns
    fast = {name: column[spans["y"] == 0] for name, column in spans.items()}
    expected = chart.shares_of_time(fast, step)
    for name in ("y", "height", "begin", "end", "color"):
        assert bars(name)[:-2] == pytest.approx(expected[name].tolist())
    assert {*bars("device")} == {"fast"}
    training, sending, *_ = bars("percent")
    assert 70 < training < 90
    assert 10 < sending < 30
    page.run(
        "const range = Bokeh.documents[0].get_model_by_name('devices-0').x_range;"
        "range.have_updated_interactively = true; range.start = 3; range.end = 4"
    )
    eventually(lambda: bars("y") == [])


def gaps(page: Browser) -> list[float]:
    """Return the free space in pixels at the end of each row of figures that has any."""
    script = """
    const ends = new Map();
    for (const figure of document.querySelectorAll('.bk-Figure')) {
      const box = figure.getBoundingClientRect();
      const bottom = Math.round(box.bottom);
      if (box.width > 0) ends.set(bottom, Math.max(ends.get(bottom) ?? 0, box.right));
    }
    const edge = document.querySelector('section').getBoundingClientRect().right;
    return [...ends.values()].map(end => edge - end).filter(gap => gap > 2);
    """
    found: list[float] = page.run(script)
    return found


def test_dashboard_accepts_only_its_own_pages(over: Path) -> None:
    with served(over) as url:
        own = url.rstrip("/")
        token = page_token(f"{own}/run?theme=dark&run={next(over.iterdir()).name}")
        assert handshake(own, own, token) == 101
        assert handshake(own, "http://elsewhere.example", token) == 403
        for wrong in (
            "",
            "x",
            "e30",
            token[:-2],
            "." + token,
            token + ".x",
            "\N{LATIN SMALL LETTER E WITH ACUTE}",
        ):
            assert handshake(own, own, wrong) == 400
        assert fetched(f"{own}/static/%00")[0] == 400
        assert all(path.name in fetched(url)[1] for path in over.iterdir())
        assert fetched(url, {"Host": "elsewhere.example"})[0] == 403
        for other in ("..", str(over), "no-such-run"):
            assert "No such run" in fetched(f"{own}/run?run={other}&theme=dark")[1]


def page_token(url: str) -> str:
    """The token of a page's websocket. The first page has none: it is shown while charts are made."""
    return str(eventually(lambda: re.findall(r'"token":"([^"]+)"', fetched(url)[1]))[0])


def handshake(server: str, origin: str, token: str) -> int:
    """The status that opening a websocket from a page of `origin` ends with."""
    key = "AAAAAAAAAAAAAAAAAAAAAA=="
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
    asked = {"Origin": origin, "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
    asked["Sec-WebSocket-Protocol"] = f"bokeh, {token}"
    return fetched(f"{server}/run/ws", {**upgrade, **asked})[0]


def fetched(url: str, headers: Mapping[str, str] = MappingProxyType({})) -> tuple[int, str]:
    """Status and body."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as connection:
        connection.request("GET", f"{parts.path}?{parts.query}", headers=dict(headers))
        with connection.getresponse() as answer:
            return answer.status, answer.read().decode() if answer.status != 101 else ""


@contextmanager
def served(runs: Path) -> Iterator[str]:
    with started("dashboard", "--runs", runs) as dashboard:
        url = told(dashboard, r"Dashboard: (\S+)")
        page_server_at_usual_priority(dashboard.pid)
        yield url


def page_server_at_usual_priority(parent: int) -> psutil.Process:
    """Return the page's process, a child of `parent`. It lowers its own priority, which is checked here.
    Beside other tests it would then get next to no CPU, so this is undone if the user may do that."""

    (server,) = eventually(lambda: children_running(parent, "testbed.dashboard.serving"))
    ours = psutil.Process().nice()
    eventually(lambda: server.nice() == min(19, ours + 10))
    with suppress(psutil.AccessDenied, OSError):
        server.nice(ours)
        Path(f"/proc/{server.pid}/autogroup").write_text("0", encoding="ascii")
    return server


def drawn(page: Browser, figure: str, layer: str) -> list[float]:
    return page.column(figure, layer, "x")


def lanes(page: Browser, column: int = 0) -> list[tuple[str, str]]:
    """Device and state of each interval."""
    of = [page.column(f"devices-{column}", "devices", name) for name in ("device", "state")]
    return list(zip(*of, strict=False))  # it may be brought up to date in between


def hovered(page: Browser) -> str:
    """Return the page's description of the newest training."""
    begin, end, y = (page.column("devices-0", "devices", name) for name in ("begin", "end", "y"))
    longest = max(range(min(map(len, (begin, end, y)))), key=lambda i: end[i] - begin[i])
    return page.hover("devices-0", (begin[longest] + end[longest]) / 2, y[longest])


def counted(url: str) -> dict[tuple[str, str], float]:
    """Values of a Prometheus endpoint by name and client or device."""
    families = text_string_to_metric_families(fetched(url)[1])
    return {
        (sample.name, sample.labels.get("client") or sample.labels.get("device", "")): sample.value
        for family in families
        for sample in family.samples
    }


def keep(page: Browser, name: str) -> None:
    """A screenshot, for people."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))
