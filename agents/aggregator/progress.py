"""Time of the last update, and maximum time until the next. No I/O and no clock."""

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
"""A round may last this multiple of the client's longest one so far."""
_DIVERGED_EACH = 10
"""Updates of each client after which training that diverged counts as hopeless."""
_IDLE = 2 * SECOND
"""Maximum time during which all clients may wait for a model at the same time."""


@dataclass(slots=True)
class RunProgress:
    """All times are device times in ns. After an action on a client's device, its round is not limited
    until its next update. Before a client's first update, it is limited only by `expected`."""

    expected: Mapping[str, float] = field(default_factory=dict)
    """Nanoseconds for which a client may always be silent; infinity without a limit. Its longest round
    so far may allow more."""
    last: Nanoseconds = 0
    """Start of the present silence: the last update, the start of the run clock, or the last report of a
    stall."""
    _stalled_since: Nanoseconds | None = None
    _longest: dict[str, Nanoseconds] = field(default_factory=dict)
    _states: dict[str, DeviceState] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)
    """Clients on whose devices there was an action since their last update."""
    _diverged: dict[str, int] = field(default_factory=dict)
    """Rejected updates by client, because training had diverged, since the last update that was not
    rejected."""

    def start_over(self) -> None:
        """All processes start again."""
        self.last, self._stalled_since = 0, None
        self._longest.clear()
        self._states.clear()
        self._changed.clear()
        self._diverged.clear()

    def restart_silence(self, at: Nanoseconds) -> None:
        self.last = max(self.last, at)

    def note_arrival(self, client: str, took: Nanoseconds, at: Nanoseconds) -> list[Log]:
        """`took`: since the model was sent. Return the record of a stall that the update ends."""
        self.last = at
        self._longest[client] = max(took, self._longest.get(client, 0))
        self._changed.discard(client)
        return [] if self._stalled_since is None else self.end_stall(at)

    def note_diverged(self, client: str) -> None:
        self._diverged[client] = self._diverged.get(client, 0) + 1

    def note_usable(self) -> None:
        """An update was not rejected."""
        self._diverged.clear()

    def has_diverged(self, at_work: Iterable[str]) -> bool:
        """The last updates of all clients in `at_work` were rejected because training had diverged."""
        return all(self._diverged.get(client, 0) >= _DIVERGED_EACH for client in at_work)

    def note_stall(self, since: Nanoseconds, at: Nanoseconds) -> Nanoseconds:
        """Return the begin of the stall. From now on, silence is measured from `at`, so that clients are
        asked again if it continues."""
        if self._stalled_since is None:
            self._stalled_since = since
        self.restart_silence(at)
        return self._stalled_since

    def end_stall(self, at: Nanoseconds) -> list[Log]:
        """Return the record of the stall; empty if there is none."""
        since, self._stalled_since = self._stalled_since, None
        if since is None:
            return []
        return [Log(events.Disrupted(to_seconds(at), to_seconds(since), NOTHING_ARRIVED))]

    def note_action(self, client: str, action: Action) -> None:
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
        """Time since which nothing has arrived; None if nothing had to arrive by `at`. `open_since`:
        when each client's model was sent. `all_wait`: all clients of the run are present, and the rule
        waits for no timer."""
        since = max([self.last, *open_since.values()])
        if not open_since and not all_wait:
            return None
        patience = self.patience(present, open_since) if open_since else _IDLE
        return since if at - since > patience else None

    def overdue(self, at: Nanoseconds, open_since: Mapping[str, Nanoseconds]) -> dict[str, Nanoseconds]:
        """Clients that take far longer than in their earlier rounds."""
        return {
            client: began
            for client, began in open_since.items()
            if at - began > (math.inf if self._is_held(client) else max(_LEAST, self._patience(client)))
        }

    def patience(self, present: Iterable[str], training: Collection[str]) -> float:
        """Nanoseconds for which all clients in `training` may be silent; infinity if an action keeps a
        client in `present` from working, or a round is not limited."""
        if any(map(self._is_held, present)):
            return math.inf
        return max([_LEAST, *(self._patience(client) for client in training)])

    def _is_held(self, client: str) -> bool:
        return client in self._states and self._states[client].is_held

    def _patience(self, client: str) -> float:
        if client in self._changed:
            return math.inf
        if client not in self._longest:
            return self.expected.get(client, math.inf)
        return max(self.expected.get(client, 0), _ROUNDS * self._longest[client])
