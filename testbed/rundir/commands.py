"""Users' commands to the controller of a running run, handed over as small files in a folder.

Whoever may write into the run's `work/` may give commands; it is closed to other users.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents import files
from testbed.errors import BadInputError, RunFailedError, TestbedError
from testbed.rundir.directory import RunDirectory

_ANSWER_TIMEOUT_SECONDS = 5.0


def send(run: RunDirectory, command: dict[str, Any]) -> None:
    """Have the run's controller carry out `command`. Raises BadInputError where it refuses or there is
    none, RunFailedError where it does not answer."""
    folder = run.orders
    if run.controller() is None or not folder.is_dir():
        raise BadInputError(f"{run.run} is not running. See: testbed runs")
    name = secrets.token_hex(8)
    command_file, answer_file = folder / f"{name}.order", folder / f"{name}.answer"
    with files.whole(command_file) as partial:
        partial.write_text(json.dumps(command), encoding="utf-8")
    deadline = time.monotonic() + _ANSWER_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            problem = json.loads(answer_file.read_text(encoding="utf-8"))
            answer_file.unlink()
            if problem is not None:
                raise BadInputError(problem)
            return
        time.sleep(0.02)
    with suppress(FileNotFoundError):
        command_file.unlink()
    raise RunFailedError(
        f"the controller of {run.run} does not answer: look at testbed logs {run.run} controller, or "
        f"end the run with testbed down {run.run}"
    )


class CommandFolder:
    """The controller's side: reads commands and writes the answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def serve(self, execute: Callable[[dict[str, Any]], None]) -> None:
        """Carry out the commands that have come. A TestbedError that `execute` raises is the answer."""
        with os.scandir(self._folder) as entries:
            commands = sorted(entry.path for entry in entries if entry.name.endswith(".order"))
        for path in map(Path, commands):
            problem = None
            try:
                execute(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue  # its sender has given up
            except TestbedError as error:
                problem = str(error)
            with files.whole(path.with_suffix(".answer")) as partial:
                partial.write_text(json.dumps(problem), encoding="utf-8")
                path.unlink(missing_ok=True)
