"""Updates that were lost with their sum (secure aggregation). No I/O and no clock."""

from __future__ import annotations


class Losses:
    """Lost updates of clients that remember which of their updates were applied. Every dispatch to a
    client lists the client's lost updates. A lost update is removed from the list when the client has
    answered a dispatch that lists this update."""

    def __init__(self) -> None:
        self._announced: dict[str, dict[int, int]] = {}
        """For each client, its lost updates. Key: number of the dispatch that the update answered.
        Value: number of the first dispatch that listed the loss; 0 if no dispatch has listed the
        loss."""

    def add(self, client: str, dispatch: int) -> None:
        """Add a lost update of `client`, which answered `dispatch`."""
        self._announced.setdefault(client, {})[dispatch] = 0

    def announce(self, client: str, number: int) -> tuple[int, ...]:
        """Return the numbers of the dispatches of `client` whose answers were lost. Dispatch `number`
        will list these losses."""
        told = self._announced.get(client, {})
        for dispatch, first in told.items():
            told[dispatch] = first or number
        return tuple(told)

    def confirm(self, client: str, number: int) -> None:
        """Remove the losses that dispatch `number` listed, because `client` has answered this
        dispatch."""
        if client in self._announced:
            told = self._announced[client].items()
            self._announced[client] = {one: first for one, first in told if not 0 < first <= number}

    def forget(self, client: str) -> None:
        self._announced.pop(client, None)
