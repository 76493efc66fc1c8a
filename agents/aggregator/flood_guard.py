"""Protection of the aggregator against clients that flood it: whose messages it looks at. Pure.

The broker delivers to the aggregator in one queue, in which all wait behind who floods it. So what is
too much is refused before it is decoded, and who goes on is shut out: the controller ends its client.
"""

from __future__ import annotations

from collections import Counter

from agents.mqtt.rate_limit import RateLimit

_MESSAGE_RATE = 100, 10.0
"""At once, and a second of the host: what one client may send beside the answers it was asked for."""
_FLOOD_MESSAGES = 1000
"""A client that has sent so many messages more than it may floods."""
_MAX_ASKED = 256
"""Answers that a client may owe: of those that it will never give none add up."""
_TRICKLE_MESSAGES = 10
"""Messages of who is shut out between two looks: statuses of one that starts anew, but no flood."""


class FloodGuard:
    def __init__(self) -> None:
        self._rate_limit = RateLimit(*_MESSAGE_RATE)
        self._asked: Counter[str] = Counter()
        """Answers that each client owes."""
        self._shut_out: set[str] = set()
        self._since_look = 0
        self._refused = 0
        """Messages of who is shut out: of the flood that goes on."""
        self._flooded = False

    def asked(self, client: str) -> None:
        """`client` is sent something that it is to answer: one answer passes at any rate."""
        if self._asked[client] < _MAX_ASKED:
            self._asked[client] += 1

    def passes(self, sender: str, at: float, *, is_answer: bool = False) -> bool:
        """Whether a message of `sender`, at `at` seconds of the host, is to be looked at."""
        if sender in self._shut_out:
            self._since_look += 1
            self._refused += 1
            return False
        if is_answer and self._asked[sender]:
            self._asked[sender] -= 1
            return True
        return self._rate_limit.admits(sender, at)

    def floods(self, sender: str) -> bool:
        """Whether `sender` is to be shut out, and is not yet."""
        return sender not in self._shut_out and self._rate_limit.refused[sender] >= _FLOOD_MESSAGES

    def shut_out(self, sender: str) -> None:
        self._shut_out.add(sender)
        self._flooded = True

    def let_in(self, sender: str) -> bool:
        """`sender` was started anew; whether it was shut out."""
        if sender not in self._shut_out:
            return False
        self._shut_out.remove(sender)
        self._rate_limit.forget(sender)
        del self._asked[sender]
        return True

    def subsided(self) -> int | None:
        """Once for each flood, when hardly anything of it has come since the last look: how many of its
        messages were refused after their sender had been shut out."""
        few, self._since_look = self._since_look < _TRICKLE_MESSAGES, 0
        if not (self._flooded and few):
            return None
        refused, self._refused, self._flooded = self._refused, 0, False
        return refused
