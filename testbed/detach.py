"""`testbed up -d`: the same controller in a process of its own, in the background."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agents import events
from testbed.errors import RunFailedError
from testbed.live import Follower
from testbed.rundir import RunDirectory
from testbed.up import Options


def start(directory: RunDirectory, topology: Path, options: Options, say: Callable[[str], None]) -> None:
    """Start the controller, and return when its run clock goes. Raises RunFailedError."""
    follower = Follower(directory.events)
    follower.read()  # a resumed run has a past
    log = directory.logs / "controller.log"
    with log.open("wb") as output:
        controller = subprocess.Popen(
            [sys.executable, "-m", "testbed", "up", *_arguments(directory, topology, options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_labels(directory)},
            start_new_session=True,
        )
    with log.open(encoding="utf-8") as lines:
        try:
            while not any(isinstance(r, events.RunStarted) for r in follower.read()):
                for line in lines:
                    say(line.rstrip("\n"))
                if controller.poll() is not None:
                    raise RunFailedError(f"the run did not start; see {log}")
                time.sleep(0.1)
        except KeyboardInterrupt:
            controller.terminate()
            controller.wait()
            raise


def _labels(directory: RunDirectory) -> dict[str, str]:
    """How `testbed ps` and `down` recognise a process of this run."""
    return {
        "TESTBED_RUN": directory.run,
        "TESTBED_PART": "controller",
        "TESTBED_DIRECTORY": str(directory.path),
    }


def _arguments(directory: RunDirectory, topology: Path, options: Options) -> list[str]:
    arguments = [str(topology.resolve()), "--directory", str(directory.path)]
    if options.resume:
        arguments = ["--resume", str(directory.path)]
    if options.runtime:
        arguments += ["--runtime", options.runtime]
    if options.oversubscribe:
        arguments.append("--oversubscribe")
    if options.data_root:
        arguments += ["--data", str(options.data_root.resolve())]
    return arguments
