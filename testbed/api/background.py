"""Runs in the background. The controller is a separate process (`testbed.api.run_process`).

This way, signals, threads and the interpreter lock of the starting process do not affect the run. A
`tied` controller ends its run cleanly as soon as the process that started it ends, even if that process
was killed.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agents import events
from testbed.api.launching import Launch
from testbed.errors import BadInputError, RunFailedError, TestbedError
from testbed.host import run_module
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import RecordFollower, last_start

_TICK_SECONDS = 0.1
ERROR = "error: "
"""Beginning of the line that says why a command failed."""


def start(
    launch: Launch,
    directory: RunDirectory,
    report: Callable[[str], object] = lambda _: None,
    *,
    tied: bool = False,
) -> subprocess.Popen[bytes]:
    """Pass output lines to `report`, and return when the run clock starts.

    `tied`: whether the controller ends when this process ends. Raises TestbedError with the reason if
    the run ended before its clock started.
    """
    from testbed.runtimes.process import runtime  # here, because it imports the broker

    past = RecordFollower(directory.events).read()  # records of a resumed run
    started = [record for record in past if isinstance(record, events.RunStarted)]
    launch.write(directory)
    arguments = [str(directory.path), *(["tied"] if tied else [])]
    log = log_of(directory)
    with log.open("ab") as output, log.open(encoding="utf-8", errors="replace") as lines:
        lines.seek(0, os.SEEK_END)
        begin = output.tell()
        controller = subprocess.Popen(
            run_module.command("testbed.api.run_process", *arguments),
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_environment(), **runtime.environment(directory, "controller")},
            start_new_session=True,
        )
        try:
            code, fine = None, True
            while code is None and last_start(directory.events) in (None, *started):
                time.sleep(_TICK_SECONDS)
                code = controller.poll()
                for line in lines:
                    fine = fine and not line.startswith(ERROR)
                    if fine:  # the error is raised below instead
                        report(line.rstrip("\n"))
        except BaseException:
            end(controller, directory)
            raise
    if not tied:
        threading.Thread(target=controller.wait, daemon=True).start()  # reaps the controller
    if code:
        end(controller, directory)
        raise failure(directory, code, begin)
    return controller


def end(controller: subprocess.Popen[bytes], directory: RunDirectory) -> None:
    """Kill the controller if it takes too long to end its run."""
    from testbed.run import live_runs

    controller.terminate()
    try:
        controller.wait(live_runs.stop_timeout(directory))
    except subprocess.TimeoutExpired:
        controller.kill()
        controller.wait()
    if controller.stdin is not None:
        with suppress(OSError):
            controller.stdin.close()


def log_of(directory: RunDirectory) -> Path:
    return directory.logs / "controller.log"


def failure(directory: RunDirectory, code: int, begin: int = 0) -> TestbedError:
    """`begin`: byte at which this controller's part of the log begins."""
    with log_of(directory).open("rb") as file:
        file.seek(begin)
        printed = file.read().decode("utf-8", "replace")
    _, found, told = f"\n{printed}".rpartition(f"\n{ERROR}")
    why = told.strip() if found else f"its controller ended ({code}); see {log_of(directory)}"
    return (BadInputError if code == BadInputError.exit_code else RunFailedError)(why)


def _environment() -> dict[str, str]:
    """Without the variables that force coloured output. A Jupyter kernel sets them, and the log would
    contain colour codes."""
    forced = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    return {name: value for name, value in os.environ.items() if name not in forced}
