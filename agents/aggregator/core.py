"""The aggregator's state machine: events in, actions out. No clock, no socket, no disk.

It guards the rule (who is present, which updates are valid), keeps the run's books (records, stop
conditions, when to evaluate) and leaves the mathematics, and who gets a model when, to the rule.

A shell hands it every input through `handle`, and carries out all the actions of one input before it
hands in the next: `Started` once, then the others as things happen, `TimersDue` when `next_timer` has
come, and `InstantOver` when all that happened at one instant has been handed in. What the server sends
within an instant leaves in this order: immediate replies, as each arrival is handled; then, once the
instant is over, the broadcast, the deferred models, and the requests, so that no request overtakes the
model that it is about.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never, cast

import numpy as np
from numpy.random import SeedSequence

from agents import buffers, events, own_code
from agents.aggregator import inputs
from agents.aggregator.actions import (
    Action,
    Actions,
    AskForReport,
    AskForShares,
    Broadcast,
    Dispatch,
    Evaluate,
    Finish,
    Log,
    Save,
    StopClients,
)
from agents.aggregator.dispatches import Dispatched, Dispatches
from agents.aggregator.progress import Progress
from agents.aggregator.settings import Settings
from agents.aggregator.timers import Timer, Timers
from agents.aggregator.validation import MAX_COUNT, Validation
from agents.buffers import Buffers
from agents.config import KEEPALIVE, Named, ServerNoise, silence
from agents.nanoseconds import SECOND, Nanoseconds, from_seconds, to_seconds
from agents.rate_limit import RateLimit
from agents.rules import RULES
from agents.rules import interface as rules
from agents.rules.interface import Kind, Request, Rule, Send, Server, State, SumUp
from agents.secure.masked import Masked
from agents.secure.sums import Sum, Summand, Sums
from agents.texts import visible
from agents.vectors import Vector, add_scaled, norm
from agents.wire import FAREWELL, UpdateMessage, plain_size

_SILENCE = from_seconds(silence(KEEPALIVE))
_DIVERGED = (
    "is not finite, or its norm is above 1.8e19: nothing that is trained from it is of use. The updates "
    "were finite, so it is what the rule makes of them"
)
_GRACE_S = 1.5
"""Seconds of the host that a last evaluation has before the run says that it waits for it, and that it
has at all where the run is interrupted: a process that is told to end is soon killed."""
_IDLE = 2 * SECOND
"""For how long all clients may wait for a model at once."""
_NOTHING_ARRIVED = "nothing arrived"
_STRAYS = 100, 10.0
"""At once, and a second: what of one client's that answers no dispatch is recorded."""
_MAX_REASON = 200
"""Characters of why something was refused: it may quote what a device said."""
_CUT_SHORT = ("interrupted", "no clients left")
"""Ends after which a run can go on."""
_REMEMBERED = 64
"""Latest updates of each client that are known as dealt with: more than it has under way."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a core is made of. With the same model and the same inputs, two cores of one setup do the
    same to the last bit."""

    settings: Settings
    rule: Named
    seed: int

    def core(self, w: Vector, model_buffers: Buffers = buffers.NONE) -> tuple[AggregatorCore, Server]:
        """A core that begins with the model `w`, shape (d,), which it will change, and these buffers;
        and its server."""
        rule = own_code.build(self.rule, RULES, Rule)
        rng = np.random.default_rng(SeedSequence(self.seed, spawn_key=(0, 0)))
        population = self.settings.importance
        server = Server(w, {}, rng, population=population, buffers=model_buffers)
        server.masked = self.settings.secure is not None
        return AggregatorCore(self.settings, rule.begin(server), server), server


@dataclass(frozen=True, slots=True)
class _Arrival:
    """An update that the rule has received. Its vector is not kept: a rule that keeps a running sum is
    to need one model's memory, however many updates go into it."""

    record: partial[events.UpdateApplied]
    """Lacks only what is known when the update is applied."""
    buffers: Buffers
    masked: Masked | None = None
    """Kept until it is summed up."""
    lost_by: set[str] = field(default_factory=set)
    """Clients that have left since, and with them their shares of its mask."""


class AggregatorCore:
    def __init__(self, settings: Settings, rule: State, server: Server) -> None:
        self._settings = settings
        self._rule = rule
        self._server = server
        self._epoch: Nanoseconds = 0
        self._ready: set[str] = set()
        self._running = False
        self._suspended = False
        """All processes were started anew, and the run clock stands still until it goes on."""
        self._timers = Timers()
        self._timers_at_end = Timers()
        """What was set when the run ended, for one that goes on."""
        self._deferred: dict[str, Send] = {}
        self._broadcast_due = False
        self._requested: dict[str, Request] = {}
        """By client: what the rule has requested and not received yet."""
        self._requests_due: dict[str, Request] = {}
        """Those of them that leave when the instant is over."""
        self._dispatches = Dispatches()
        self._asked_about: dict[str, int] = {}
        """By client that owes a report: about which dispatch it was asked last, 0 where it is gone."""
        self.progress = Progress()
        self._stalled_since: Nanoseconds | None = None
        self._acknowledged: dict[str, int] = {}
        self._dealt_with: dict[str, deque[int]] = {}
        """By client: the dispatches that its latest updates answered, whatever became of these."""
        self._arrivals: dict[tuple[str, int], _Arrival] = {}
        """By client and dispatch, in the order of their arrival: what waits to be applied."""
        self._bases: dict[int, Vector] = {}
        """With `keeps_models`: by version, the models that are trained from."""
        secure = settings.secure
        self._sums = None if secure is None else Sums(secure, server.w.size)
        self._validation = Validation(settings, server, self._sums)
        self._summing: dict[int, SumUp] = {}
        """By number, what waits in `_sums`."""
        self._lost: dict[str, dict[int, int]] = {}
        """Of each client that remembers: the dispatches whose updates were lost with their sum, and the
        first dispatch that told it so, 0 for none."""
        self._applied = 0
        self._evaluating: deque[Nanoseconds] = deque()
        """When the models were taken whose evaluation is not done; it is done in this order."""
        self._evaluated_version = -1
        """The last one whose evaluation was requested."""
        self._ending: tuple[Nanoseconds, str] | None = None
        self._finished = False
        self._strays = RateLimit(*_STRAYS)
        self._diverged = False
        """Whether an evaluated model was not finite."""

    # What a shell may ask

    @property
    def ready(self) -> Sequence[str]:
        """The clients that are ready, in device order."""
        return [client for client in self._settings.importance if client in self._ready]

    @property
    def next_timer(self) -> Nanoseconds | None:
        """When `TimersDue` is to be handed in next."""
        return self._timers.next

    @property
    def rule_waits(self) -> bool:
        """Whether the rule will do something by itself, at a time that it has set."""
        return self._timers.any_of_rule

    @property
    def epoch(self) -> Nanoseconds | None:
        """What the clients' own clocks showed at time 0; None while the run clock stands still."""
        return self._epoch if self._running and not self._suspended else None

    @property
    def ended(self) -> Nanoseconds | None:
        """When the run ended, but for its last evaluation; None: it has not."""
        return None if self._ending is None else self._ending[0]

    @property
    def cut_short(self) -> bool:
        """Whether the run has ended in a way after which it can go on; updates are to wait for that."""
        return self._ending is not None and self._ending[1] in _CUT_SHORT

    @property
    def finished(self) -> bool:
        """Whether `Finish` has been among the actions."""
        return self._finished

    @property
    def evaluating_since(self) -> float:
        """When the model was taken whose evaluation is handed in next, in seconds."""
        return to_seconds(self._evaluating[0])

    def awaits(self, client: str, dispatch: int) -> bool:
        """Whether `dispatch` is open to `client`: that answers it once."""
        return self._dispatches.find(client, dispatch) is not None

    def has(self, client: str, dispatch: int) -> bool:
        """Whether the answer of `client` to `dispatch` was handed in before: applied, in the rule's
        buffer, or reported as rejected."""
        return dispatch in self._dealt_with.get(client, ())

    def awaits_shares(self, client: str, number: int) -> bool:
        """Whether the answer of `client` to `AskForShares` number `number` is of use."""
        found = None if self._sums is None else self._sums.waiting.get(number)
        return found is not None and client in found.holders and client not in found.answers

    def silent_since(self, at: Nanoseconds) -> Nanoseconds | None:
        """Since when nothing has arrived, where at time `at` something should have; else None."""
        if self.epoch is None or self._ending:
            return None
        open_since = {c: d.at for c in self._server.clients if (d := self._dispatches.first_open(c))}
        since = max([self.progress.last, *open_since.values()])
        if open_since:
            patience = self.progress.patience(self._server.clients, open_since)
        elif self.rule_waits or len(self._server.clients) < len(self._settings.importance):
            return None
        else:  # nobody trains, and nobody else can come
            patience = _IDLE
        return since if at - since > patience else None

    # Inputs

    def handle(self, event: inputs.Input) -> Actions:
        """What is to be done because of `event`. Nothing, once `Finish` has been among the actions, but
        for a run that was cut short and goes on."""
        if self._finished and not isinstance(event, inputs.Suspended):
            return []
        actions = self._handle(event)
        if self._ending is None or self._evaluating or self._finished:
            return actions
        return [*actions, *self._close_books(*self._ending)]

    def _handle(self, event: inputs.Input) -> Actions:
        match event:
            case inputs.UpdateArrived():
                return self._update_arrived(event)
            case inputs.SharesSummed(at, client, message):
                return self._shares_summed(client, message, at)
            case inputs.InstantOver(at):
                return self._end_of_instant(at)
            case inputs.TimersDue(at):
                return self._fire_due_timers(at)
            case inputs.StatusChanged(at, client, state):
                return self._status_changed(client, state, at)
            case inputs.EvaluationDone():
                return self._evaluation_done(event)
            case inputs.Reported():
                return self._reported(event)
            case inputs.Reconnected(at, since):
                return self._disrupted("the aggregator had no connection to the broker", since, at)
            case inputs.Stalled(at, since):
                return self._stalled(since, at)
            case inputs.Unreadable(at, sender, reason):
                return self._stray(sender, reason, at)
            case inputs.EndRequested(at, reason):
                return self._interrupt(reason, at)
            case inputs.Started():
                return self._resume(event) if self._suspended else self._start(event)
            case inputs.Suspended():
                return self._suspend()
            case _:
                assert_never(event)

    def _fire_due_timers(self, at: Nanoseconds) -> Actions:
        """Fire every timer that is due at time `at`, the earliest first."""
        actions: list[Action] = []
        while (popped := self._timers.pop(at)) is not None:
            actions += self._fire(*popped, at)
        return actions

    def _fire(self, timer: Timer, due: Nanoseconds, at: Nanoseconds) -> Actions:
        """What `timer` is for, at `at`, which may be later than it was `due`."""
        match timer:
            case ("rule", str(name)):
                return self._carry_out(self._rule.timer(name), at, ticked=due)
            case "evaluate":
                return self._evaluate(at)
            case "checkpoint":
                return [Save(self._server.version)]
            case ("shares", int(number)) if self._sums is not None:
                return self._lose_sum(self._sums.waiting[number], self._sums, at)
            case ("report", str(client)):
                gone = self._status_changed(client, "offline", at)
                # Where it is only slow to answer, it is back as soon as it does.
                self._asked_about[client] = 0
                return gone
            case "after":
                return self._end("after", at)
            case "waiting" if self._ending is not None:
                return self._tell_of_waiting(self._ending[0])
            case "give up" if self._ending is not None:
                return self._give_up("the run waits no longer", *self._ending)
        raise RuntimeError(f"a timer {timer} that cannot be set now")

    def _end_of_instant(self, at: Nanoseconds) -> Actions:
        """Send what waited for the end of this instant: models first, then the requests about them."""
        if self._suspended:
            return []
        actions: list[Action] = []
        if self._broadcast_due:
            self._broadcast_due = False
            version = self._server.version
            if self._settings.keeps_models:
                self._keep_model()
            number = self._dispatches.broadcast(version, at, self._server.clients)
            actions.append(Broadcast(version, number))
        actions += [self._dispatch(send, at) for send in self._deferred.values()]
        actions += self._requests_due.values()
        self._deferred.clear()
        self._requests_due.clear()
        return actions

    # The run clock starts, stands still, and goes on

    def _start(self, started: inputs.Started) -> Actions:
        """The run clock starts, with the clients that are ready now."""
        at = started.at
        self._epoch = started.epoch
        self._server.began = at
        self._running = True
        self.progress.went_on(at)
        self._set_present(self._ready)
        self._timers.set_periodic("evaluate", self._settings.evaluate_every, at)
        if self._settings.checkpoint_every is not None:
            self._timers.set_periodic("checkpoint", self._settings.checkpoint_every, at)
        if self._settings.stop.after is not None:
            self._timers.set("after", from_seconds(self._settings.stop.after))
        return [*self._clock_starts(started), *self._carry_out(self._rule.start(), at)]

    def _suspend(self) -> Actions:
        """The run clock stands still. An end that only cut the run short is undone."""
        if self.cut_short:
            self._ending, self._finished = None, False
            self._timers = self._timers_at_end
        self._suspended = self._running and self._ending is None
        self._ready.clear()
        for client in [*self._asked_about]:
            self._expect_no_report(client)
        self.progress, self._stalled_since = Progress(), None
        return []

    def _resume(self, started: inputs.Started) -> Actions:
        """The run clock goes on. To the rule, who was present leaves, and who is ready joins: one client
        after the other, as rules make do with what they have where everybody leaves."""
        at = started.at
        self._epoch = started.epoch
        self.progress.went_on(at)
        present = set(self._server.clients)
        changes: list[Action] = []
        for client in self._settings.importance:
            if client in present:
                changes += self._leave(client, at)
            if client in self._ready:
                changes += self._join(client, at)
        self._suspended = False
        return [*self._clock_starts(started), *changes]

    def _clock_starts(self, started: inputs.Started) -> list[Action]:
        """The run clock starts, or goes on, with the clients that are present now."""
        clients = tuple(self._server.clients)
        missing = tuple(c for c in self._settings.importance if c not in self._server.clients)
        at = to_seconds(started.at)
        return [
            Log(events.RunStarted(at, started.wall_clock, clients, missing)),
            Save(self._server.version),
            *self._evaluate(started.at),
        ]

    # Clients come and go

    def _status_changed(self, client: str, state: str, at: Nanoseconds) -> Actions:
        """A client is present from `ready` until `joining` (it starts anew) or `offline`."""
        if client not in self._settings.importance or self._ending:
            return []
        present = client in self._ready
        if state == "joining":
            self._dispatches.restart(client)
        if state in ("joining", "offline"):
            self._ready.discard(client)
        elif state == "ready":
            self._ready.add(client)
        if not self._running or self._suspended:
            return []
        actions: list[Action] = [Log(events.ClientStatus(to_seconds(at), client, state))]
        if present and client not in self._ready:
            actions += self._leave(client, at)
            if not self._server.clients and not self._settings.patient:
                actions += self._end("no clients left", at)
        elif client in self._ready and not present:
            actions += self._join(client, at)
        elif state == "ready" and present:  # it has connected anew: something may be lost
            actions += self._ask_for_report(client, at)
        return actions

    def _join(self, client: str, at: Nanoseconds) -> list[Action]:
        self._set_present({*self._server.clients, client})
        return self._carry_out(self._rule.join(client), at)

    def _leave(self, client: str, at: Nanoseconds) -> list[Action]:
        del self._server.clients[client]
        self._expect_no_report(client)
        unfinished = self._unanswered(client, at)
        self._dispatches.forget(client)
        for waiting in (self._requested, self._requests_due, self._deferred):
            waiting.pop(client, None)
        lost = [] if self._sums is None else self._lose_shares_of(client, self._sums, at)
        return [*unfinished, *lost, *self._carry_out(self._rule.leave(client), at)]

    def _rejoin(self, client: str, at: Nanoseconds) -> list[Action]:
        """The work of `client` came to nothing. It waits for a model, and perhaps the rule for it: to
        the rule it leaves and joins again, which both know how to go on from."""
        return [*self._leave(client, at), *self._join(client, at)]

    def _farewell(self, sender: str, message: UpdateMessage, at: Nanoseconds) -> Actions:
        """`sender` leaves for good and hands in what it remembers of its last applied update, or says
        (as of update 0) that none was applied. From then on its numbers are forgotten: if it comes back,
        it begins as one that never was here."""
        acknowledged = self._acknowledged.get(sender, 0)
        told = message.run, message.client, message.sequence
        if told != (self._settings.run, sender, acknowledged) or self._sums is not None:
            return []
        if acknowledged and (problem := self._validation.unfit(message.vector)) is not None:
            return self._reject(sender, problem, at)
        self._acknowledged.pop(sender, None)
        memory = message.vector if acknowledged else None
        return self._carry_out(self._rule.retire(sender, memory), at)

    def _set_present(self, present: Container[str]) -> None:
        """Bring the rule's view of who is present up to date: in place, in device order."""
        importance = self._settings.importance.items()
        now = {client: p for client, p in importance if client in present}
        self._server.clients.clear()
        self._server.clients.update(now)

    # Messages that may be lost

    def _stalled(self, since: Nanoseconds, at: Nanoseconds) -> Actions:
        if self._stalled_since is None:
            self._stalled_since = since
        self.progress.went_on(at)  # it counts anew, and asks again if this does not help
        asked = self._disrupted(_NOTHING_ARRIVED, self._stalled_since, at)
        clients = list(self._server.clients)
        if any(self._dispatches.newest_open(client) for client in clients):
            return asked
        return [*asked, *(action for client in clients for action in self._rejoin(client, at))]

    def _stall_ends(self, at: Nanoseconds) -> list[Action]:
        since, self._stalled_since = self._stalled_since, None
        if since is None:
            return []
        return [Log(events.Disrupted(to_seconds(at), to_seconds(since), _NOTHING_ARRIVED))]

    def _disrupted(self, reason: str, since: Nanoseconds, at: Nanoseconds) -> Actions:
        """Record it, and ask who is there what has come of the models that it was sent."""
        if self.epoch is None or self._ending:
            return []
        record = events.Disrupted(to_seconds(at), to_seconds(since), reason)
        return [
            Log(record),
            *(ask for client in self._server.clients for ask in self._ask_for_report(client, at)),
        ]

    def _ask_for_report(self, client: str, at: Nanoseconds) -> list[Action]:
        newest = self._asked_about[client] = self._dispatches.newest_open(client)
        self._timers.set(("report", client), at + self._settings.silence.get(client, _SILENCE))
        return [AskForReport(client, newest)]

    def _expect_no_report(self, client: str) -> None:
        """`client` need not answer any more."""
        self._timers.cancel(("report", client))
        self._asked_about.pop(client, None)

    def _reported(self, event: inputs.Reported) -> Actions:
        """A client will answer `dispatch`, as of when it was asked about another one. Where that other
        one is newer and still open, it or its update was lost: the client gets a model in its place, of
        which the rule, which waits for the answer, need not know."""
        client, about, at = event.client, event.about, event.at
        asked = self._asked_about.get(client, -1)
        if asked >= 0 and client not in self._server.clients:  # it was taken for gone
            self._expect_no_report(client)
            return self._status_changed(client, "ready", at)
        if about > asked or self._ending:
            return []
        if about == asked:  # else it was asked again meanwhile, and that answer is to come
            self._expect_no_report(client)
            self._request_again(client)  # for its update: that request may be lost
        lost = self._dispatches.find(client, about)
        if lost is None or event.dispatch >= about:
            return []
        self._dispatches.answered(client, about)
        again = self._dispatch(Send(client, lr=lost.lr), at)
        return [self._unfinished(client, lost, about, at, at), again]

    # Updates arrive

    def _update_arrived(self, event: inputs.UpdateArrived) -> Actions:
        if not self._running or self.cut_short:
            return []
        at, sender, message = event.at, event.sender, event.message
        if message.kind == FAREWELL:
            return [] if self._ending else self._farewell(sender, message, at)
        is_new = message.sequence > 0 and not self.has(sender, message.dispatch)
        dispatch = self._open_dispatch(sender, message)
        ours = (message.run, message.client) == (self._settings.run, sender)
        if is_new and ours and self._dispatches.were_sent(message.dispatch):
            self._dealt_with.setdefault(sender, deque(maxlen=_REMEMBERED)).append(message.dispatch)
        number = message.dispatch if self._dispatches.were_sent(message.dispatch) else 0
        if self._ending is not None:
            ended = to_seconds(self._ending[0])
            late = "arrived after the run had ended"
            return [Log(events.UpdateRejected(ended, sender, late, number))]
        if isinstance(dispatch, str):
            if is_new:
                self._request_again(sender)
            return self._stray(sender, dispatch, at, number)
        self._dispatches.answered(sender, message.dispatch)
        self.progress.arrived(sender, event.arrived - dispatch.at, at)
        return [*self._stall_ends(at), *self._give_to_rule(event, dispatch)]

    def _open_dispatch(self, sender: str, message: UpdateMessage) -> Dispatched | str:
        """The open dispatch of `sender` that `message` answers, or why it answers none: a stray, by
        which nothing changes."""
        if sender not in self._server.clients:
            return "from a client that is not present"
        if (message.run, message.client) != (self._settings.run, sender):
            return f"says it is from {message.client} in run {message.run}"
        if message.sequence < 1 or self.has(sender, message.dispatch):
            return f"duplicate: sequence {message.sequence}"
        dispatch = self._dispatches.find(sender, message.dispatch)
        return dispatch or f"answers dispatch {message.dispatch}, which is not open"

    def _give_to_rule(self, event: inputs.UpdateArrived, dispatch: Dispatched) -> Actions:
        """Give the rule an update, which answers `dispatch`, if it can be used."""
        at, sender = event.at, event.sender
        # While the clock stands still a client that outlived it is ahead of it.
        end = MAX_COUNT if self._suspended else self._epoch + event.arrived
        message = self._validation.usable(
            event, dispatch, self._bases.get(dispatch.version), self._epoch + dispatch.at, end
        )
        if isinstance(message, str):
            number = event.message.dispatch
            unfinished = self._unfinished(sender, dispatch, number, at, event.arrived)
            rejected = [*self._reject(sender, message, at, number), unfinished]
            if not self._dispatches.has_open(sender):
                return [*rejected, *self._rejoin(sender, at)]
            self._request_again(sender)
            return rejected
        vector = message.vector
        clipped: list[Action] = []
        if (length := self._validation.over_norm(message)) is not None:
            vector = self._validation.clipped(message, length)
            clipped.append(Log(events.UpdateClipped(to_seconds(at), sender, length)))
        self._requested.pop(sender, None)
        self._requests_due.pop(sender, None)
        arrival = _Arrival(self._record_of(event, dispatch), message.buffers, message.masked)
        self._arrivals[sender, message.dispatch] = arrival
        update = rules.Update(
            client=sender,
            dispatch=message.dispatch,
            base_version=message.base_version,
            vector=vector,
            kind=cast(Kind, message.kind),
            samples=message.samples,
            steps=message.steps,
            effective_steps=message.effective_steps,
            round_trip=event.arrived - dispatch.at,
            dispatched=dispatch.at,
        )
        wanted = self._rule.update(update)
        ignored = any(isinstance(action, rules.Ignored) for action in wanted)
        if ignored and self._settings.side.kind == "residual":
            self._acknowledged.pop(sender, None)  # the rule does not know what it remembers by now
            self._lost.pop(sender, None)
        else:
            self._acknowledged[sender] = message.sequence
            self._heard_of_losses(sender, message.dispatch)
        done = self._carry_out(wanted, at, update)
        return [*clipped, *done] if clipped else done

    def _record_of(
        self, event: inputs.UpdateArrived, dispatch: Dispatched
    ) -> partial[events.UpdateApplied]:
        """The record of an update, which answers `dispatch`, but for what is known at application."""
        message, epoch, before = event.message, self._epoch, event.size
        masked = message.masked
        if message.compressed is not None:
            before = plain_size(message, message.compressed.size)
        elif masked is not None:
            before = plain_size(message, masked.words.size)
        return partial(
            events.UpdateApplied,
            client=event.sender,
            sequence=message.sequence,
            kind=message.kind,
            base_version=message.base_version,
            samples=message.samples,
            steps=message.steps,
            loss=message.loss,
            bytes=event.size,
            bytes_before=float(before),
            dispatched=to_seconds(dispatch.at),
            downloaded=to_seconds(message.downloaded - epoch),
            train_start=to_seconds(message.train_start - epoch),
            train_end=to_seconds(message.train_end - epoch),
            sent=to_seconds(message.sent - epoch),
            arrived=to_seconds(event.arrived),
            dispatch=message.dispatch,
            masking=0.0 if masked is None else to_seconds(masked.took),
            outside=0 if masked is None else masked.outside,
        )

    def _reject(self, sender: str, reason: str, at: Nanoseconds, dispatch: int = 0) -> list[Action]:
        """What `sender` sent, an answer to `dispatch` as far as is known, cannot be used; the run goes
        on."""
        if not self._running or self._ending:
            return []
        why = visible(reason, _MAX_REASON)
        return [Log(events.UpdateRejected(to_seconds(at), sender, why, dispatch))]

    def _stray(self, sender: str, reason: str, at: Nanoseconds, dispatch: int = 0) -> list[Action]:
        """What `sender` sent answers no dispatch. There can be any number of them, unlike of updates,
        for each of which there was a model."""
        rejected = self._reject(sender, reason, at, dispatch)
        return rejected if rejected and self._strays.admits(sender, to_seconds(at)) else []

    def _request_again(self, client: str) -> None:
        """The update that the rule has requested was of no use: the rule still waits for one."""
        if client in self._requested:
            self._requests_due[client] = self._requested[client]

    def _unanswered(self, client: str, at: Nanoseconds) -> list[Log]:
        """The record of what `client` has been sent and not answered until now."""
        dispatch, newest = self._dispatches.first_open(client), self._dispatches.newest_open(client)
        return [] if dispatch is None else [self._unfinished(client, dispatch, newest, at, at)]

    @staticmethod
    def _unfinished(
        client: str, dispatch: Dispatched, number: int, at: Nanoseconds, until: Nanoseconds
    ) -> Log:
        begun, now = to_seconds(dispatch.at), to_seconds(at)
        record = events.RoundUnfinished(now, client, dispatch.version, begun, to_seconds(until), number)
        return Log(record)

    # What the rule wants

    def _carry_out(
        self,
        actions: rules.Actions,
        at: Nanoseconds,
        update: rules.Update | None = None,
        ticked: Nanoseconds | None = None,
    ) -> list[Action]:
        """Carry out what the rule wants; it was just given `update`, or the timer due at `ticked`."""
        done: list[Action] = []
        for action in actions:
            match action:
                case rules.Aggregated():
                    done += self._version_made(action, at)
                case rules.Ignored(reason) if update is not None:
                    arrival = self._arrivals.pop((update.client, update.dispatch))
                    rejected = self._reject(update.client, reason, at, update.dispatch)
                    done += [*rejected, _unapplied(arrival.record, at)]
                case rules.Remark(text):
                    done.append(Log(events.Note(to_seconds(at), text)))
                case _ if self._ending:
                    continue  # the last version is made: no models, no timers
                case SumUp() if self._sums is not None:
                    done += self._sum_up(action, self._sums, at)
                case Send(client, deferred) if deferred or self._suspended:
                    self._deferred[client] = action
                case Send():
                    done.append(self._dispatch(action, at))
                case rules.Broadcast():
                    self._broadcast_due = True
                case Request(client):
                    self._requested[client] = self._requests_due[client] = action
                case rules.SetTimer(name, after):
                    # A late timer does not make the next ones late: they count from when it was due.
                    self._timers.set(("rule", name), (at if ticked is None else ticked) + after)
                case rules.SetPeriodicTimer(name, period):
                    self._timers.set_periodic(("rule", name), period, at)
        return done

    def _dispatch(self, send: Send, at: Nanoseconds) -> Dispatch:
        version = self._server.version
        if self._settings.keeps_models:
            self._keep_model()
        client = send.client
        number = self._dispatches.send(client, version, at, send.lr)
        known = self._acknowledged.get(client, 0)
        if self._sums is None or self._settings.side.kind != "residual":
            return Dispatch(client, version, number, send.lr, known)
        waiting = tuple(dispatch for sender, dispatch in self._arrivals if sender == client)
        lost = self._lost.get(client, {})
        for dispatch, told in lost.items():
            lost[dispatch] = told or number
        return Dispatch(client, version, number, send.lr, known, waiting, tuple(lost))

    def _keep_model(self) -> None:
        """The model is about to be sent, and perhaps what comes of it as the difference to it."""
        version = self._server.version
        if version in self._bases:
            return
        wanted = self._dispatches.open_versions(self._server.clients)
        self._bases = {known: w for known, w in self._bases.items() if known in wanted}
        self._bases[version] = self._server.w.copy()

    def _version_made(self, aggregated: rules.Aggregated, at: Nanoseconds) -> list[Action]:
        version, now = aggregated.version, to_seconds(at)
        records: list[Action] = []
        if self._settings.noise is not None and aggregated.contributions:
            largest = max(used.weight for used in aggregated.contributions)
            self._add_noise(self._settings.noise, version, largest)
        if self._server.buffers and aggregated.contributions:
            self._average_buffers(aggregated.contributions)
        for used in aggregated.contributions:
            applied = self._arrivals.pop((used.client, used.dispatch)).record(
                applied_version=version,
                staleness=version - 1 - used.base_version,
                weight=used.weight,
                applied=now,
            )
            records.append(Log(applied))
        count = len(records)
        self._applied += count
        records.append(Log(events.VersionMade(now, version, count)))
        limit = self._settings.stop.updates
        if limit is not None and self._applied >= limit:
            records += self._end("updates", at)
        return records

    def _add_noise(self, noise: ServerNoise, version: int, weight: float) -> None:
        """w ← w + weight · N(0, std²); what is drawn follows from the version."""
        rng = np.random.default_rng(SeedSequence(noise.seed, spawn_key=(0, 1, version)))
        drawn = rng.standard_normal(self._server.w.size, np.float32)
        add_scaled(self._server.w, drawn, weight * noise.std)

    def _average_buffers(self, contributions: Sequence[rules.Contribution]) -> None:
        """Those of the version that `contributions` make. Integers are of the one that arrived last."""
        weights = {(used.client, used.dispatch): used.weight for used in contributions}
        arrived = [key for key in self._arrivals if key in weights]
        self._server.buffers = buffers.averaged(
            self._server.buffers,
            [(weights[key], self._arrivals[key].buffers) for key in arrived],
            shares=self._settings.side.kind in ("model", "residual"),
        )

    # Secure sums

    def _sum_up(self, wanted: SumUp, sums: Sums, at: Nanoseconds) -> list[Action]:
        """Ask those who hold shares of the masks of these updates for their sums."""
        summands, lost_by = [], {}
        for used in wanted.contributions:
            key = used.client, used.dispatch
            arrival = self._arrivals[key]
            if arrival.masked is None:
                raise RuntimeError("an update that is not masked")
            summands.append(Summand(*key, used.weight, arrival.masked))
            lost_by[key] = arrival.lost_by
        found = sums.begin(summands, lost_by)
        found.holders &= self._server.clients.keys()
        self._summing[found.number] = wanted
        if sums.lost(found):
            return self._lose_sum(found, sums, at)
        timeout = from_seconds(sums.settings.timeout)
        self._timers.set(("shares", found.number), at + timeout)
        asked = self._server.in_order(found.holders)
        return [AskForShares(client, found.number, found.wanted) for client in asked]

    def _shares_summed(self, client: str, message: inputs.SharesSum, at: Nanoseconds) -> Actions:
        """An answer to `AskForShares`; what is late, as enough others were faster, is of no use."""
        sums, words = self._sums, message.words
        if sums is None or not self._running or self._ending:
            return []
        if words is not None and words.size != sums.code.length:
            return self._stray(client, f"a sum of shares of {words.size} words", at)
        found = sums.answer(message.number, client, words)
        if found is None:
            return []
        if sums.complete(found):
            return self._open_sum(found, sums, at)
        return self._lose_sum(found, sums, at) if sums.lost(found) else []

    def _open_sum(self, found: Sum, sums: Sums, at: Nanoseconds) -> list[Action]:
        """The model moves by a sum that enough clients have opened."""
        wanted = self._summing.pop(found.number)
        self._timers.cancel(("shares", found.number))
        largest = sums.settings.largest_weight
        used = tuple(
            replace(one, weight=found.weights[one.client, one.dispatch] / largest)
            for one in wanted.contributions
        )
        summed = self._rule.summed(replace(wanted, contributions=used), sums.opened(found))
        return self._version_made(summed, at)

    def _lose_sum(self, found: Sum, sums: Sums, at: Nanoseconds) -> list[Action]:
        """Too few are left to open a sum: nothing comes of its updates."""
        wanted = self._summing.pop(found.number)
        self._timers.cancel(("shares", found.number))
        del sums.waiting[found.number]
        reason = (
            f"its buffer is lost: {len(found.answers)} of {sums.settings.needed} clients that are "
            f"needed have answered, and {len(found.holders)} could"
        )
        lost: list[Action] = []
        for used in wanted.contributions:
            arrival = self._arrivals.pop((used.client, used.dispatch))
            rejected = self._reject(used.client, reason, at, used.dispatch)
            lost += [*rejected, _unapplied(arrival.record, at)]
            if self._settings.side.kind == "residual":
                self._lost.setdefault(used.client, {})[used.dispatch] = 0
        what = f"a buffer of {len(wanted.contributions)} updates{reason.removeprefix('its buffer')}"
        return [*lost, Log(events.Note(to_seconds(at), what))]

    def _lose_shares_of(self, client: str, sums: Sums, at: Nanoseconds) -> list[Action]:
        """`client` is gone, and perhaps too many by now."""
        for arrival in self._arrivals.values():
            arrival.lost_by.add(client)
        touched = sums.gone(client)
        return [
            done for found in touched if sums.lost(found) for done in self._lose_sum(found, sums, at)
        ]

    def _heard_of_losses(self, client: str, number: int) -> None:
        """`client` has answered dispatch `number`, and so knows what that told it."""
        if client in self._lost:
            told = self._lost[client].items()
            self._lost[client] = {one: first for one, first in told if not 0 < first <= number}

    # Evaluations, and the end

    def _evaluate(self, at: Nanoseconds) -> list[Action]:
        """Evaluate, unless the last evaluation is still going or nothing changed since."""
        version = self._server.version
        waits = bool(self._evaluating) and not self._settings.evaluate_after
        if waits or version == self._evaluated_version:
            return []
        self._evaluating.append(at)
        self._evaluated_version = version
        if self._diverged or norm(self._server.w) < math.inf:
            return [Evaluate(version)]
        self._diverged = True
        note = events.Note(to_seconds(at), f"version {version} of the model {_DIVERGED}")
        return [Log(note), Evaluate(version)]

    def _evaluation_done(self, done: inputs.EvaluationDone) -> Actions:
        if not self._evaluating:
            raise RuntimeError("an evaluation that was not requested")
        taken = self._evaluating.popleft()
        log = Log(events.Evaluated(to_seconds(taken), done.version, done.loss, done.accuracy))
        target = self._settings.stop.target_accuracy
        if target is not None and done.accuracy >= target:
            return [log, *self._end("target_accuracy", done.at)]
        return [log]

    @property
    def _unevaluated(self) -> int:
        """Models whose evaluation is not done, of a run that has ended."""
        return len(self._evaluating) + (self._server.version != self._evaluated_version)

    def _interrupt(self, reason: str, at: Nanoseconds) -> list[Action]:
        """End the run now; where it has ended already, do not wait for its last evaluation."""
        if self._settings.last_evaluation is None or self._ending is None:
            return self._end(reason, at, _GRACE_S)
        return self._give_up("the run was interrupted", *self._ending)

    def _end(self, reason: str, at: Nanoseconds, timeout: float = math.inf) -> list[Action]:
        """The run is over; the final model is evaluated before the books are closed, which waits for it
        as long as the settings say and `timeout`, in seconds of the host, at most."""
        if not self._running or self._ending:
            return []
        self._ending = (at, reason)
        self._timers_at_end, self._timers = self._timers, Timers()
        self._deferred.clear()
        self._requests_due.clear()
        self._broadcast_due = False
        if (last := self._settings.last_evaluation) is not None:
            timeout = min(timeout, math.inf if last.timeout is None else last.timeout)
            if timeout > _GRACE_S:
                self._timers.set("waiting", at + from_seconds(_GRACE_S / last.dilation))
            if timeout < math.inf:
                self._timers.set("give up", at + from_seconds(timeout / last.dilation))
        return [StopClients()]

    def _tell_of_waiting(self, ended: Nanoseconds) -> list[Action]:
        """The run, which `ended`, has waited for its last evaluation for a while. The run clock stands
        still: that is when its records are from."""
        last, count = self._settings.last_evaluation, self._unevaluated
        what = "evaluation is" if count == 1 else f"{count} evaluations are"
        text = f"the run is over; its last {what} waited for"
        if last is not None and last.timeout is not None:
            text += f", at most {last.timeout:g} s (without limit: evaluate: {{when: after}})"
        return [Log(events.Note(to_seconds(ended), text))]

    def _give_up(self, why: str, ended: Nanoseconds, reason: str) -> list[Action]:
        """Close the books without the evaluations that are not done."""
        count = self._unevaluated
        what = "the last model was" if count == 1 else f"the last {count} models were"
        note = events.Note(to_seconds(ended), f"{what} not evaluated: {why}")
        return [Log(note), *self._finish(ended, reason)]

    def _close_books(self, at: Nanoseconds, reason: str) -> Actions:
        """The last records, once the final model has been evaluated; the run ended `at`."""
        return self._evaluate(at) or self._finish(at, reason)

    def _finish(self, at: Nanoseconds, reason: str) -> list[Action]:
        self._finished = True
        self._timers = Timers()
        return [
            *self._left_in_buffer(at),
            *self._stall_ends(at),
            *(_unapplied(arrival.record, at) for arrival in self._arrivals.values()),
            *(log for client in self._server.clients for log in self._unanswered(client, at)),
            *(
                Log(events.Note(to_seconds(at), f"{count} more messages of {client} were rejected"))
                for client, count in self._strays.refused.items()
            ),
            Save(self._server.version, final=True),
            Log(events.RunEnded(to_seconds(at), reason, self._server.version, self._applied)),
            Finish(reason),
        ]

    def _left_in_buffer(self, at: Nanoseconds) -> list[Log]:
        """What becomes of the updates that the rule has received and not applied."""
        now, count = to_seconds(at), len(self._arrivals)
        if self.cut_short:
            what = f"not applied yet, but in the rule's buffer: {count}"
            return [Log(events.Note(now, f"updates {what}"))] if count else []
        reason = "in the rule's buffer when the run ended"
        return [
            Log(events.UpdateRejected(now, client, reason, number)) for client, number in self._arrivals
        ]


def _unapplied(arrival: partial[events.UpdateApplied], at: Nanoseconds) -> Log:
    """The record of an update that arrived and was not applied."""
    known = arrival.keywords
    return Log(
        events.RoundUnfinished(
            at=to_seconds(at),
            client=known["client"],
            base_version=known["base_version"],
            dispatched=known["dispatched"],
            until=known["arrived"],
            dispatch=known["dispatch"],
        )
    )
