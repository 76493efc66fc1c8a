"""Whether a run goes on: when updates came last, and how long one may take to come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agents.device_actions import Action, DeviceState
from agents.timing.nanoseconds import SECOND, Nanoseconds

_LEAST = 10 * SECOND
_ROUNDS = 5
"""Times its own longest round that a client may take for one."""


@dataclass(slots=True)
class Progress:
    """Times are device time. A client of which no round is known, because it has not finished one or has
    been acted on since it did, may take as long as it likes."""

    last: Nanoseconds = 0
    """When something arrived last, or all was counted anew."""
    expected: Mapping[str, float] = field(default_factory=dict)
    """By client, as far as it is known: for how many nanoseconds it may be silent, whatever its rounds
    took."""
    _longest: dict[str, Nanoseconds] = field(default_factory=dict)
    _states: dict[str, DeviceState] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    """Clients that have been acted on since their last update."""

    def went_on(self, at: Nanoseconds) -> None:
        """Nothing before `at` speaks against the run."""
        self.last = max(self.last, at)

    def arrived(self, client: str, took: Nanoseconds, at: Nanoseconds) -> None:
        """An update of `client` arrived, `took` after its model had left."""
        self.last = at
        self._longest[client] = max(took, self._longest.get(client, 0))
        self._changed.discard(client)

    def acted(self, client: str, action: Action) -> None:
        """The emulator did `action` to the device of `client`."""
        self._states[client] = self._states.get(client, DeviceState()).after(action)
        self._changed.add(client)

    def patience(self, present: Iterable[str], training: Iterable[str]) -> float:
        """For how long the clients that train may all be silent; infinite where one that is present is
        kept from working, or one that trains may take as long as it likes."""
        if any(map(self._is_held, present)):
            return math.inf
        return max([_LEAST, *(self._patience(client) for client in training)])

    def patience_with(self, client: str) -> float:
        """Nanoseconds that `client` may take for one round; infinite if the emulator keeps it from
        working, or no round of it is known."""
        return math.inf if self._is_held(client) else max(_LEAST, self._patience(client))

    def _is_held(self, client: str) -> bool:
        """Whether the emulator keeps `client` from working."""
        return client in self._states and self._states[client].held

    def _patience(self, client: str) -> float:
        if client in self._changed:
            return math.inf
        if client not in self._longest:
            return self.expected.get(client, math.inf)
        return max(self.expected.get(client, 0), _ROUNDS * self._longest[client])
