"""Cost of the dashboard: for the browser with a page of 1,000 devices, and for the run that is watched.

    python -m benchmarks.dashboard page             # needs chromium and chromedriver
    python -m benchmarks.dashboard page processes   # and 12 GB of memory
    python -m benchmarks.dashboard watching         # needs a Docker engine, and a quiet machine

`page`: a live run of 1,000 devices in virtual time, or with real `processes`. Prints seconds until the
page is drawn, seconds between two updates of it, rows drawn, and the memory of browser and server, early
and late. `watching`: updates per second of one run in containers, in alternating turns with and without
a page that somebody watches; the ratio is the cost of watching. The watcher receives all that the page
is sent but draws nothing, because a browser draws on its own machine. Trainings take a fixed time,
because the speed of a virtual machine's core may vary more between turns than the effect that is
measured.
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import psutil
import yaml
from bokeh.client import pull_session

from agents import events
from testbed.dashboard import serving
from tests import browser
from tests.browser import Browser
from tests.waiting import eventually

_DEVICES = 1000
_LOOK = 60.0
"""Seconds between the two looks at the page."""
_WATCHED_SECONDS = 25.0
"""Seconds during which updates of the page are counted."""
_TURNS, _TURN = 8, 20.0
"""Number of turns with a page (and as many without), and their seconds that count."""
_SETTLE = 8.0
"""Seconds before these, in which the page's server starts and prepares the page."""
_PAGE: dict[str, Any] = {
    "name": "thousand",
    "task": {"name": "digits-logreg", "partition": {"scheme": "resampled"}, "local": {"steps": 5}},
    "rule": {"name": "fedbuff", "buffer_size": 50},
    "devices": [
        {"name": name, "count": _DEVICES // 2, "timing": {"distribution": "exponential", "mean": mean}}
        for name, mean in (("fast", "5s"), ("slow", "20s"))
    ],
    "evaluate": {"every": "5s"},
    "stop": {"after": "30000s"},
    "runtime": {"name": "virtual"},
}
_SHARE = 0.01
"""CPU share of each process, if there are as many processes as devices."""
_PROCESSES = _PAGE | {
    "devices": [{**group, "cpu": _SHARE} for group in _PAGE["devices"]],
    "dilation": "auto",
    "start": {"timeout": "10min"},
    "runtime": {"name": "process"},
}
_WATCHED = {
    "name": "watched",
    "seed": 1,
    "task": {"name": "digits-logreg", "local": {"steps": 20, "batch_size": 32, "lr": 0.01}},
    "rule": {"name": "fedbuff", "buffer_size": 3},
    "devices": [
        {"name": "fast", "count": 2, "cpu": 0.25, "timing": "150ms"},
        {"name": "slow", "count": 4, "cpu": 0.1, "timing": "400ms"},
    ],
    "evaluate": {"every": "2s"},
    "stop": {"after": "20min"},
    "runtime": {"name": "docker"},
}


def page(folder: Path, content: dict[str, Any] = _PAGE) -> None:
    topology = folder / "thousand.yaml"
    topology.write_text(yaml.safe_dump(content))
    runs = folder / "runs"
    command = ("up", topology, "--runs", runs, "--dashboard", "--oversubscribe")
    with _testbed(folder / "log", *command) as up, browser.opened() as shown:
        url = up.url()
        eventually(
            lambda: any(file.stat().st_size for file in runs.glob("*/events.jsonl")), seconds=600.0
        )
        (server,) = eventually(lambda: _pages(up.process.pid))
        print(f"first paint {shown.open(url):.1f} s")
        early = _look(shown, server)
        time.sleep(_LOOK)
        late = _look(shown, server)
        print(f"memory of the browser's page, {_LOOK:.0f} s apart: {early[0]:.0f} and {late[0]:.0f} MB")
        print(f"memory of the server: {early[1]:.0f} and {late[1]:.0f} MB")


def _look(shown: Browser, server: psutil.Process) -> tuple[float, float]:
    """Print how often the page is updated; return MB of the browser's heap and of the server."""
    gaps = _gaps(shown, _WATCHED_SECONDS)
    rows = len(shown.column("devices-0", "devices", "y"))
    every = "once"
    if gaps:
        every = f"every {statistics.median(gaps):.2f} s, at most {max(gaps):.2f} s apart"
    print(f"{_headline(shown)}: {rows} intervals drawn; updated {every}, in {_WATCHED_SECONDS:.0f} s; "
          f"server's CPU {server.cpu_percent(5.0):.0f}%")  # fmt: skip
    return shown.heap(), server.memory_info().rss / 1e6


def _gaps(shown: Browser, seconds: float) -> list[float]:
    """Seconds between changes of the header, measured by the browser's clock after drawing."""
    script = """const [seconds, done] = arguments, times = [];
        const header = Bokeh.documents[0].get_model_by_name('header-0');
        const drawn = () => times.push(performance.now());
        header.properties.text.change.connect(() => requestAnimationFrame(drawn));
        setTimeout(() => done(times.slice(1).map((t, i) => (t - times[i]) / 1000)), 1000 * seconds);"""
    return list(shown.driver.execute_async_script(script, seconds))


def _headline(shown: Browser) -> str:
    told = re.findall(r"(device time|updates) <b>(.*?)</b>", shown.header())
    return ", ".join(f"{name} {value}" for name, value in told)


def watching(folder: Path) -> None:
    topology = folder / "watched.yaml"
    topology.write_text(yaml.safe_dump(_WATCHED))
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    runs = folder / "runs"
    with _testbed(folder / "log", "up", topology, "--runs", runs) as up:
        eventually(lambda: "the run clock starts" in up.log.read_text(), seconds=120.0)
        (path,) = runs.iterdir()
        for turn in range(2 * _TURNS):
            watched = turn % 4 in (1, 2)  # without, with, with, without: a drift affects both equally
            with _watched(path, folder / f"{turn}.log") if watched else nullcontext():
                time.sleep(_SETTLE)
                begin = time.time()
                time.sleep(_TURN)
                spans[watched].append((begin, time.time()))
        up.process.terminate()
        up.process.wait()
    records = list(events.read(path / "events.jsonl"))
    (began,) = (each.wall_clock for each in records if isinstance(each, events.RunStarted))
    applied = [began + each.applied for each in records if isinstance(each, events.UpdateApplied)]
    rates = {
        watched: [sum(begin <= at < end for at in applied) / (end - begin) for begin, end in of]
        for watched, of in spans.items()
    }
    for without, with_page in zip(rates[False], rates[True], strict=True):
        print(f"updates/s without {without:.2f}, with a page {with_page:.2f}: {with_page / without:.3f}")
    without, with_page = (statistics.mean(rates[watched]) for watched in (False, True))
    errors = [statistics.stdev(of) / statistics.mean(of) / math.sqrt(len(of)) for of in rates.values()]
    print(f"all: {with_page / without:.4f}, standard error {math.hypot(*errors):.4f}")


@contextmanager
def _watched(run: Path, log: Path) -> Iterator[None]:
    """Serve a page of the run, and watch it."""
    with _testbed(log, "dashboard", run) as server:
        look = [sys.executable, "-m", "benchmarks.dashboard", server.url()]
        with subprocess.Popen(look, start_new_session=True):  # it ends with the page
            try:
                yield
            finally:
                server.process.terminate()


def visit(url: str) -> None:
    """Receive a page and its updates until its server ends."""
    serving.lower_priority()
    parts = urlsplit(url)
    arguments = {**dict(parse_qsl(parts.query)), "theme": "light"}
    session = None
    while session is None or not session.document.roots:  # the page is still being prepared
        time.sleep(1.0)
        session = pull_session(url=f"{parts.scheme}://{parts.netloc}{parts.path}", arguments=arguments)
    while session.connected:
        with suppress(RuntimeError):  # the connection was closed
            session.force_roundtrip()
            sent: Any = session.document.get_model_by_name("sent")
            sent.active = True  # this client does not apply what it receives
            sent.active = False  # as a browser that has drawn it
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class _Testbed:
    process: subprocess.Popen[str]
    log: Path

    def url(self) -> str:
        found: list[str] = eventually(lambda: re.findall(r"Dashboard: (\S+)", self.log.read_text()))
        return found[0]


@contextmanager
def _testbed(log: Path, *arguments: str | Path) -> Iterator[_Testbed]:
    """Run `testbed ARGUMENTS` in the background, with output to a file.

    It has a session of its own, apart from the browser's, as in a terminal: the kernel may divide the
    CPUs by session.
    """
    command = [sys.executable, "-m", "testbed", *map(str, arguments)]
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, text=True, start_new_session=True) as process,
    ):
        try:
            yield _Testbed(process, log)
        finally:
            if process.poll() is None:
                process.terminate()


def _pages(pid: int) -> list[psutil.Process]:
    return [c for c in psutil.Process(pid).children() if "testbed.dashboard.serving" in c.cmdline()]


def main() -> None:
    if sys.argv[-1].startswith("http"):
        visit(sys.argv[-1])
        return
    benchmarks: dict[str, Callable[[Path], None]] = {
        "page": page,
        "processes": partial(page, content=_PROCESSES),
        "watching": watching,
    }
    chosen = benchmarks.get(sys.argv[-1])
    if chosen is None:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        chosen(Path(folder))


if __name__ == "__main__":
    main()
