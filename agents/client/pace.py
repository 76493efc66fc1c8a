"""The pace of a device: work of c seconds of CPU time takes c ÷ share on the clock, never less.

A quota deals out a share of the CPU in slices. What begins with a whole slice at hand would be done up
to a period too early: much of a training of a few slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from agents.device.control_group import ControlGroup


class Pace:
    """Says when a piece of work of this process may be over.

    All CPU time of the process since the end of the piece before counts, so that what an update costs
    beside its training is part of the next one; and the piece begins where the work on it does, with the
    model that came, so that no CPU time is waited for twice.
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
        """A piece of work begins; it has since the time `since` of the clock, where there was no other
        piece then."""
        now = self._clock()
        self._began = now if since is None else min(now, max(since, self._ended))
        self._share_then = self._share()

    def end(self) -> float:
        """It is done; for how many seconds of the host its device would still be at it, or 0. Where the
        share was changed meanwhile, by the larger one.

        To be asked once: to wake up and ask again costs CPU time too, and so more waiting, without end.
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
