"""Updates that were lost with their sum (secure aggregation). No I/O and no clock."""

from __future__ import annotations


class Losses:
    """Lost updates of clients that remember which of theirs were applied. Every dispatch to a client
    lists them, until it has answered one that does."""

    def __init__(self) -> None:
        self._announced: dict[str, dict[int, int]] = {}
        """By client: dispatch that the lost update answered -> first dispatch that listed the loss; 0 if
        there was none."""

    def add(self, client: str, dispatch: int) -> None:
        self._announced.setdefault(client, {})[dispatch] = 0

    def announce(self, client: str, number: int) -> tuple[int, ...]:
        """Return the dispatches whose answers were lost, which dispatch `number` will list."""
        told = self._announced.get(client, {})
        for dispatch, first in told.items():
            told[dispatch] = first or number
        return tuple(told)

    def confirm(self, client: str, number: int) -> None:
        """The client has answered dispatch `number`: losses that it listed are known."""
        if client in self._announced:
            told = self._announced[client].items()
            self._announced[client] = {one: first for one, first in told if not 0 < first <= number}

    def forget(self, client: str) -> None:
        self._announced.pop(client, None)
