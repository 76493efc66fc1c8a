"""Which model went to whom, and is not answered yet."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from agents.timing.nanoseconds import Nanoseconds

_REMEMBERED = 64
"""Latest answers of each client that are known as dealt with: more than it has under way."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The model of `version`, sent at time `at`."""

    version: int
    at: Nanoseconds
    lr: float | None = None
    """Step size that went with it."""


class Dispatches:
    """Dispatches are numbered through the run. A client answers them in order: what it has passed over,
    it will not answer any more. One number of a broadcast is open to every client."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[str, dict[int, Dispatched]] = {}
        self._broadcasts: dict[int, Dispatched] = {}
        self._broadcast_numbers: list[int] = []
        """Ascending."""
        self._answered: dict[str, int] = {}
        self._dealt_with: dict[str, deque[int]] = {}
        """By client: the dispatches that its latest updates answered."""

    def send(self, client: str, version: int, at: Nanoseconds, lr: float | None = None) -> int:
        """Count a dispatch to `client`; its number."""
        self._count += 1
        self._open.setdefault(client, {})[self._count] = Dispatched(version, at, lr)
        return self._count

    def broadcast(self, version: int, at: Nanoseconds, present: Iterable[str]) -> int:
        """Count a dispatch to all, of whom these are `present`; its number. Broadcasts that none of them
        will answer any more are forgotten."""
        answered = min((self._answered.get(client, 0) for client in present), default=0)
        passed = bisect_right(self._broadcast_numbers, answered)
        for number in self._broadcast_numbers[:passed]:
            del self._broadcasts[number]
        del self._broadcast_numbers[:passed]
        self._count += 1
        self._broadcasts[self._count] = Dispatched(version, at)
        self._broadcast_numbers.append(self._count)
        return self._count

    def were_sent(self, number: int) -> bool:
        """Whether there were so many dispatches."""
        return 0 < number <= self._count

    def find(self, client: str, number: int) -> Dispatched | None:
        """Dispatch `number`, if `client` may answer it."""
        if number in self._broadcasts and number > self._answered.get(client, 0):
            return self._broadcasts[number]
        return self._open.get(client, {}).get(number)

    def answered(self, client: str, number: int) -> None:
        """`client` has answered dispatch `number`."""
        later = {n: sent for n, sent in self._open.get(client, {}).items() if n > number}
        self._open[client] = later
        self._answered[client] = number

    def deal_with(self, client: str, number: int) -> None:
        """An update of `client` is the answer to dispatch `number`, whatever becomes of it."""
        self._dealt_with.setdefault(client, deque(maxlen=_REMEMBERED)).append(number)

    def were_dealt_with(self, client: str, number: int) -> bool:
        """Whether that came before."""
        return number in self._dealt_with.get(client, ())

    def first_open(self, client: str) -> Dispatched | None:
        """The oldest dispatch that `client` may still answer, broadcasts included."""
        answered = self._answered.get(client, 0)
        numbers = [*self._open.get(client, {})][:1]
        later = bisect_right(self._broadcast_numbers, answered)
        numbers += self._broadcast_numbers[later : later + 1]
        return self.find(client, min(numbers, default=0))

    def newest_open(self, client: str) -> int:
        """Number of the newest dispatch that `client` may still answer, broadcasts included; 0 for
        none."""
        own, broadcast = next(reversed(self._open.get(client, {})), 0), self._broadcast_numbers[-1:]
        return max(number if self.find(client, number) else 0 for number in (own, *broadcast))

    def open_versions(self, clients: Collection[str]) -> set[int]:
        """Of the models that `clients` may still answer, broadcasts included."""
        own = (sent for client in clients for sent in self._open.get(client, {}).values())
        answered = min((self._answered.get(client, 0) for client in clients), default=self._count)
        later = self._broadcast_numbers[bisect_right(self._broadcast_numbers, answered) :]
        return {sent.version for sent in (*own, *(self._broadcasts[number] for number in later))}

    def has_open(self, client: str) -> bool:
        """Whether a dispatch of its own waits for the answer of `client`."""
        return bool(self._open.get(client))

    def forget(self, client: str) -> None:
        """`client` is gone, and what it was sent with it."""
        self._open.pop(client, None)

    def restart(self, client: str) -> None:
        """`client` starts anew: what it was sent before, it will not answer."""
        self._answered[client] = self._count
