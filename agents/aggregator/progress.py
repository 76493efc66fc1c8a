"""Course of a run: its timers, versions and evaluations, and its end. No I/O and no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from agents import events
from agents.aggregator.actions import Action, Evaluate, Log
from agents.aggregator.dispatches import Arrivals
from agents.aggregator.inputs import EvaluationDone, PartEvaluated, Settings
from agents.device_actions import Action as DeviceAction
from agents.device_actions import DeviceState
from agents.models.vectors import Vector, finite
from agents.pipeline.steps import ServerSteps
from agents.rules.interface import Aggregated, Server
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds, next_multiple, to_seconds

Timer = (
    Literal["evaluate", "checkpoint", "after", "waiting", "give up"]
    | tuple[Literal["rule"], str]  # with the rule's name for the timer
    | tuple[Literal["report"], str]  # with the client that owes the report
    | tuple[Literal["part"], str, int]  # with name and number, as a part of the core has set it
)
"""Named by its purpose."""
_ORDER: dict[Timer, int] = {"evaluate": 1, "checkpoint": 2, "after": 3}
"""Order of timers that are due at the same time. Others, such as the rule's, come first."""


@dataclass(frozen=True, slots=True)
class _DueTime:
    at: Nanoseconds
    period: Nanoseconds | None = None
    """None if the timer fires once."""


class Timers:
    """Setting a timer again replaces the earlier one."""

    def __init__(self) -> None:
        self._due: dict[Timer, _DueTime] = {}
        self._aside: dict[Timer, _DueTime] = {}
        """Timers at the end of the run, which are set again if it is resumed."""

    @property
    def next(self) -> Nanoseconds | None:
        """None if no timer is set."""
        return min((due.at for due in self._due.values()), default=None)

    @property
    def any_of_rule(self) -> bool:
        return any(timer[0] == "rule" for timer in self._due)

    def names(self) -> Set[Timer]:
        return self._due.keys()

    def due(self, timer: Timer) -> Nanoseconds | None:
        """Return the time at which `timer` is due; None if it is not set."""
        return None if timer not in self._due else self._due[timer].at

    def set(self, timer: Timer, at: Nanoseconds) -> None:
        self._due[timer] = _DueTime(at)

    def set_periodic(self, timer: Timer, period: Nanoseconds, now: Nanoseconds) -> None:
        """Due at the times k · `period` (k = 1, 2, ...) that are later than `now`."""
        self._due[timer] = _DueTime(next_multiple(period, now), period)

    def cancel(self, timer: Timer) -> None:
        """Do nothing if the timer is not set."""
        self._due.pop(timer, None)

    def clear(self) -> None:
        self._due = {}

    def set_aside(self) -> None:
        """Cancel all timers, but keep them for `bring_back`."""
        self._aside, self._due = self._due, {}

    def bring_back(self) -> None:
        """Set the timers that `set_aside` has kept, and cancel all others."""
        self._due, self._aside = self._aside, {}

    def pop(self, now: Nanoseconds) -> tuple[Timer, Nanoseconds] | None:
        """Return the earliest timer that is due, and when it was; None if there is none. A periodic
        timer is set again."""
        first = self.next
        if first is None or first > now:
            return None
        together = [timer for timer, due in self._due.items() if due.at == first]
        timer = min(together, key=lambda one: _ORDER.get(one, 0))
        period = self._due.pop(timer).period
        if period is not None and timer[0] == "rule":  # a late tick of a rule is not skipped
            self._due[timer] = _DueTime(first + period, period)
        elif period is not None:
            self.set_periodic(timer, period, now)
        return timer, first


class Versions:
    """`arrivals`: updates that wait to be applied."""

    def __init__(self, settings: Settings, server: Server, steps: ServerSteps) -> None:
        self._settings = settings
        self._steps = steps
        self._server = server
        self.arrivals = Arrivals()
        self.applied = 0
        """Updates so far."""

    def add(self, aggregated: Aggregated, at: Nanoseconds) -> list[Action]:
        """Add the noise of the pipeline's steps, average the buffers, and return the records."""
        version, used = aggregated.version, aggregated.contributions
        if used:
            for step in self._steps.halves:
                step.add_noise(self._server.w, version, max(one.weight for one in used))
        if used and self._server.buffers.nbytes:
            self._server.buffers = self.arrivals.averaged_buffers(
                self._server.buffers, used, shares=self._settings.side.kind in ("model", "residual")
            )
        records: list[Action] = [self.arrivals.apply(one, version, at) for one in used]
        self.applied += len(used)
        records.append(Log(events.VersionMade(to_seconds(at), version, len(used))))
        return records

    def buffered_records(self, at: Nanoseconds, *, is_cut_short: bool) -> list[Log]:
        """Records of updates in the rule's buffer at the end of the run; one note with their number if
        it ended early: they are applied when it is resumed."""
        now, count = to_seconds(at), len(self.arrivals)
        if is_cut_short:
            what = f"not applied yet, but in the rule's buffer: {count}"
            return [Log(events.Note(now, f"updates {what}"))] if count else []
        reason = "in the rule's buffer when the run ended"
        return [
            Log(events.UpdateRejected(now, client, reason, number)) for client, number in self.arrivals
        ]

    def problems(self, sent: Callable[[int], bool]) -> Iterator[str]:
        """`sent`: whether a dispatch was sent."""
        for client, number in self.arrivals:
            if client not in self._settings.importance or not sent(number):
                yield f"{client} answered dispatch {number}, which it was never sent"
        if min(self._server.version, self.applied) < 0:
            yield f"{self.applied} updates made {self._server.version} versions"


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

    def note_action(self, client: str, action: DeviceAction) -> None:
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


_DIVERGED = (
    "is not finite, or its norm is above 1.8e19: training from it is useless. The updates were finite, "
    "so the rule has made it diverge"
)


class Evaluations:
    """`several`: an evaluation may be requested before the previous one is done."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._taken: deque[Nanoseconds] = deque()
        """Device times at which the unfinished ones were requested."""
        self._newest = -1
        """−1 if no evaluation was requested."""
        self._diverged = False
        """An evaluated model was not finite."""

    def __len__(self) -> int:
        return len(self._taken)

    def remaining(self, version: int) -> int:
        """Evaluations that are still to be done if the run ends with `version`."""
        return len(self._taken) + (version != self._newest)

    def request(self, version: int, w: Vector, at: Nanoseconds) -> list[Action]:
        """`w`: shape (d,). Do nothing while the last evaluation is still running, or if the model has
        not changed."""
        if (self._taken and not self._several) or version == self._newest:
            return []
        self._taken.append(at)
        self._newest = version
        if self._diverged or finite(w):
            return [Evaluate(version)]
        self._diverged = True
        note = events.Note(to_seconds(at), f"version {version} of the model {_DIVERGED}")
        return [Log(note), Evaluate(version)]

    def part(self, event: PartEvaluated) -> Log:
        """The event belongs to the oldest unfinished evaluation."""
        return Log(
            events.EvaluatedPart(
                to_seconds(self._oldest),
                event.version,
                event.part,
                event.name,
                event.samples,
                event.loss,
                event.accuracy,
            )
        )

    def done(self, event: EvaluationDone) -> Log:
        taken = to_seconds(self._oldest)
        self._taken.popleft()
        return Log(events.Evaluated(taken, event.version, event.loss, event.accuracy))

    @property
    def _oldest(self) -> Nanoseconds:
        """Raises RuntimeError if there is no unfinished evaluation."""
        if not self._taken:
            raise RuntimeError("this evaluation was not requested")
        return self._taken[0]

    def problems(self, version: int) -> Iterator[str]:
        """`version`: the newest."""
        if self._newest > version:
            yield f"version {self._newest} is evaluated, and {version} is the newest"
        if [*self._taken] != sorted(self._taken):
            yield f"models that are evaluated were taken at {self._taken}"


GRACE_S = 1.5
"""Host seconds after which the run notes that it waits for a last evaluation. An interrupted run waits
at most this long, because its process will soon be killed."""
_CUT_SHORT = ("interrupted", "no clients left")


@dataclass(frozen=True, slots=True)
class End:
    at: Nanoseconds
    reason: str
    """Reason for the end, as in `events.RunEnded`."""

    @property
    def is_cut_short(self) -> bool:
        """The run can be resumed."""
        return self.reason in _CUT_SHORT


class Ending:
    def __init__(self, settings: Settings, timers: Timers, evaluations: Evaluations) -> None:
        self._last = settings.last_evaluation
        self._timers = timers
        self._evaluations = evaluations
        self.end: End | None = None

    @property
    def is_cut_short(self) -> bool:
        """The run has ended and can be resumed."""
        return self.end is not None and self.end.is_cut_short

    @property
    def is_waited_for(self) -> bool:
        """The run has ended and waits for its last evaluations; False if these take no time."""
        return self._last is not None and self.end is not None

    def begin(self, reason: str, at: Nanoseconds, now: Nanoseconds, timeout: float) -> None:
        """Wait for the last evaluations, from `now` on, as the settings say, but at most `timeout` host
        seconds."""
        self.end = End(at, reason)
        self._timers.set_aside()
        if self._last is None:
            return
        timeout = min(timeout, math.inf if self._last.timeout is None else self._last.timeout)
        if timeout > GRACE_S:
            self._timers.set("waiting", now + from_seconds(GRACE_S / self._last.dilation))
        if timeout < math.inf:
            self._timers.set("give up", now + from_seconds(timeout / self._last.dilation))

    def undo(self) -> None:
        """Resume a run that had ended early, with the timers that were set when it ended."""
        self.end = None
        self._timers.bring_back()

    def note_waiting(self, end: End, version: int) -> Log:
        """With the time of the run's end, because the run clock stands still."""
        count = self._evaluations.remaining(version)
        what = "evaluation" if count == 1 else f"{count} evaluations"
        text = f"the run is over and waits for its last {what}"
        if self._last is not None and self._last.timeout is not None:
            text += f", at most {self._last.timeout:g} s (without limit: evaluate: {{when: after}})"
        return Log(events.Note(to_seconds(end.at), text))

    def note_giving_up(self, end: End, version: int, why: str) -> Log:
        count = self._evaluations.remaining(version)
        what = "the last model was" if count == 1 else f"the last {count} models were"
        return Log(events.Note(to_seconds(end.at), f"{what} not evaluated: {why}"))
