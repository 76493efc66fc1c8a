"""`python -m testbed.tracking NAME RUN_DIRECTORY [model]`: tell a tracker of a run until that is over.

Prints where to find it, or ends with 1 and the reason as the last line of its output.
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
"""A run in real time goes first."""


def main(name: str, run: str, *more: str) -> int:
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
