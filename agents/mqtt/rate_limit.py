"""Rate limit per sender. It prevents a flooding sender from filling the disk and from displacing other
senders."""

from __future__ import annotations

from collections import Counter


class RateLimit:
    """One token bucket per sender: at most `burst` items at once, and `rate` per second on average."""

    def __init__(self, burst: int, rate: float) -> None:
        self._burst, self._interval = burst, 1 / rate
        self._full: dict[str, float] = {}
        """Time in seconds at which each sender's bucket is full again."""
        self.refused: Counter[str] = Counter()
        """Number of refused items, by sender."""

    def admits(self, sender: str, at: float) -> bool:
        """Return whether one more item of `sender` is within the limit, and count the item. `at`: time
        of the item in seconds, on any clock."""
        full = max(at, self._full.get(sender, at)) + self._interval
        if full - at > self._burst * self._interval:
            self.refused[sender] += 1
            return False
        self._full[sender] = full
        return True

    def forget(self, sender: str) -> None:
        """Reset the bucket of `sender` and the number of refused items, as if `sender` had sent
        nothing."""
        self._full.pop(sender, None)
        self.refused.pop(sender, None)
