"""Which clients are ready, and which are present. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum

from agents.rules.interface import Server


class MembershipChange(Enum):
    JOINED = "joined"
    LEFT = "left"
    RECONNECTED = "reconnected"
    """Reported `ready` again, so messages may be lost."""


class Membership:
    """A client is ready from its status `ready` until `joining` (its process restarts) or `offline`.
    While the run clock runs, the ready clients are present, and the rule knows them. Idle clients are
    never present.

    `importance`: p_i of each client that trains, in device order. `idle`: the others.
    """

    def __init__(
        self, importance: Mapping[str, float], server: Server, idle: Sequence[str] = ()
    ) -> None:
        self._importance = importance
        self._idle = idle
        self._server = server
        self._ready: set[str] = set()

    @property
    def ready(self) -> list[str]:
        """Clients that train, in device order."""
        return [client for client in self._importance if client in self._ready]

    @property
    def missing(self) -> list[str]:
        """Clients that train and are not present, then idle ones that are not ready, each in device
        order."""
        absent = [client for client in self._importance if client not in self._server.clients]
        return [*absent, *(client for client in self._idle if client not in self._ready)]

    @property
    def waiting(self) -> list[str]:
        """Idle clients that are ready, in device order."""
        return [client for client in self._idle if client in self._ready]

    def report(self, client: str, state: str) -> MembershipChange | None:
        """The status may come from the client's last will. None without a change, or for an idle
        client."""
        was_ready = client in self._ready
        if state == "ready":
            self._ready.add(client)
            if client in self._idle:
                return None
            return MembershipChange.RECONNECTED if was_ready else MembershipChange.JOINED
        if state not in ("joining", "offline"):
            return None
        self._ready.discard(client)
        return MembershipChange.LEFT if was_ready and client not in self._idle else None

    def admit(self, clients: AbstractSet[str]) -> None:
        """Make exactly `clients` present. The rule's mapping is changed in place, and stays in device
        order."""
        present = {client: p for client, p in self._importance.items() if client in clients}
        self._server.clients.clear()
        self._server.clients.update(present)

    def suspend(self) -> None:
        """All processes start again: no client is ready."""
        self._ready.clear()

    def problems(self, *, clock_runs: bool) -> Iterator[str]:
        present = self._server.clients
        if list(present.items()) != [(c, p) for c, p in self._importance.items() if c in present]:
            yield f"{present} are present, and not of this run in this order"
        if not self._ready <= {*self._importance, *self._idle}:
            yield f"{self._ready} are ready, and not all of this run"
        if clock_runs and list(present) != self.ready:
            yield f"{list(present)} are present, {self.ready} are ready"
