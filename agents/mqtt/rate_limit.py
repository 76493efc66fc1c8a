"""Rate limit per sender, so that a flood neither fills the disk nor displaces other senders."""

from __future__ import annotations

from collections import Counter


class RateLimit:
    """Token bucket: at most `burst` items at once, and `rate` per second on average."""

    def __init__(self, burst: int, rate: float) -> None:
        self._burst, self._interval = burst, 1 / rate
        self._full: dict[str, float] = {}
        """When each sender's bucket is full again."""
        self.refused: Counter[str] = Counter()

    def admits(self, sender: str, at: float) -> bool:
        """Count one more item. `at`: seconds of any clock."""
        full = max(at, self._full.get(sender, at)) + self._interval
        if full - at > self._burst * self._interval:
            self.refused[sender] += 1
            return False
        self._full[sender] = full
        return True

    def forget(self, sender: str) -> None:
        """Treat `sender` as if it had sent nothing."""
        self._full.pop(sender, None)
        self.refused.pop(sender, None)
