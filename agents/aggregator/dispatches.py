"""Which model went to whom, and is not answered yet."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

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


class NoAnswer(Enum):
    """Why an update answers no dispatch."""

    DUPLICATE = "duplicate"
    """An update that answers the dispatch came before."""
    NEVER_SENT = "never sent"
    """No dispatch has this number."""
    NOT_OPEN = "not open"
    """The dispatch is not open to the client, or the update is not to be taken."""


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
        """Whether dispatch `number` has been sent."""
        return 0 < number <= self._count

    def find(self, client: str, number: int) -> Dispatched | None:
        """Dispatch `number`, if `client` may answer it."""
        return self._open.get(client, {}).get(number) or self._open_broadcast(client, number)

    def _open_broadcast(self, client: str, number: int) -> Dispatched | None:
        return self._broadcasts.get(number) if number > self._answered.get(client, 0) else None

    def answered(self, client: str, number: int) -> None:
        """`client` has answered dispatch `number`."""
        later = {n: sent for n, sent in self._open.get(client, {}).items() if n > number}
        self._open[client] = later
        self._answered[client] = number

    def answer(
        self, client: str, number: int, *, is_valid: bool, is_taken: bool
    ) -> Dispatched | NoAnswer:
        """An update of `client` says that it answers dispatch `number`. If that `is_valid`, the dispatch
        is dealt with, whatever becomes of the update: if it comes again, it is a duplicate. If it
        `is_taken`, too, and the dispatch is open, it and those before it are not any more."""
        dealt_with = self._dealt_with.get(client)
        if dealt_with is not None and number in dealt_with:
            return NoAnswer.DUPLICATE
        if not 0 < number <= self._count:
            return NoAnswer.NEVER_SENT
        if not is_valid:
            return NoAnswer.NOT_OPEN
        if dealt_with is None:
            dealt_with = self._dealt_with[client] = deque(maxlen=_REMEMBERED)
        dealt_with.append(number)
        own = self._open.get(client, {})
        found = (own.get(number) or self._open_broadcast(client, number)) if is_taken else None
        if found is None:
            return NoAnswer.NOT_OPEN
        self._open[client] = {later: sent for later, sent in own.items() if later > number}
        self._answered[client] = number
        return found

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

    def problems(self, present: Collection[str], *, is_over: bool) -> Iterator[str]:
        """Describe what is impossible in this state. If the run `is_over`, answers are rejected, and
        dispatches stay open."""
        for client, sent in self._open.items():
            if sent and client not in present:
                yield f"{client} is not present, and is to answer {sent}"
            if [*sent] != sorted(sent) or not all(map(self.were_sent, sent)):
                yield f"{client} is to answer {sent}, of {self._count} dispatches"
            if not is_over and (dealt_with := sent.keys() & self._dealt_with.get(client, ())):
                yield f"{client} has answered {dealt_with}, which are still open"
        if self._broadcast_numbers != sorted(self._broadcasts):
            yield f"the broadcasts {self._broadcast_numbers} are not those of {self._broadcasts}"
        for client, answered in self._answered.items():
            if not 0 <= answered <= self._count:
                yield f"{client} has answered {answered}, of {self._count} dispatches"

    def forget(self, client: str) -> None:
        """`client` is gone, and what it was sent with it."""
        self._open.pop(client, None)

    def restart(self, client: str) -> None:
        """`client` starts anew: what it was sent before, it will not answer."""
        self._answered[client] = self._count
