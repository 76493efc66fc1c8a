"""What the dashboard costs: the browser and its page for 1,000 devices, and the run that is watched.

    python -m benchmarks.dashboard page       # needs chromium and chromedriver
    python -m benchmarks.dashboard watching   # needs a Docker engine, and a quiet machine

`page`: a run of 1,000 devices in virtual time, that goes on; seconds until the page is drawn, seconds
between two updates of it, rows drawn, and the browser's and the server's memory, early and late.
`watching`: updates per second of the same run in containers, with a page that somebody looks at and
without, in turns; the ratio is what watching costs. Who looks takes in all that the page is sent and
draws nothing: a browser's drawing is its own machine's affair.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import psutil
import yaml
from bokeh.client import pull_session

from analysis.load import load
from testbed.dashboard import command
from tests import browser
from tests.browser import Browser, until

_DEVICES = 1000
_LOOK = 60.0
"""Seconds between the two looks at the page."""
_ROUNDS = 3
_PAGE = {
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
_WATCHED = {
    "name": "watched",
    "seed": 1,
    "task": {"name": "digits-logreg", "local": {"steps": 100, "batch_size": 32, "lr": 0.01}},
    "rule": {"name": "fedbuff", "buffer_size": 3},
    "devices": [{"name": "fast", "count": 2, "cpu": 0.25}, {"name": "slow", "count": 4, "cpu": 0.1}],
    "evaluate": {"every": "2s"},
    "stop": {"after": "60s"},
    "runtime": {"name": "docker"},
}


def page(folder: Path) -> None:
    topology = folder / "thousand.yaml"
    topology.write_text(yaml.safe_dump(_PAGE))
    with _running(topology, folder / "runs", "--dashboard") as up, browser.opened() as shown:
        url = up.url()
        (server,) = until(lambda: _pages(up.process.pid))
        print(f"first paint {shown.open(url):.1f} s")
        early = _look(shown, server)
        time.sleep(_LOOK)
        late = _look(shown, server)
        print(f"memory of the browser's page, {_LOOK:.0f} s apart: {early[0]:.0f} and {late[0]:.0f} MB")
        print(f"memory of the server: {early[1]:.0f} and {late[1]:.0f} MB")


def _look(shown: Browser, server: psutil.Process) -> tuple[float, float]:
    """Prints how often the page is brought up to date; MB of the browser's heap and of the server."""
    gaps = _gaps(shown, 10.0)
    rows = len(shown.column("devices-0", "devices", "y"))
    print(f"{_headline(shown)}: {rows} intervals drawn; updated every {statistics.median(gaps):.2f} s, "
          f"at the longest {max(gaps):.2f} s; server's CPU {server.cpu_percent(5.0):.0f}%")  # fmt: skip
    return shown.heap(), server.memory_info().rss / 1e6


def _gaps(shown: Browser, seconds: float) -> list[float]:
    """Seconds between changes of the header, told by the browser's own clock after drawing."""
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
    ratios = []
    for turn in range(_ROUNDS):
        order = (True, False) if turn % 2 else (False, True)  # what drifts falls on both
        rates = {
            watched: _rate(topology, folder / f"{turn}-{watched}", watched=watched) for watched in order
        }
        ratios.append(rates[True] / rates[False])
        print(f"updates/s without {rates[False]:.2f}, with a page {rates[True]:.2f}: {ratios[-1]:.3f}")
    print(f"median of {_ROUNDS}: {statistics.median(ratios):.3f}")


def visit(url: str) -> None:
    """Take in a page, and what is new in it, until its server ends."""
    command.give_way()
    parts = urlsplit(url)
    arguments = {**dict(parse_qsl(parts.query)), "theme": "light"}
    session = None
    while session is None or not session.document.roots:  # it is still being prepared
        time.sleep(1.0)
        session = pull_session(url=f"{parts.scheme}://{parts.netloc}{parts.path}", arguments=arguments)
    while session.connected:
        with suppress(RuntimeError):  # the connection was closed meanwhile
            session.force_roundtrip()
        time.sleep(0.2)


def _rate(topology: Path, runs: Path, *, watched: bool) -> float:
    """Updates per second of a whole run."""
    with _running(topology, runs, *(["--dashboard"] if watched else [])) as up, ExitStack() as stack:
        if watched:
            visitor = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.dashboard", up.url()], start_new_session=True
            )
            stack.callback(visitor.wait)  # the page's end is its own
        up.process.wait()
    (path,) = runs.iterdir()
    run = load(path)
    return len(run.updates) / run.duration


@dataclass(frozen=True, slots=True)
class _Up:
    process: subprocess.Popen[str]
    log: Path

    def url(self) -> str:
        found: list[str] = until(lambda: re.findall(r"Dashboard: (\S+)", self.log.read_text()))
        return found[0]


@contextmanager
def _running(topology: Path, runs: Path, *options: str) -> Iterator[_Up]:
    log = runs.with_suffix(".log")
    command = [sys.executable, "-m", "testbed", "up", str(topology), "--runs", str(runs), *options]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, text=True) as process:
        try:
            yield _Up(process, log)
        finally:
            if process.poll() is None:
                process.terminate()


def _pages(pid: int) -> list[psutil.Process]:
    return [c for c in psutil.Process(pid).children() if "dashboard" in c.cmdline()]


def main() -> None:
    if sys.argv[-1].startswith("http"):
        visit(sys.argv[-1])
        return
    chosen = {"page": page, "watching": watching}.get(sys.argv[-1])
    if chosen is None:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        chosen(Path(folder))


if __name__ == "__main__":
    main()
