"""Entry point of the command `testbed` and of `python -m testbed`."""

from __future__ import annotations

import atexit
import os
import sys
import threading

_INTERRUPTED = 130


def main() -> None:
    """Ctrl-C ends the command line with exit code 130, even while modules are still being imported."""
    _open_closed_streams()
    try:
        from testbed.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    try:
        run()
    finally:
        if isinstance(end := sys.exception(), SystemExit) and end.code == _INTERRUPTED:
            _end_hanging_threads()


def _end_hanging_threads() -> None:
    """Exit if there is a thread for which Python would wait: own code may hang in it."""
    if any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread()):
        from agents.process import exit_now

        atexit._run_exitfuncs()
        exit_now(_INTERRUPTED)


def _open_closed_streams() -> None:
    """A standard stream may be closed (`>&-`, some supervisors). Otherwise printing fails, and a file or
    socket gets the number of a stream, to which child processes print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # noqa: FBT003  (takes no keywords)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


if __name__ == "__main__":
    main()
