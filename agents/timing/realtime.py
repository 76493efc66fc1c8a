"""Real-time scheduling of threads."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def make_realtime() -> None:
    """The calling thread runs without delay even if all cores are busy. No effect without
    CAP_SYS_NICE."""
    if sys.platform == "linux":
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
