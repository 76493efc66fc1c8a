"""`testbed up -d`: the same controller in a process of its own, in the background."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from agents import events
from testbed.host import run_module
from testbed.run.up import Options
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import Follower
from testbed.runtimes import process


def start(
    directory: RunDirectory, topology: Path, options: Options, report: Callable[[str], None]
) -> int:
    """Start the controller, and pass its lines to `report` until the run clock goes.

    Returns 0 then, and the controller's exit code where it ended before: it reports errors itself.
    """
    follower = Follower(directory.events)
    follower.read()  # a resumed run has a past
    log = directory.logs / "controller.log"
    with log.open("ab") as output, log.open(encoding="utf-8", errors="replace") as lines:
        lines.seek(0, os.SEEK_END)
        controller = subprocess.Popen(
            run_module.command("testbed", "up", *_arguments(directory, topology, options)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **process.environment(directory, "controller")},
            start_new_session=True,
        )
        try:
            code = None
            while code is None and not any(isinstance(r, events.RunStarted) for r in follower.read()):
                time.sleep(0.1)
                code = controller.poll()
                for line in lines:
                    report(line.rstrip("\n"))
        except KeyboardInterrupt:
            controller.terminate()
            controller.wait()
            raise
    return code or 0


def _arguments(directory: RunDirectory, topology: Path, options: Options) -> list[str]:
    arguments = ["--directory", str(directory.path)]
    arguments += ["--resume", directory.run] if options.resume else [str(topology.resolve())]
    if options.runtime:
        arguments += ["--runtime", options.runtime]
    if options.oversubscribe:
        arguments.append("--oversubscribe")
    if options.data_root:
        arguments += ["--data", str(options.data_root.resolve())]
    if options.dashboard is not None:
        arguments += ["--dashboard", "--port", str(options.dashboard)]
    if options.verbose:
        arguments.append("--verbose")
    if options.metrics is not None:
        arguments += ["--metrics-port", str(options.metrics)]
    return arguments
