"""Pace of a device: work that takes c seconds of CPU time lasts at least c/share seconds.

A CPU quota is granted in slices, one per period. Work that begins with a full slice would end up to one
period too early, which is much for a training of only a few slices. Local processes begin with a full
budget likewise (`testbed.runtimes.process.duty_cycle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agents.device.control_group import ControlGroup


def share_in(file: Path) -> float | None:
    """Return the CPU share that `file` holds, in cores; None if the share is not limited yet."""
    with suppress(OSError, ValueError):
        return float(file.read_text())
    return None


class Pace:
    """Time by which a piece of work of this process must be extended.

    A piece includes all CPU time since the end of the previous one. So the CPU time for sending an
    update counts in the next training. It begins when the model arrives, so that no CPU time causes
    waiting twice.

    `share` returns the CPU share in cores, None if it is not limited; by default that of the control
    group. `cpu` returns the CPU seconds of the process, `clock` the host's monotonic time in seconds.
    """

    def __init__(
        self,
        share: Callable[[], float | None] | None = None,
        cpu: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share or ControlGroup.of_process().cores
        self._cpu, self._clock = cpu, clock
        self._paid = cpu()
        self._began, self._share_then = clock(), self._share()
        self._ended = self._began

    def begin(self, since: float | None = None) -> None:
        """Begin at `since`, in seconds of the clock, or now; not before the end of the previous piece,
        or now if that is in the future."""
        now = self._clock()
        self._began = now if since is None else min(now, max(since, self._ended))
        self._share_then = self._share()

    def end(self) -> float:
        """Return the host seconds that the emulated device would still need, 0 if none. If the share has
        changed during the work, the larger one counts.

        Call this only once per piece. Each call uses CPU time, which causes more waiting, so a loop
        would never end.
        """
        cpu = self._cpu()
        used, self._paid = cpu - self._paid, cpu
        shares = [one for one in (self._share_then, self._share()) if one is not None]
        self._ended = self._clock()
        if len(shares) < 2:
            return 0.0
        left = max(0.0, self._began + used / max(shares) - self._ended)
        self._ended += left
        return left
