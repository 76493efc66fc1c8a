"""`python -m testbed.tracking NAME RUN_DIRECTORY [model]`: send a run to a tracker until the run is
over.

Prints where the run is found. If it fails, it exits with 1, and the last line is the reason.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from testbed import tracking
from testbed.rundir.directory import RunDirectory
from testbed.tracking.following import follow

_NICE = 10
"""Below a run in real time."""


def main(name: str, run: str, *more: str) -> int:
    """`more`: `model` to send the final model, too."""
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
