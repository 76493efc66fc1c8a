"""Running `testbed` as a user does, and asking afterwards what is left of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import docker
import jsonschema
import psutil
import yaml

from agents import events
from analysis import manifest as manifests
from testbed.api.outputs import OUTPUTS, schema
from testbed.host import kernel
from testbed.runtimes.docker.specifications import RUN_LABEL
from testbed.runtimes.process import runtime
from tests import forked

TOPOLOGIES = Path(__file__).parent.parent / "topologies"
TESTBED = [sys.executable, "-m", "testbed"]
UNHURRIED = {"name": "fedfix", "period": "500ms"}
"""Rule whose clients wait for the next tick. With others, real devices, which nothing limits, take all
the time of a core."""


def cli(
    *arguments: str | Path, timeout: float = 900, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`testbed ARGUMENTS` to its end, forked (`tests.forked`)."""
    command, pipe = [*TESTBED, *map(str, arguments)], subprocess.PIPE
    with forked.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd=cwd
    ) as running:
        try:
            out, err = running.communicate(timeout=timeout)
        except BaseException:
            running.kill()
            raise
    return subprocess.CompletedProcess(command, running.returncode, out, err)


def children_running(parent: int, module: str) -> list[psutil.Process]:
    """Return the children of the process `parent` whose command names `module`."""
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):  # it has ended since they were listed
            if module in child.cmdline():
                found.append(child)
    return found


class Said(NamedTuple):
    """Result of `testbed ARGUMENTS`."""

    code: int
    out: str
    err: str


Testbed = Callable[..., Said]


def check_output(arguments: Sequence[str | Path], printed: str) -> Any:
    """Return the JSON that a command printed. It is as `testbed schema COMMAND` says."""
    names = (" ".join(map(str, arguments[:count])) for count in (2, 1))
    command = next(name for name in names if name in OUTPUTS)
    found = json.loads(printed)
    jsonschema.validate(found, schema(command))
    return found


@contextmanager
def started(
    *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`testbed ARGUMENTS` in the background, forked (`tests.forked`), and ended if it still lives when
    the test is over."""
    running = forked.Popen(
        [*TESTBED, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.terminate()
        try:
            running.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()


def until_printed(running: subprocess.Popen[str], text: str) -> None:
    """Read its output until a line contains `text`."""
    told(running, f"({re.escape(text)})")


def told(running: subprocess.Popen[str], pattern: str) -> str:
    """Read its output until a line has `pattern`; what that found."""
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        lines.append(line)
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"{pattern!r} was never printed:\n{''.join(lines)}")


def interrupt(running: subprocess.Popen[str]) -> tuple[float, str]:
    """Ctrl-C; the seconds until it had ended, and what it still printed."""
    begin = time.monotonic()
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=180)
    return time.monotonic() - begin, output


def write_topology(path: Path, base: str = "quickstart", **changes: Any) -> Path:
    """`topologies/<base>.yaml` with top-level entries replaced, as a file in the folder `path`."""
    topology = yaml.safe_load((TOPOLOGIES / f"{base}.yaml").read_text())
    topology.update(changes)
    file = path / "topology.yaml"
    file.write_text(yaml.safe_dump(topology))
    return file


def write_small_topology(path: Path, **changes: Any) -> Path:
    """The quickstart with two devices: ready in a moment."""
    devices = [{"name": "fast", "cpu": 0.3}, {"name": "slow", "cpu": 0.1}]
    return write_topology(path, **{"devices": devices, **changes})


@dataclass(frozen=True)
class Finished:
    """A run directory as the tests look at it."""

    path: Path
    records: list[events.Record]

    @classmethod
    def only_one_in(cls, runs: Path) -> Finished:
        (path,) = runs.iterdir()
        return cls(path, list(events.read(path / "events.jsonl")))

    @property
    def updates(self) -> list[events.UpdateApplied]:
        return [r for r in self.records if isinstance(r, events.UpdateApplied)]

    @property
    def best_accuracy(self) -> float:
        return max(r.accuracy for r in self.records if isinstance(r, events.Evaluated))

    @property
    def manifest(self) -> dict[str, Any]:
        return manifests.read(self.path / "manifest.json")

    @property
    def telemetry(self) -> list[dict[str, Any]]:
        lines = (self.path / "telemetry.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "device" in line]

    def of_group(self, group: str) -> list[events.UpdateApplied]:
        devices = self.manifest["devices"]
        return [u for u in self.updates if devices[u.client]["group"] == group]


def run_to_its_end(topology: Path, runtime: str, *options: str | Path) -> Finished:
    """`testbed up`, with its runs beside the topology."""
    runs = topology.parent / "runs"
    done = cli("up", topology, "--runtime", runtime, "--runs", runs, *options, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished.only_one_in(runs)


def left_in_docker(engine: docker.DockerClient, run: str) -> list[str]:
    """Names of all containers and networks that carry the label of `run`, and of its control groups:
    there may be other runs on the engine."""
    filters = {"label": f"{RUN_LABEL}={run}"}
    containers = engine.api.containers(all=True, filters=filters)
    networks = engine.api.networks(filters=filters)
    groups = sorted({folder.name for folder in kernel.cgroup_folders(run)})
    return [c["Names"][0] for c in containers] + [n["Name"] for n in networks] + groups


def left_as_processes(run: str) -> list[str]:
    """Every process of this user that belongs to `run`."""
    return [str(info) for info in runtime.find() if info.run == run]
