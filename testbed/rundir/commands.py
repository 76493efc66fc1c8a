"""Users' commands to the controller of a live run, passed as small files in a folder.

Any user who may write into the run's `work/` may give commands. Other users have no access to that
folder.
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

from agents.disk import files
from testbed.errors import BadInputError, RunFailedError, TestbedError
from testbed.rundir.directory import RunDirectory
from testbed.traits import is_simulated

_ANSWER_TIMEOUT_SECONDS = 30.0
"""Limit for the answer to each command."""
_LOOK_SECONDS = 0.02


def send(run: RunDirectory, *orders: dict[str, Any]) -> None:
    """Carry out `orders` one after the other.

    Raises BadInputError if the run cannot take orders, or if the controller refuses an order. If an
    order is refused, the other orders are still carried out. Raises RunFailedError if the controller
    does not answer.
    """
    folder = run.orders
    if run.controller() is None:
        raise BadInputError(f"{run.run} is not running. See: testbed runs")
    if is_simulated(run.read_manifest().get("runtime")):
        raise BadInputError(f"{run.run} is in virtual time, where only the scenario changes devices")
    if not folder.is_dir():
        raise BadInputError(f"{run.run} has not started its devices yet: repeat the command later")
    sender = secrets.token_hex(8)
    waiting = {folder / f"{sender}-{place:06}.order": order for place, order in enumerate(orders)}
    for path, order in waiting.items():
        with files.atomic_write(path) as partial:
            partial.write_text(json.dumps(order), encoding="utf-8")
    try:
        answers = [_await_answer(path.with_suffix(".answer")) for path in waiting]
    except TimeoutError:
        for path in waiting:
            path.unlink(missing_ok=True)
        raise RunFailedError(
            f"the controller of {run.run} does not answer: see testbed logs {run.run} controller, or "
            f"end the run with testbed down {run.run}"
        ) from None
    if problem := next(filter(None, answers), None):
        raise BadInputError(problem)


def _await_answer(path: Path) -> str | None:
    """Return the reason why the order failed; None if it was carried out. Raises TimeoutError."""
    deadline = time.monotonic() + _ANSWER_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            problem: str | None = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
            return problem
        time.sleep(_LOOK_SECONDS)
    raise TimeoutError


class CommandFolder:
    """The controller's side of the folder: reads commands and writes answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def serve(self, execute: Callable[[dict[str, Any]], None]) -> None:
        """If `execute` raises a TestbedError, the answer to the command is the message of that error."""
        with os.scandir(self._folder) as entries:
            commands = sorted(entry.path for entry in entries if entry.name.endswith(".order"))
        for path in map(Path, commands):
            problem = None
            try:
                execute(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue  # its sender has withdrawn it
            except TestbedError as error:
                problem = str(error)
            with files.atomic_write(path.with_suffix(".answer")) as partial:
                partial.write_text(json.dumps(problem), encoding="utf-8")
                path.unlink(missing_ok=True)
