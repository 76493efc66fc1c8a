"""Check that memory stays flat over a million updates in virtual time.

    python -m benchmarks.soak [UPDATES]

Twenty devices of four speeds, two of which come and go. After each tenth of the updates it prints the
seconds and the memory of the process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import psutil

from agents import events
from testbed import topology
from testbed.run import preparing, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.view import View

_TOPOLOGY = """
name: soak
seed: 1
task: {{name: quadratic, centers: {centers}, local: {{steps: 1, lr: 0.4}}}}
rule: {{name: fedbuff, buffer_size: 4, server_lr: 0.01}}
devices:
  - {{name: fast, count: 5, timing: 50ms}}
  - {{name: medium, count: 5, timing: 100ms}}
  - {{name: slow, count: 8, timing: 200ms, link: {{up: 1mbit, down: 5mbit, rtt: 20ms}}}}
  - name: bus
    count: 2
    timing: 400ms
    availability: {{on: {{distribution: exponential, mean: 40s}}, off: 10s}}
evaluate: {{every: 60s}}
stop: {{updates: {updates}}}
runtime: {{name: virtual}}
"""


class _Memory(View):
    def __init__(self, updates: int) -> None:
        self._every, self._count, self._begin = max(1, updates // 10), 0, time.monotonic()

    def record(self, record: events.Record) -> None:
        if isinstance(record, events.UpdateApplied):
            self._count += 1
            if self._count % self._every == 0:
                memory = psutil.Process().memory_info().rss / 1e6
                passed = time.monotonic() - self._begin
                print(f"{self._count:>10,}{passed:>7.0f}{memory:>8.1f}", flush=True)


def main() -> None:
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    text = _TOPOLOGY.format(centers=[[float(number)] for number in range(20)], updates=updates)
    options = Options(runtime="virtual")
    with tempfile.TemporaryDirectory() as folder:
        parsed = topology.parse(text, "soak")
        plan = preparing.plan_topology(parsed, options)
        directory = RunDirectory.create(Path(folder), "soak")
        print(f"{'updates':>10}{'s':>7}{'MB':>8}")
        up.run(parsed, plan, directory, options, _Memory(updates))


if __name__ == "__main__":
    main()
