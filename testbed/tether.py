"""Start a program that ends with its parent, however that ends.

`python -I -S tether.py PARENT_PID -- PROGRAM ARGUMENT...` asks the kernel for SIGKILL at the parent's
death and becomes the program. Only Linux can do that; elsewhere the program just runs, and
`testbed down` has to end what a killed controller leaves behind.

The request belongs to the *thread* that started us: start programs from one that lives as long as the
run. It outlives exec, except of set-user-ID programs.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def main(parent: int, command: list[str]) -> None:
    """Become `command`; on failure exit with the shell's codes for that."""
    if sys.platform == "linux":
        import ctypes  # slow to import, so only where it is used

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        if os.getppid() != parent:  # it ended before we asked
            sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606  # no shell is the point
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3:])
