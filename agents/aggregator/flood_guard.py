"""Protection of the aggregator against clients that flood it with messages. No I/O and no clock.

The broker delivers all messages to the aggregator in one queue, so a flood delays all other clients.
Excess messages are refused before they are decoded. If a client continues, it is shut out, and the
controller ends its process.
"""

from __future__ import annotations

from collections import Counter

from agents.mqtt.rate_limit import RateLimit

_MESSAGE_RATE = 100, 10.0
"""For messages other than the answers that a client owes: maximum at once, and per host second."""
_FLOOD_MESSAGES = 1000
"""Excess messages after which a client counts as flooding."""
_MAX_ASKED = 256
"""Answers that a client may owe; some never come."""
_TRICKLE_MESSAGES = 10
"""A flood is over when shut-out clients have sent fewer messages between two checks. Above 1 because a
restarting client sends a few status messages."""


class FloodGuard:
    def __init__(self) -> None:
        self._rate_limit = RateLimit(*_MESSAGE_RATE)
        self._asked: Counter[str] = Counter()
        """Answers that each client owes."""
        self._shut_out: set[str] = set()
        self._since_look = 0
        self._refused = 0
        """Messages of shut-out clients in the present flood."""
        self._flooded = False

    def expect_answer(self, client: str) -> None:
        """The answer will not count towards the flood limit."""
        if self._asked[client] < _MAX_ASKED:
            self._asked[client] += 1

    def passes(self, sender: str, at: float, *, is_answer: bool = False) -> bool:
        """`at`: the host's clock in seconds."""
        if sender in self._shut_out:
            self._since_look += 1
            self._refused += 1
            return False
        if is_answer and self._asked[sender]:
            self._asked[sender] -= 1
            return True
        return self._rate_limit.admits(sender, at)

    def is_flooding(self, sender: str) -> bool:
        """False once the sender is shut out."""
        return sender not in self._shut_out and self._rate_limit.refused[sender] >= _FLOOD_MESSAGES

    def shut_out(self, sender: str) -> None:
        self._shut_out.add(sender)
        self._flooded = True

    def readmit(self, sender: str) -> bool:
        """The sender's process was restarted. Return whether it was shut out."""
        if sender not in self._shut_out:
            return False
        self._shut_out.remove(sender)
        self._rate_limit.forget(sender)
        del self._asked[sender]
        return True

    def end_of_flood(self) -> int | None:
        """Messages refused during a flood that has ended since the last call, as shut-out clients have
        sent almost none; else None."""
        few, self._since_look = self._since_look < _TRICKLE_MESSAGES, 0
        if not (self._flooded and few):
            return None
        refused, self._refused, self._flooded = self._refused, 0, False
        return refused
