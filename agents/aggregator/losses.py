"""Updates that were lost with their sum (secure aggregation). Pure."""

from __future__ import annotations


class Losses:
    """Lost updates of clients that remember which of their updates were applied. Every dispatch to the
    client lists them, until the client has answered such a dispatch."""

    def __init__(self) -> None:
        self._announced: dict[str, dict[int, int]] = {}
        """Dispatches whose answers were lost, by client, each with the number of the first dispatch that
        listed the loss; 0: none yet."""

    def add(self, client: str, dispatch: int) -> None:
        """Add a lost update, the answer to `dispatch`."""
        self._announced.setdefault(client, {})[dispatch] = 0

    def announce(self, client: str, number: int) -> tuple[int, ...]:
        """Return the dispatches of `client` whose answers were lost, to be listed in dispatch
        `number`."""
        told = self._announced.get(client, {})
        for dispatch, first in told.items():
            told[dispatch] = first or number
        return tuple(told)

    def confirm(self, client: str, number: int) -> None:
        """Remove the losses that dispatch `number` listed, because `client` has answered it."""
        if client in self._announced:
            told = self._announced[client].items()
            self._announced[client] = {one: first for one, first in told if not 0 < first <= number}

    def forget(self, client: str) -> None:
        self._announced.pop(client, None)
