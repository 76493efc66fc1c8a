"""Machines on which the checks of a platform run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that has ended."""

    exit_code: int
    """124 if the timeout ended it."""
    output: str
    """Standard output and standard error, as they came."""
    seconds: float


class Machine(Protocol):
    """A machine with a checkout of the project, its Python environment and, perhaps, a Docker engine."""

    facts: Mapping[str, str]
    """Facts for the table: `engine`, `cgroup`, `driver`, `kernel`, `netem`, `python`, `architecture`,
    `cores`. Read from the machine itself."""
    slowness: float
    """Factor on all timeouts: 1 on this host, about 20 in a guest whose processor is emulated."""

    clone: Path | None
    """A clone of the project that was set up by `make`; None: there is none."""

    def run(self, command: str, *, timeout: float) -> Completed:
        """Run `command` (bash) as root in the checkout, with `testbed` and `python` on PATH, for at most
        `timeout` × `slowness` seconds."""
        ...
