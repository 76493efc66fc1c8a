"""Whether a run makes progress: when updates came last, and how long one may take to come. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from agents import events
from agents.aggregator.actions import Log
from agents.device_actions import Action, DeviceState
from agents.timing.nanoseconds import SECOND, Nanoseconds, to_seconds

NOTHING_ARRIVED = "nothing arrived"
_LEAST = 10 * SECOND
_ROUNDS = 5
"""Times its own longest round that a client may take for one."""
_IDLE = 2 * SECOND
"""For how long all clients may wait for a model at once."""


@dataclass(slots=True)
class Progress:
    """Times are device time. A client of which no round is known, because it has not finished one or has
    been acted on since it did, may take as long as it likes."""

    expected: Mapping[str, float] = field(default_factory=dict)
    """By client, as far as it is known: nanoseconds for which it may be silent, whatever its rounds
    took; may be infinite."""
    last: Nanoseconds = 0
    """When something arrived last, or all was counted anew."""
    _stalled_since: Nanoseconds | None = None
    _longest: dict[str, Nanoseconds] = field(default_factory=dict)
    _states: dict[str, DeviceState] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    """Clients that have been acted on since their last update."""

    def start_over(self) -> None:
        """Forget what was seen so far, because all processes start anew."""
        self.last, self._stalled_since = 0, None
        self._longest.clear()
        self._states.clear()
        self._changed.clear()

    def went_on(self, at: Nanoseconds) -> None:
        """Nothing before `at` speaks against the run."""
        self.last = max(self.last, at)

    def arrived(self, client: str, took: Nanoseconds, at: Nanoseconds) -> list[Log]:
        """An update of `client` arrived, `took` after its model had left; the record of the stall that
        this ends."""
        self.last = at
        self._longest[client] = max(took, self._longest.get(client, 0))
        self._changed.discard(client)
        return [] if self._stalled_since is None else self.stall_ends(at)

    def stall(self, since: Nanoseconds, at: Nanoseconds) -> Nanoseconds:
        """Note that nothing has arrived since `since`; return when the stall began that this belongs to.
        Silence counts from `at` on again, so that clients are asked once more if it lasts."""
        if self._stalled_since is None:
            self._stalled_since = since
        self.went_on(at)
        return self._stalled_since

    def stall_ends(self, at: Nanoseconds) -> list[Log]:
        """The record of the stall that ends `at`, if there is one."""
        since, self._stalled_since = self._stalled_since, None
        if since is None:
            return []
        return [Log(events.Disrupted(to_seconds(at), to_seconds(since), NOTHING_ARRIVED))]

    def acted(self, client: str, action: Action) -> None:
        """The emulator did `action` to the device of `client`."""
        self._states[client] = self._states.get(client, DeviceState()).with_action(action)
        self._changed.add(client)

    def silent_since(
        self,
        at: Nanoseconds,
        present: Iterable[str],
        open_since: Mapping[str, Nanoseconds],
        *,
        all_wait: bool,
    ) -> Nanoseconds | None:
        """Since when nothing has arrived, if at time `at` something should have; else None.
        `open_since`: by client that trains, when its model was sent. `all_wait`: if none trains, nobody
        else can come, and the rule waits for nothing."""
        since = max([self.last, *open_since.values()])
        if not open_since and not all_wait:
            return None
        patience = self.patience(present, open_since) if open_since else _IDLE
        return since if at - since > patience else None

    def overdue(self, at: Nanoseconds, open_since: Mapping[str, Nanoseconds]) -> dict[str, Nanoseconds]:
        """Those of `open_since` that take far longer than for any round before."""
        return {
            client: began
            for client, began in open_since.items()
            if at - began > (math.inf if self._is_held(client) else max(_LEAST, self._patience(client)))
        }

    def patience(self, present: Iterable[str], training: Collection[str]) -> float:
        """For how long the clients that train may all be silent; infinite where one that is present is
        kept from working, or one that trains may take as long as it likes."""
        if any(map(self._is_held, present)):
            return math.inf
        return max([_LEAST, *(self._patience(client) for client in training)])

    def _is_held(self, client: str) -> bool:
        """Whether the emulator keeps `client` from working."""
        return client in self._states and self._states[client].is_held

    def _patience(self, client: str) -> float:
        if client in self._changed:
            return math.inf
        if client not in self._longest:
            return self.expected.get(client, math.inf)
        return max(self.expected.get(client, 0), _ROUNDS * self._longest[client])
