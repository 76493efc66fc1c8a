"""`python -m testbed.tracking NAME RUN_DIRECTORY [model]`: send a run to a tracker until the run is
over.

The program prints where the run is found. If it fails, it exits with 1 and prints the reason as the last
line.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from testbed import tracking
from testbed.rundir.directory import RunDirectory
from testbed.tracking.follow import follow

_NICE = 10
"""Niceness of this process, so that a run in real time has priority."""


def main(name: str, run: str, *more: str) -> int:
    """Follow the run in the directory `run`, and return the exit code. If `more` contains `model`, also
    send the final model."""
    with suppress(OSError):
        os.nice(_NICE)
    path = Path(run)
    try:
        where = follow(RunDirectory(path), tracking.tracker(name, path), model="model" in more)
    except Exception as error:  # noqa: BLE001  # a tracker may raise anything
        traceback.print_exc()
        sys.stderr.write(f"{type(error).__name__}: {error}".splitlines()[0] + "\n")
        return 1
    sys.stdout.write(f"{where}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
