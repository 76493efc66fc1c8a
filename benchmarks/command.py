"""Exit codes of benchmarks that run testbed as a library."""

from __future__ import annotations

import sys
from collections.abc import Callable

from testbed.errors import TestbedError
from testbed.host.processes import interrupting


def exit_code_of(work: Callable[[], None]) -> int:
    """Do `work` and return 0; print an error of the user or the host and return its exit code. Return
    130 if the user interrupts."""
    try:
        with interrupting():
            work()
    except KeyboardInterrupt:
        return 130
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
