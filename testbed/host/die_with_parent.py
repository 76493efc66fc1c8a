"""Start a program on its CPUs, to end with its parent, however that ends.

`python -I -S die_with_parent.py PARENT_PID CPUS -- PROGRAM ARGUMENT...` asks the kernel for SIGKILL at
the parent's death, takes the CPUs (a cpuset such as `0-2,5`) and becomes the program. Only Linux can do
either; elsewhere the program just runs, and `testbed down` has to end what a killed controller leaves.

The request belongs to the *thread* that started this process: start programs from one that lives as
long as the run. It outlives exec, except of set-user-ID programs.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def cpu_numbers(cpuset: str) -> set[int]:
    """The CPUs of a cpuset: `0-2,5` is {0, 1, 2, 5}; none of an empty one."""
    numbers: set[int] = set()
    for part in filter(None, cpuset.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def prefix(cpuset: str = "") -> list[str]:
    """Arguments to put before a command so that it ends with this process.

    It runs on the CPUs of `cpuset`, or on those of this process.
    Isolated and without site-packages: each start costs as little as possible.
    """
    cpuset = cpuset or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), cpuset, "--"]


def ask(parent: int) -> None:
    """Ask the kernel to end this process when its parent dies; end at once where that has happened."""
    import ctypes  # slow to import, so only where it is used

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        sys.exit("the controller ended before we began")


def main(parent: int, cpuset: str, command: list[str]) -> None:
    """Become `command`, or exit with 1 and the reason."""
    if sys.platform == "linux":
        ask(parent)
    try:
        if sys.platform == "linux":
            os.sched_setaffinity(0, cpu_numbers(cpuset))
        os.execvp(command[0], command)  # noqa: S606  # no shell is the point
    except OSError as error:
        sys.exit(f"cannot start {command[0]} on cpu {cpuset}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[4:])
