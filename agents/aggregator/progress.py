"""Progress of a run: the time of the last update, and the maximum time until the next update. No I/O and
no clock."""

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
"""Maximum duration of a client's round, as a multiple of the client's longest round so far."""
_DIVERGED_EACH = 10
"""Number of updates of each client after which training that diverged counts as hopeless."""
_IDLE = 2 * SECOND
"""Maximum time in ns during which all clients may wait for a model at the same time."""


@dataclass(slots=True)
class RunProgress:
    """Progress of a run. All times are device times in ns. After an action on a client's device, the
    duration of the client's round is not limited until the client's next update. Before a client's first
    update, the duration is limited only if `expected` has an entry for the client."""

    expected: Mapping[str, float] = field(default_factory=dict)
    """Nanoseconds for which a client may always be silent, by client; infinity if there is no limit. If
    the client's longest round so far allows a longer silence, that longer time is the limit."""
    last: Nanoseconds = 0
    """Start of the present silence in device time: the last update, the start of the run clock, or the
    last report of a stall."""
    _stalled_since: Nanoseconds | None = None
    _longest: dict[str, Nanoseconds] = field(default_factory=dict)
    _states: dict[str, DeviceState] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    """Clients on whose devices there was an action since their last update."""
    _diverged: dict[str, int] = field(default_factory=dict)
    """Number of updates of each client that were rejected because its training had diverged, since the
    last update that was not rejected."""

    def start_over(self) -> None:
        """Forget everything, because all processes start again."""
        self.last, self._stalled_since = 0, None
        self._longest.clear()
        self._states.clear()
        self._changed.clear()
        self._diverged.clear()

    def restart_silence(self, at: Nanoseconds) -> None:
        """Measure silence from `at` on."""
        self.last = max(self.last, at)

    def note_arrival(self, client: str, took: Nanoseconds, at: Nanoseconds) -> list[Log]:
        """Record an update of `client`, which arrived `took` ns after its model was sent. If the update
        ends a stall, return the record of the stall."""
        self.last = at
        self._longest[client] = max(took, self._longest.get(client, 0))
        self._changed.discard(client)
        return [] if self._stalled_since is None else self.end_stall(at)

    def note_diverged(self, client: str) -> None:
        """Record that an update of `client` was rejected because its training had diverged."""
        self._diverged[client] = self._diverged.get(client, 0) + 1

    def note_usable(self) -> None:
        """Record that an update was not rejected."""
        self._diverged.clear()

    def has_diverged(self, present: Collection[str]) -> bool:
        """Return whether no client in `present` makes progress any more: the last updates of all of them
        were rejected because training had diverged."""
        return all(self._diverged.get(client, 0) >= _DIVERGED_EACH for client in present)

    def note_stall(self, since: Nanoseconds, at: Nanoseconds) -> Nanoseconds:
        """Record that nothing has arrived since `since`; return the time at which the stall began. From
        now on, silence is measured from `at`, so that clients are asked again if the silence
        continues."""
        if self._stalled_since is None:
            self._stalled_since = since
        self.restart_silence(at)
        return self._stalled_since

    def end_stall(self, at: Nanoseconds) -> list[Log]:
        """End the stall at time `at`; return the record of the stall. Return an empty list if there is
        no stall."""
        since, self._stalled_since = self._stalled_since, None
        if since is None:
            return []
        return [Log(events.Disrupted(to_seconds(at), to_seconds(since), NOTHING_ARRIVED))]

    def note_action(self, client: str, action: Action) -> None:
        """Record an action on the device of `client`."""
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
        """Return the time since which nothing has arrived. Return None if nothing had to arrive by
        the time `at`. `open_since`: for each client that trains, the time at which its model was
        sent. `all_wait`: whether all clients of the run are present and the rule waits for no
        timer."""
        since = max([self.last, *open_since.values()])
        if not open_since and not all_wait:
            return None
        patience = self.patience(present, open_since) if open_since else _IDLE
        return since if at - since > patience else None

    def overdue(self, at: Nanoseconds, open_since: Mapping[str, Nanoseconds]) -> dict[str, Nanoseconds]:
        """Return the entries of `open_since` for clients that take far longer than in their earlier
        rounds."""
        return {
            client: began
            for client, began in open_since.items()
            if at - began > (math.inf if self._is_held(client) else max(_LEAST, self._patience(client)))
        }

    def patience(self, present: Iterable[str], training: Collection[str]) -> float:
        """Return the nanoseconds for which all clients in `training` may be silent. Return infinity if
        an action keeps a client in `present` from working, or if the round of a client in `training` is
        not limited."""
        if any(map(self._is_held, present)):
            return math.inf
        return max([_LEAST, *(self._patience(client) for client in training)])

    def _is_held(self, client: str) -> bool:
        """Return whether an action keeps the device of `client` from working."""
        return client in self._states and self._states[client].is_held

    def _patience(self, client: str) -> float:
        if client in self._changed:
            return math.inf
        if client not in self._longest:
            return self.expected.get(client, math.inf)
        return max(self.expected.get(client, 0), _ROUNDS * self._longest[client])
