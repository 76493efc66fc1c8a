"""Run a command that ends when its parent ends.

    python -m agents.device.bound PARENT_PID COMMAND ARGUMENT...

On a real device no container ends with its first process; if there is one, nothing outside it does.
This module needs only Python 3.9.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """The kernel kills this process when `parent` ends. If that has ended already, exit."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def end_with_input() -> None:
    """End this process, and with it its container, at the end of standard input: whoever has started the
    container has ended."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="standard input", daemon=True).start()


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  (the kernel's setting survives this)
