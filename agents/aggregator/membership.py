"""Clients of a run: which are ready, and which are present. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from enum import Enum

from agents.rules.interface import Server


class Change(Enum):
    """A change in who is present or ready, by a client's status."""

    JOINED = "joined"
    LEFT = "left"
    RECONNECTED = "reconnected"
    """The client is ready once more, so messages may be lost."""


class Membership:
    """A client is ready from `ready` until `joining` (its process starts again) or `offline`. While the
    run clock runs, those who are ready are present: they are the clients that the rule knows.

    `importance` has all clients of the run, in device order.
    """

    def __init__(self, importance: Mapping[str, float], server: Server) -> None:
        self._importance = importance
        self._server = server
        self._ready: set[str] = set()

    @property
    def ready(self) -> list[str]:
        """In device order."""
        return [client for client in self._importance if client in self._ready]

    @property
    def missing(self) -> list[str]:
        """The clients that are not present, in device order."""
        return [client for client in self._importance if client not in self._server.clients]

    def report(self, client: str, state: str) -> Change | None:
        """`client`, or its last will, reports its `state`."""
        was_ready = client in self._ready
        if state == "ready":
            self._ready.add(client)
            return Change.RECONNECTED if was_ready else Change.JOINED
        if state not in ("joining", "offline"):
            return None
        self._ready.discard(client)
        return Change.LEFT if was_ready else None

    def admit(self, clients: Container[str]) -> None:
        """From now on those of `clients` are present, and nobody else. The rule's view of them is
        changed in place, and is in device order."""
        present = {client: p for client, p in self._importance.items() if client in clients}
        self._server.clients.clear()
        self._server.clients.update(present)

    def suspend(self) -> None:
        """Nobody is ready any more, because all processes start anew."""
        self._ready.clear()

    def problems(self, *, clock_runs: bool) -> Iterator[str]:
        """Describe what is impossible in this state; `clock_runs` says whether the run clock runs."""
        present = self._server.clients
        if list(present.items()) != [(c, p) for c, p in self._importance.items() if c in present]:
            yield f"{present} are present, and not of this run in this order"
        if not self._ready <= self._importance.keys():
            yield f"{self._ready} are ready, and not all of this run"
        if clock_runs and present.keys() != self._ready:
            yield f"{list(present)} are present, {self._ready} are ready"
