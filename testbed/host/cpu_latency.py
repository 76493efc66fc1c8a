"""CPU wake-up latency: keeps cores awake while a run measures.

A throttled device works in slices of milliseconds. Where a core sleeps in between, waking it can cost
more than the slice's work, and the kernel charges the device for it (docs/evidence/cpu.md). The kernel's
PM QoS holds off every sleep that would take longer than 0 µs to end, as long as a process keeps its
device file open: a killed one leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LATENCY = Path("/dev/cpu_dma_latency")
"""Takes a native 32-bit integer: the longest wake-up, in µs, that the writer accepts."""


@contextmanager
def keep_awake(latency: Path = LATENCY) -> Iterator[bool]:
    """Keep this host's cores awake meanwhile; yields whether the host allows it."""
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
