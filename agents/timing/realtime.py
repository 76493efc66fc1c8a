"""Threads that a busy core does not make late."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def realtime() -> None:
    """Have this thread run at once where all cores are busy, if CAP_SYS_NICE allows."""
    if sys.platform == "linux":
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
