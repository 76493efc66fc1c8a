"""Who has nothing to do, for rules that let only some clients train at once."""

from __future__ import annotations

import numpy as np


class Idle:
    """Present clients without work. Drawing one takes the same time however many there are."""

    def __init__(self) -> None:
        self._clients: list[str] = []
        self._place: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, client: str) -> None:
        if client not in self._place:
            self._place[client] = len(self._clients)
            self._clients.append(client)

    def discard(self, client: str) -> None:
        place = self._place.pop(client, None)
        if place is None:
            return
        last = self._clients.pop()
        if last != client:
            self._clients[place] = last
            self._place[last] = place

    def draw(self, count: int, rng: np.random.Generator) -> list[str]:
        """Take out `count` of them, or all there are, uniformly without replacement."""
        drawn = []
        for _ in range(min(count, len(self))):
            drawn.append(self._clients[rng.integers(len(self))])
            self.discard(drawn[-1])
        return drawn

    def take_all(self) -> list[str]:
        """Take out all, in the order that they came in."""
        clients, self._clients = self._clients, []
        self._place.clear()
        return clients
