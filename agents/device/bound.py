"""Run a command that ends when its parent ends.

    python -m agents.device.bound PARENT_PID COMMAND ARGUMENT...

On a real device no container ends with its first process. This module needs only Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the process `parent` ends. If `parent` has ended already,
    exit."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  (the kernel's setting survives this)
