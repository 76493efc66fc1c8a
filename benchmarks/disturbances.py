"""Verdicts under disturbances: the same run in containers again and again, with other work beside it.

    python -m benchmarks.disturbances [COUNT]

COUNT runs (70) of some seconds, in random order; two of seven are undisturbed. For each kind of
disturbance the table shows the median training time of a step relative to the undisturbed runs, the
worst CPU share, and the verdicts. A verdict is wrong if a run whose training time changed by 10 % is
valid, or if an undisturbed run is not valid. Needs a Docker engine, at least two cores, and a quiet
machine for a quarter of an hour. A line of JSON per run goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import docker
import numpy as np
import pandas as pd
import yaml
from docker.errors import APIError
from docker.models.containers import Container

from analysis import summary
from analysis.load import Run, load
from testbed.host.programs import tied_prefix
from testbed.run import preparing
from testbed.run.options import Options
from testbed.runtimes.docker.specifications import RUN_LABEL

_MOVED = 0.1
_COUNT, _SECONDS = 70, 8
_TOPOLOGY = {
    "name": "disturbed",
    "seed": 1,
    "task": {"name": "digits-logreg", "local": {"steps": 200, "batch_size": 32, "lr": 0.01}},
    "rule": {"name": "fedbuff", "buffer_size": 3},
    "devices": [
        {"name": "fast", "count": 2, "cpu": 0.25},
        {"name": "medium", "count": 2, "cpu": 0.12},
        {"name": "slow", "count": 2, "cpu": 0.05},
    ],
    "stop": {"after": f"{_SECONDS}s"},
}
_BUSY = "while True: pass"
_COPIES = "import numpy as n\na = n.ones(1 << 23)\nb = a.copy()\nwhile True: n.copyto(b, a)"
_DISK = (
    "import os\nblock = bytes(1 << 22)\nwhile True:\n"
    " f = open('{file}', 'wb', 0)\n for _ in range(16): f.write(block); os.fsync(f.fileno())"
)


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of a run, as cpusets."""

    devices: str
    others: str


Disturbance = Callable[[Cores, random.Random, Path], contextlib.AbstractContextManager[None]]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    rng = random.Random(0)  # noqa: S311
    undisturbed = max(1, count * 2 // 7)
    kinds = [name for name in DISTURBANCES if name != "nothing"]
    plan = ["nothing"] * undisturbed + [kinds[n % len(kinds)] for n in range(count - undisturbed)]
    rng.shuffle(plan)
    found: list[tuple[str, Run]] = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "disturbed.yaml"
        path.write_text(yaml.safe_dump(_TOPOLOGY), encoding="utf-8")
        _, planned = preparing.plan_file(path, Options(runtime="docker"))
        cores = Cores(planned.device_cpus, planned.infrastructure_cpus)
        for kind in plan:
            found.append((kind, _run(path, DISTURBANCES[kind], cores, rng)))
            print(json.dumps(_facts(*found[-1])), file=sys.stderr, flush=True)
        for line in table(found):
            print(line)


def _run(path: Path, disturbance: Disturbance, cores: Cores, rng: random.Random) -> Run:
    """Run `testbed up` beside `disturbance`."""
    runs = Path(tempfile.mkdtemp(dir=path.parent))
    with disturbance(cores, rng, runs):
        command = [sys.executable, "-m", "testbed", "up", str(path), "--runtime", "docker"]
        subprocess.run([*command, "--runs", str(runs)], check=True, stdout=subprocess.DEVNULL)
    (manifest,) = runs.glob("*/manifest.json")
    return load(manifest.parent)


@contextlib.contextmanager
def nothing(_cores: Cores, _rng: random.Random, _folder: Path) -> Iterator[None]:
    yield


def programs(source: str, where: str) -> Disturbance:
    """Make a disturbance: one to three Python programs on the cores that `where` names."""

    @contextlib.contextmanager
    def disturbance(cores: Cores, rng: random.Random, folder: Path) -> Iterator[None]:
        cpus = {"devices": cores.devices, "others": cores.others, "all": ""}[where]
        delay = rng.choice((0.0, rng.uniform(3.0, 9.0)))  # before the run, or during it
        code = f"import time; time.sleep({delay})\n" + source.replace("{file}", str(folder / "ballast"))
        command = [*tied_prefix(cpus), sys.executable, "-c", code]
        running = [subprocess.Popen(command) for _ in range(rng.randint(1, 3))]
        try:
            yield
        finally:
            for program in running:
                program.kill()
                program.wait()

    return disturbance


@contextlib.contextmanager
def second_run(cores: Cores, rng: random.Random, folder: Path) -> Iterator[None]:
    """Run the same topology in local processes."""
    del cores, rng
    path = folder.parent / "disturbed.yaml"
    command = [sys.executable, "-m", "testbed", "up", str(path), "--runtime", "process"]
    runs = folder.with_name(folder.name + "-second")
    beside = subprocess.Popen([*command, "--runs", str(runs)], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        beside.send_signal(signal.SIGINT)
        beside.wait()


@contextlib.contextmanager
def suspended(cores: Cores, rng: random.Random, folder: Path) -> Iterator[None]:
    """Suspend all containers and the controller for 3 s of the run, while the clock continues.

    This replaces a real suspension of the host, which is not possible here.
    """
    del cores
    freezer = threading.Thread(target=_stand_still, args=(folder, rng.uniform(1.0, 4.0), 3.0))
    freezer.start()
    yield
    freezer.join()


def _stand_still(folder: Path, after: float, seconds: float) -> None:
    """Suspend everything for `seconds`, `after` seconds into the run in `folder`."""
    while not any(path.stat().st_size for path in folder.glob("*/events.jsonl")):
        time.sleep(0.05)
    time.sleep(after)
    (run,) = (path.parent for path in folder.glob("*/events.jsonl"))
    controller = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["controller"]["pid"]
    engine = docker.from_env()
    os.kill(controller, signal.SIGSTOP)
    try:
        containers = engine.containers.list(filters={"label": f"{RUN_LABEL}={run.name}"})
        for act in (Container.pause, Container.unpause):
            for one in containers:
                with contextlib.suppress(APIError):  # the container has ended
                    act(one)
            time.sleep(seconds if act is Container.pause else 0.0)
    finally:
        os.kill(controller, signal.SIGCONT)


DISTURBANCES: dict[str, Disturbance] = {
    "nothing": nothing,
    "busy loops on the devices' cores": programs(_BUSY, "devices"),
    "busy loops on the other cores": programs(_BUSY, "others"),
    "busy loops on all cores": programs(_BUSY, "all"),
    "copies of 64 MB on the devices' cores": programs(_COPIES, "devices"),
    "copies of 64 MB on the other cores": programs(_COPIES, "others"),
    "writing and syncing the disk": programs(_DISK, "all"),
    "a second run, in processes": second_run,
    "all stands still for 3 s": suspended,
}


def table(found: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """Yield Markdown: one row per disturbance, then the wrong verdicts."""
    paces = [_log_pace(run) for _, run in found]
    normal = pd.concat([pace for (kind, _), pace in zip(found, paces, strict=True) if kind == "nothing"])
    usual = normal.groupby(level=0).mean()
    moved = [float(np.exp((pace - usual).mean())) for pace in paces]
    yield "| beside | runs | median time of a step | worst share off | verdicts |"
    yield "|---|---|---|---|---|"
    for kind in DISTURBANCES:
        own = [n for n, (other, _) in enumerate(found) if other == kind]
        if not own:
            continue
        errors = [_worst_share(found[n][1]) for n in own]
        verdicts = summary.verdicts(found[n][1] for n in own)
        told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        times = f"{min(moved[n] for n in own):.2f} to {max(moved[n] for n in own):.2f} times"
        shares = f"{min(errors):.1f} to {max(errors):.1f} %"
        yield f"| {kind} | {len(own)} | {times} | {shares} | {told} |"
    verdicts_and = [
        (kind, summary.verdict(run), ratio) for (kind, run), ratio in zip(found, moved, strict=True)
    ]
    strong = [(kind, verdict) for kind, verdict, ratio in verdicts_and if abs(ratio - 1) >= _MOVED]
    believed = sum(verdict == "valid" for kind, verdict in strong)
    accused = sum(verdict == "not valid" for kind, verdict, _ in verdicts_and if kind == "nothing")
    yield ""
    yield f"Moved by {_MOVED:.0%} or more: {len(strong)} runs, of which {believed} valid."
    yield f"Undisturbed and not valid: {accused}."


def _log_pace(run: Run) -> pd.Series[float]:
    """Logarithm of each device's median time of a step."""
    updates = run.updates
    pace = (updates["train_end"] - updates["train_start"]) / updates["steps"]
    return pace.groupby(updates["client"]).median().map(np.log)


def _worst_share(run: Run) -> float:
    """Largest deviation of a device's CPU share, in per cent."""
    devices = json.loads((run.path / "fidelity.json").read_text(encoding="utf-8"))["devices"]
    return max((abs(one["cpu"]["error"] or 0.0) for one in devices.values()), default=0.0)


def _facts(kind: str, run: Run) -> dict[str, object]:
    return {
        "beside": kind,
        "step_ms": round(1e3 * float(np.exp(_log_pace(run).mean())), 4),
        "worst_share": _worst_share(run),
        "verdict": summary.verdict(run),
        "reasons": run.manifest["validity"]["reasons"],
        "host_load": run.manifest["host_load"],
    }


if __name__ == "__main__":
    main()
