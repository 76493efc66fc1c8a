"""Time, CPU time and memory until devices are ready, compared with bare containers.

    python -m benchmarks.startup [--runtime docker] [--devices 20 100]

Ours is a run of `testbed up` with logistic regression on scikit-learn's digits: seconds from the launch
until all devices are ready; CPU seconds per device until then (in `docker` its container's, init
included); and the largest decrease of the host's available memory, divided by the number of devices, so
broker, aggregator and the engine's needs are included. In `docker` the same number of bare containers of
the same image follows, two at a time as ours, without network: they only import torch, all of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_TOPOLOGY = """
    name: startup
    task:
      name: digits-logreg
      partition: {{scheme: resampled}}
      local: {{steps: 1, batch_size: 1, lr: 0.01}}
    rule: {{name: fedbuff, buffer_size: 1}}
    devices:
      - {{name: device, count: {devices}, cpu: 0.01, think: {{distribution: constant, value: 1h}}}}
    dilation: auto
    start: {{timeout: 10min}}
    evaluate: {{every: 1h}}
    stop: {{after: 2s}}
"""
_AT_ONCE = 2
"""Number of bare containers that are started at once."""
_BARE = """
import resource, time
import torch
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, flush=True)
time.sleep(600)
"""


@dataclass(slots=True)
class Memory:
    """Largest decrease of available memory since the beginning, in bytes."""

    taken: int = 0


@contextmanager
def watched() -> Iterator[Memory]:
    """Watch the host's memory within the context."""
    found, over = Memory(), threading.Event()
    before = psutil.virtual_memory().available

    def watch() -> None:
        while not over.wait(0.1):
            found.taken = max(found.taken, before - psutil.virtual_memory().available)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def ours(devices: int, runtime: str) -> tuple[float, float, float, str | None]:
    """Measure a run: seconds, CPU seconds per device (median), MB per device, and the agents' image
    (None if it has none). Raises RuntimeError, with the run's output, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "startup.yaml"
        topology.write_text(textwrap.dedent(_TOPOLOGY.format(devices=devices)))
        command = [sys.executable, "-m", "testbed", "up", str(topology), "--oversubscribe"]
        command += ["--runtime", runtime, "--runs", folder]
        with watched() as memory:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the run of {devices} devices failed:\n{done.stdout}{done.stderr}")
        (run,) = (path.parent for path in Path(folder).glob("*/manifest.json"))
        manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
        used: dict[str, float] = {}
        for line in (run / "telemetry.jsonl").read_text().splitlines():
            sample = json.loads(line)
            if "cpu" in sample:
                used[sample["device"]] = sample["cpu"]
        timings = manifest["timings"]
        image = manifest.get("images", {}).get("agent")
        spent = statistics.median(used.values())
        return timings["launch"] + timings["ready"], spent, memory.taken / devices / 1e6, image


def bare(devices: int, image: str) -> tuple[float, float, float]:
    """Measure the same for containers that only import torch."""
    from testbed.host import docker_engine

    with closing(docker_engine.connect()) as engine, watched() as memory:
        containers = []

        def start(_: int) -> None:
            containers.append(
                engine.containers.run(
                    image, ["-c", _BARE], entrypoint="python3", network_mode="none", detach=True
                )
            )

        try:
            begin = time.perf_counter()
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(start, range(devices)))
            spent = [float(next(iter(one.logs(stream=True)))) for one in containers]
            seconds = time.perf_counter() - begin
        finally:
            for one in containers:
                one.remove(force=True)
    return seconds, statistics.median(spent), memory.taken / devices / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup")
    parser.add_argument("--runtime", default="docker", choices=("docker", "process"))
    parser.add_argument("--devices", type=int, nargs="+", default=[20, 100])
    options = parser.parse_args()
    print(f"{'devices':>8}  {'':<8}{'ready s':>9}{'CPU s each':>12}{'MB each':>9}")
    for devices in options.devices:
        *found, image = ours(devices, options.runtime)
        _print(devices, options.runtime, found)
        if image is not None:
            least = bare(devices, image)
            _print(devices, "bare", least)
            _print(devices, "ratio", [own / other for own, other in zip(found, least, strict=True)])


def _print(devices: int, name: str, found: Sequence[float]) -> None:
    seconds, cpu, memory = found
    print(f"{devices:>8}  {name:<8}{seconds:>9.2f}{cpu:>12.2f}{memory:>9.4g}", flush=True)


if __name__ == "__main__":
    main()
