"""Threads that a busy core does not make late."""

from __future__ import annotations

import os
import sys


def realtime() -> bool:
    """Have this thread run at once where all cores are busy, if CAP_SYS_NICE allows; whether it does."""
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True
