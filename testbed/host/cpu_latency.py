"""CPU wake-up latency: keep cores awake while a run measures.

A throttled device works in slices of milliseconds. If a core sleeps between two slices, waking the core
can take longer than the work of the slice, and the kernel counts the wake-up as CPU time of the device
(measured: docs/evidence/cpu.md). The kernel's PM QoS prevents all sleep states that need longer than 0
µs to wake up while a process keeps the device file open. The setting therefore ends with the process,
even if the process is killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LATENCY = Path("/dev/cpu_dma_latency")
"""Device file of PM QoS. A process writes the longest wake-up time that it accepts, in µs, as a native
32-bit integer."""


@contextmanager
def keep_awake(latency: Path = LATENCY) -> Iterator[bool]:
    """Yield whether the host allows it."""
    try:
        file = os.open(latency, os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(file, bytes(4))
        yield True
    finally:
        os.close(file)
