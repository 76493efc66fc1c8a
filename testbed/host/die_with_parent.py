"""Start a program on its CPUs, to end with its parent, however that ends.

`python -I -S die_with_parent.py PARENT_PID CPUS -- PROGRAM ARGUMENT...` asks the kernel for SIGKILL at
the parent's death, takes the CPUs (such as `0,1,5`) and becomes the program. Only Linux can do either;
elsewhere the program just runs, and `testbed down` has to end what a killed controller leaves.

`setpriv --pdeathsig` would start 8 ms sooner, but needs util-linux 2.33, which is younger than the
oldest kernel we take (4.18), and does not notice a parent that ended before it began.

The request belongs to the *thread* that started this process: start programs from one that lives as
long as the run. It outlives exec, except of set-user-ID programs.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def prefix(cpuset: str = "") -> list[str]:
    """Arguments to put before a command so that it ends with this process.

    It runs on the CPUs of `cpuset`, or on those of this process.
    Isolated and without site-packages: each start costs as little as possible.
    """
    from testbed.host.cpusets import cpu_numbers  # which the program below does not find

    cpus = cpu_numbers(cpuset) or os.sched_getaffinity(0)
    numbers = ",".join(map(str, sorted(cpus)))
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), numbers, "--"]


def ask(parent: int) -> None:
    """Ask the kernel to end this process when its parent dies; end at once where that has happened."""
    import ctypes  # slow to import, so only where it is used

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        sys.exit("the controller ended before we began")


def main(parent: int, cpus: str, command: list[str]) -> None:
    """Become `command`, or exit with 1 and the reason."""
    if sys.platform == "linux":
        ask(parent)
    try:
        if sys.platform == "linux":
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        os.execvp(command[0], command)  # noqa: S606  # no shell is the point
    except OSError as error:
        sys.exit(f"cannot start {command[0]} on cpu {cpus}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[4:])
