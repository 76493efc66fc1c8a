"""A limit on what each sender causes: one that floods fills no disk, and takes no other's place."""

from __future__ import annotations

from collections import Counter


class RateLimit:
    """A token bucket for each sender: `burst` things at once, `rate` a second in the long run."""

    def __init__(self, burst: int, rate: float) -> None:
        self._burst, self._interval = burst, 1 / rate
        self._full: dict[str, float] = {}
        """When each sender has all of its burst again."""
        self.refused: Counter[str] = Counter()
        """How much of each sender was too much."""

    def admits(self, sender: str, at: float) -> bool:
        """Whether one more thing of `sender`, `at` seconds of any clock, is not too much."""
        full = max(at, self._full.get(sender, at)) + self._interval
        if full - at > self._burst * self._interval:
            self.refused[sender] += 1
            return False
        self._full[sender] = full
        return True

    def forget(self, sender: str) -> None:
        """`sender` has had nothing so far."""
        self._full.pop(sender, None)
        self.refused.pop(sender, None)

    def refund(self, sender: str) -> None:
        """The latest thing of `sender` was its right, and does not count."""
        self._full[sender] -= self._interval
