"""Updates that were lost with their sum. Pure."""

from __future__ import annotations


class Losses:
    """Updates that were lost with their sum, of clients that remember what was applied of theirs: every
    dispatch tells the client, until it has answered one that did."""

    def __init__(self) -> None:
        self._told: dict[str, dict[int, int]] = {}
        """For each client, the dispatches whose answers were lost, each with the number of the first
        dispatch that told the client so; 0: none has yet."""

    def add(self, client: str, dispatch: int) -> None:
        """The update that answered `dispatch` is lost."""
        self._told.setdefault(client, {})[dispatch] = 0

    def tell(self, client: str, number: int) -> tuple[int, ...]:
        """Dispatches of `client` whose answers were lost, for dispatch `number` to tell it."""
        told = self._told.get(client, {})
        for dispatch, first in told.items():
            told[dispatch] = first or number
        return tuple(told)

    def heard(self, client: str, number: int) -> None:
        """`client` has answered dispatch `number`, and so knows what that told it."""
        if client in self._told:
            told = self._told[client].items()
            self._told[client] = {one: first for one, first in told if not 0 < first <= number}

    def forget(self, client: str) -> None:
        self._told.pop(client, None)
