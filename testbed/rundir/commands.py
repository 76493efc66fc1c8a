"""How a user's command reaches the controller of a run that goes on: a folder of small files.

Whoever may write into the run's `work/` may give orders; it is closed to other users.
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

_PATIENCE = 5.0
"""Seconds until the controller must have answered."""


def send(run: RunDirectory, order: dict[str, Any]) -> None:
    """Have the run's controller do `order`. Raises BadInputError where it refuses or there is none,
    RunFailedError where it does not answer."""
    folder = run.orders
    if run.controller() is None or not folder.is_dir():
        raise BadInputError(f"{run.run} is not running. See: testbed runs")
    name = secrets.token_hex(8)
    order_file, answer_file = folder / f"{name}.order", folder / f"{name}.answer"
    with files.whole(order_file) as partial:
        partial.write_text(json.dumps(order), encoding="utf-8")
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            problem = json.loads(answer_file.read_text(encoding="utf-8"))
            answer_file.unlink()
            if problem is not None:
                raise BadInputError(problem)
            return
        time.sleep(0.02)
    with suppress(FileNotFoundError):
        order_file.unlink()
    raise RunFailedError(f"the controller of {run.run} does not answer.")


class Mailbox:
    """The controller's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def serve(self, obey: Callable[[dict[str, Any]], None]) -> None:
        """Obey what has come. `obey` may raise TestbedError: whoever gave the order is told."""
        with os.scandir(self._folder) as entries:
            orders = sorted(entry.path for entry in entries if entry.name.endswith(".order"))
        for path in map(Path, orders):
            problem = None
            try:
                obey(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue  # its sender has given up
            except TestbedError as error:
                problem = str(error)
            with files.whole(path.with_suffix(".answer")) as partial:
                partial.write_text(json.dumps(problem), encoding="utf-8")
                path.unlink(missing_ok=True)
