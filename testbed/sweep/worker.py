"""Runs cells of a sweep, one after the other: in the sweep's process, or as one of several workers.

A worker (`python -m testbed.sweep.worker`) reads an order per line from standard input, JSON with
`directory` (a run directory with its topology in it) and `data` (folder of datasets, or null), runs it
in virtual time, and answers with a line: what `execute` returns. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents import events
from testbed.errors import TestbedError
from testbed.fidelity.validity import Judgement
from testbed.host.signals import interrupting
from testbed.plan import Plan
from testbed.run import up
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology
from testbed.view import View


class _Watcher(View):
    """Keeps what a line about the run says."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.evaluation: events.Evaluated | None = None
        self.doubts: list[str] = []

    def progress(self, message: str) -> None:
        self._report(message)

    def record(self, record: events.Record) -> None:
        if isinstance(record, events.Evaluated):
            self.evaluation = record

    def judged(self, judgement: Judgement) -> None:
        self.doubts = list(judgement.validity.reasons)


def execute(
    topology: Topology,
    plan: Plan,
    directory: RunDirectory,
    options: up.Options,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Run it: `outcome`, `seconds` of wall time, `accuracy` and `loss` of the last evaluation, and
    `doubts`, why the run is not valid; or the outcome `failed`, and the `error`."""
    watcher = _Watcher(report)
    begin = time.monotonic()
    try:
        ended = up.run(topology, plan, directory, options, watcher)
    except (TestbedError, OSError) as error:
        return {"outcome": "failed", "error": str(error)}
    last = watcher.evaluation
    return {
        "outcome": ended.reason,
        "doubts": watcher.doubts,
        "seconds": round(time.monotonic() - begin, 2),
        "accuracy": None if last is None else last.accuracy,
        "loss": None if last is None else last.loss,
    }


def _obey(order: dict[str, Any]) -> dict[str, Any]:
    directory = RunDirectory(Path(order["directory"]))
    data = None if order["data"] is None else Path(order["data"])
    options = up.Options("virtual", data_root=data)
    try:
        topology, plan = up.planned(directory.topology, options)
    except TestbedError as error:
        return {"outcome": "failed", "error": str(error)}
    return execute(topology, plan, directory, options, lambda _: None)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        with interrupting():
            for line in iter(sys.stdin.readline, ""):
                answers.write(json.dumps(_obey(json.loads(line))) + "\n")
                answers.flush()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
