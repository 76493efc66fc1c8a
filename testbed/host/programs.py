"""Start of programs: modules of the testbed, and programs that end when their parent ends, for whatever
reason.

`python -P programs.py MODULE ARGUMENT...` runs a module of the testbed. Unlike `python -m`, the new
process always imports the modules of the package that started it, even if the package is inside a wheel
(`testbed.bundle`). Folders called `agents` or `testbed` in the working directory are ignored (-P).

`python -I -S programs.py PARENT_PID CPUS -- PROGRAM ARGUMENT...` asks the kernel for SIGKILL at the
parent's death, restricts itself to the CPUs (such as `0,1,5`), and executes the program. This needs
Linux. On other systems, the program may outlive its parent, and `testbed down` must end the programs of
a killed controller.

`setpriv --pdeathsig` would start 8 ms faster. But it needs util-linux 2.33, which is newer than our
oldest kernel (4.18), and if the parent ends before `setpriv` starts, `setpriv` does not notice.

The kernel acts on the end of the *thread* that started this process. So start programs from a thread
that lives as long as the run. The request survives exec, except for set-user-ID programs.
"""

from __future__ import annotations

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def command(module: str, *arguments: str) -> list[str]:
    """`module`: dotted name. For a package, the command runs its module `__main__`."""
    return [sys.executable, "-P", __file__, module, *arguments]


def run_module() -> None:
    """Run the module that `sys.argv` names."""
    import importlib.util  # here, because `command` does not need these modules
    import runpy
    from pathlib import Path

    package = Path(__file__).parents[1]
    found = importlib.util.find_spec("testbed")
    if found is None or found.origin is None or Path(found.origin).parent != package:
        sys.path.insert(0, str(package.parent))
    importlib.import_module("testbed")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def tied_prefix(cpuset: str = "") -> list[str]:
    """Arguments to put before a command so that it ends when this process ends.

    The command runs on the CPUs of `cpuset`, or on the CPUs of this process if `cpuset` is empty. Python
    is started isolated and without site-packages, because that is fast.
    """
    from testbed.host.cpus import cpu_numbers  # not at the top: the isolated program cannot find it

    cpus = cpu_numbers(cpuset) or os.sched_getaffinity(0)
    numbers = ",".join(map(str, sorted(cpus)))
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), numbers, "--"]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. If the parent is already dead, exit
    now."""
    import ctypes  # here, because the import is slow

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        sys.exit("the controller ended before this process started")


def execute_tied(parent: int, cpus: str, command: list[str]) -> None:
    """If that fails, print the reason and exit with code 1."""
    if sys.platform == "linux":
        die_with_parent(parent)
    try:
        if sys.platform == "linux":
            os.sched_setaffinity(0, map(int, cpus.split(",")))
        os.execvp(command[0], command)  # noqa: S606  # no shell is the point
    except OSError as error:
        sys.exit(f"cannot start {command[0]} on cpu {cpus}: {error.strerror}")


if __name__ == "__main__":
    if sys.flags.isolated:
        execute_tied(int(sys.argv[1]), sys.argv[2], sys.argv[4:])
    else:
        run_module()
