"""The aggregator's state machine: events in, actions out. No clock, no socket, no disk.

It guards the rule (who is present, which updates are valid), keeps the run's books (records, stop
conditions, when to evaluate) and leaves the mathematics, and who gets a model when, to the rule. What it
has to remember is in parts, each pure and in a module of its own: `dispatches`, `arrivals`, `outgoing`,
`losses`, `evaluations`, `timers`, `progress`; `validation` says which updates a rule can be given.

A shell hands it every input through `handle`, and carries out all the actions of one input before it
hands in the next: `Started` once, then the others as things happen, `TimersDue` when `next_timer` has
come, and `InstantOver` when all that happened at one instant has been handed in. What the server sends
within an instant leaves in this order: immediate replies, as each arrival is handled; then, once the
instant is over, the broadcast, the deferred models, and the requests, so that no request overtakes the
model that it is about.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import assert_never, cast

import numpy as np
from numpy.random import SeedSequence

from agents import events, own_code
from agents.aggregator import inputs
from agents.aggregator.actions import (
    Action,
    Actions,
    AskForReport,
    AskForShares,
    Broadcast,
    Dispatch,
    Finish,
    Log,
    Save,
    StopClients,
)
from agents.aggregator.arrivals import Arrivals
from agents.aggregator.dispatches import Dispatched, Dispatches
from agents.aggregator.evaluations import Evaluations
from agents.aggregator.losses import Losses
from agents.aggregator.outgoing import Outgoing
from agents.aggregator.progress import Progress
from agents.aggregator.settings import Settings
from agents.aggregator.timers import Timer, Timers
from agents.aggregator.validation import MAX_COUNT, Validation
from agents.config import Named, silence
from agents.models import buffers
from agents.models.buffers import Buffers
from agents.models.vectors import Vector
from agents.mqtt.rate_limit import RateLimit
from agents.pipeline import ServerSteps
from agents.pipeline.interface import Asked, Lost, Opened, SummingStep
from agents.rules import RULES
from agents.rules import interface as rules
from agents.rules.interface import Kind, Request, Rule, Send, Server, State, SumUp
from agents.texts import visible
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds, to_seconds
from agents.wire.payloads import FAREWELL, UpdateMessage

_SILENCE = from_seconds(silence())
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
        server.masked = ServerSteps(self.settings.steps, w.size).sums is not None
        return AggregatorCore(self.settings, rule.begin(server), server), server


class AggregatorCore:
    def __init__(self, settings: Settings, rule: State, server: Server) -> None:
        self._settings = settings
        self._steps = steps = ServerSteps(settings.steps, server.w.size)
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
        self._outgoing = Outgoing()
        self._dispatches = Dispatches()
        self._asked_about: dict[str, int] = {}
        """By client that owes a report: about which dispatch it was asked last, 0 where it is gone."""
        self.progress = Progress()
        self._stalled_since: Nanoseconds | None = None
        self._acknowledged: dict[str, int] = {}
        self._arrivals = Arrivals()
        self._bases: dict[int, Vector] = {}
        """With `keeps_models`: by version, the models that are trained from."""
        self._validation = Validation(settings, server, steps)
        self._sums = steps.sums
        self._losses = Losses()
        self._applied = 0
        self._evaluations = Evaluations(several=settings.evaluate_after)
        self._ending: tuple[Nanoseconds, str] | None = None
        self._finished = False
        self._strays = RateLimit(*_STRAYS)

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
        return to_seconds(self._evaluations.since)

    def awaits(self, client: str, dispatch: int) -> bool:
        """Whether `dispatch` is open to `client`: that answers it once."""
        return self._dispatches.find(client, dispatch) is not None

    def has(self, client: str, dispatch: int) -> bool:
        """Whether the answer of `client` to `dispatch` was handed in before: applied, in the rule's
        buffer, or reported as rejected."""
        return self._dispatches.were_dealt_with(client, dispatch)

    def awaits_shares(self, client: str, number: int) -> bool:
        """Whether the answer of `client` to `AskForShares` number `number` is of use."""
        return self._sums is not None and self._sums.awaits(client, number)

    def silent_since(self, at: Nanoseconds) -> Nanoseconds | None:
        """Since when nothing has arrived, where at time `at` something should have; else None."""
        if self.epoch is None or self._ending:
            return None
        open_since = self._open_since()
        since = max([self.progress.last, *open_since.values()])
        if open_since:
            patience = self.progress.patience(self._server.clients, open_since)
        elif self.rule_waits or len(self._server.clients) < len(self._settings.importance):
            return None
        else:  # nobody trains, and nobody else can come
            patience = _IDLE
        return since if at - since > patience else None

    def overdue(self, at: Nanoseconds) -> dict[str, Nanoseconds]:
        """When the model was sent that each client is to answer, for those that take far longer than
        for any round before."""
        if self.epoch is None or self._ending:
            return {}
        patience = self.progress.patience_with
        return {c: began for c, began in self._open_since().items() if at - began > patience(c)}

    def _open_since(self) -> dict[str, Nanoseconds]:
        """When the oldest model was sent that each client may still answer."""
        return {c: d.at for c in self._server.clients if (d := self._dispatches.first_open(c))}

    # Inputs

    def handle(self, event: inputs.Input) -> Actions:
        """What is to be done because of `event`. Nothing, once `Finish` has been among the actions, but
        for a run that was cut short and goes on."""
        if self._finished and not isinstance(event, inputs.Suspended):
            return []
        actions = self._handle(event)
        if self._ending is None or self._evaluations or self._finished:
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
                return self._settle(self._sums.give_up(number), at)
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
        broadcast, sends, requests = self._outgoing.take()
        actions: list[Action] = []
        if broadcast:
            version = self._server.version
            self._keep_model()
            number = self._dispatches.broadcast(version, at, self._server.clients)
            actions.append(Broadcast(version, number))
        return [*actions, *(self._dispatch(send, at) for send in sends), *requests]

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
        self._outgoing.forget(client)
        missed = [] if self._sums is None else self._sums.gone(client)
        lost = [action for one in missed for action in self._settle(one, at)]
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
            self._outgoing.request_again(client)  # for its update: that request may be lost
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
            self._dispatches.deal_with(sender, message.dispatch)
        number = message.dispatch if self._dispatches.were_sent(message.dispatch) else 0
        if self._ending is not None:
            ended = to_seconds(self._ending[0])
            late = "arrived after the run had ended"
            return [Log(events.UpdateRejected(ended, sender, late, number))]
        if isinstance(dispatch, str):
            if is_new:
                self._outgoing.request_again(sender)
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
            self._outgoing.request_again(sender)
            return rejected
        vector = message.vector
        clipped: list[Action] = []
        if (length := self._validation.over_norm(message)) is not None:
            vector = self._validation.clipped(message, length)
            clipped.append(Log(events.UpdateClipped(to_seconds(at), sender, length)))
        self._outgoing.satisfied(sender)
        facts = {} if self._sums is None else self._sums.facts(sender, message.dispatch)
        self._arrivals.add(event, dispatch, self._epoch, self._server.w.size, facts)
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
            self._losses.forget(sender)
        else:
            self._acknowledged[sender] = message.sequence
            self._losses.heard(sender, message.dispatch)
        done = self._carry_out(wanted, at, update)
        return [*clipped, *done] if clipped else done

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
                    if self._sums is not None:
                        self._sums.drop(update.client, update.dispatch)
                    done += self._unused(update.client, update.dispatch, reason, at)
                case rules.Remark(text):
                    done.append(Log(events.Note(to_seconds(at), text)))
                case _ if self._ending:
                    continue  # the last version is made: no models, no timers
                case SumUp() if self._sums is not None:
                    done += self._sum_up(action, self._sums, at)
                case Send(deferred=deferred) if deferred or self._suspended:
                    self._outgoing.send(action)
                case Send():
                    done.append(self._dispatch(action, at))
                case rules.Broadcast():
                    self._outgoing.broadcast()
                case Request():
                    self._outgoing.request(action)
                case rules.SetTimer(name, after):
                    # A late timer does not make the next ones late: they count from when it was due.
                    self._timers.set(("rule", name), (at if ticked is None else ticked) + after)
                case rules.SetPeriodicTimer(name, period):
                    self._timers.set_periodic(("rule", name), period, at)
        return done

    def _dispatch(self, send: Send, at: Nanoseconds) -> Dispatch:
        client, version = send.client, self._server.version
        self._keep_model()
        number = self._dispatches.send(client, version, at, send.lr)
        known = self._acknowledged.get(client, 0)
        if self._sums is None or self._settings.side.kind != "residual":
            return Dispatch(client, version, number, send.lr, known)
        waiting, lost = self._arrivals.of(client), self._losses.tell(client, number)
        return Dispatch(client, version, number, send.lr, known, waiting, lost)

    def _keep_model(self) -> None:
        """The model is about to be sent, and perhaps what comes of it as the difference to it."""
        version = self._server.version
        if not self._settings.keeps_models or version in self._bases:
            return
        wanted = self._dispatches.open_versions(self._server.clients)
        self._bases = {known: w for known, w in self._bases.items() if known in wanted}
        self._bases[version] = self._server.w.copy()

    def _version_made(self, aggregated: rules.Aggregated, at: Nanoseconds) -> list[Action]:
        version, used = aggregated.version, aggregated.contributions
        if used:
            self._steps.add_noise(self._server.w, version, max(one.weight for one in used))
        if self._server.buffers and used:
            self._server.buffers = self._arrivals.averaged_buffers(
                self._server.buffers, used, shares=self._settings.side.kind in ("model", "residual")
            )
        records: list[Action] = [self._arrivals.applied(one, version, at) for one in used]
        self._applied += len(used)
        records.append(Log(events.VersionMade(to_seconds(at), version, len(used))))
        limit = self._settings.stop.updates
        if limit is not None and self._applied >= limit:
            records += self._end("updates", at)
        return records

    def _unused(self, client: str, dispatch: int, reason: str, at: Nanoseconds) -> list[Action]:
        """Nothing comes of the update of `client` that answered `dispatch`."""
        return [
            *self._reject(client, reason, at, dispatch),
            self._arrivals.dropped(client, dispatch, at),
        ]

    # Secure sums

    def _sum_up(self, wanted: SumUp, sums: SummingStep, at: Nanoseconds) -> list[Action]:
        """Ask those who hold shares of the masks of these updates for their sums."""
        begun = sums.begin(wanted, self._server.clients.keys())
        if not isinstance(begun, Asked):
            return self._settle(begun, at)
        self._timers.set(("shares", begun.number), at + sums.timeout)
        asked = self._server.in_order(begun.holders)
        return [AskForShares(client, begun.number, begun.updates) for client in asked]

    def _shares_summed(self, client: str, message: inputs.SharesSum, at: Nanoseconds) -> Actions:
        """An answer to `AskForShares`."""
        sums, shares = self._sums, message.words
        if sums is None or not self._running or self._ending:
            return []
        if shares is not None and (problem := sums.unfit(shares)) is not None:
            return self._stray(client, problem, at)
        settled = sums.answer(message.number, client, shares)
        return [] if settled is None else self._settle(settled, at)

    def _settle(self, settled: Opened | Lost, at: Nanoseconds) -> list[Action]:
        """A sum waits no longer: the model moves by it, or nothing comes of its updates."""
        self._timers.cancel(("shares", settled.number))
        wanted = settled.wanted
        if isinstance(settled, Opened):
            return self._version_made(self._rule.summed(wanted, settled.total), at)
        lost: list[Action] = []
        for used in wanted.contributions:
            lost += self._unused(used.client, used.dispatch, f"its buffer {settled.reason}", at)
            if self._settings.side.kind == "residual":
                self._losses.add(used.client, used.dispatch)
        what = f"a buffer of {len(wanted.contributions)} updates {settled.reason}"
        if not settled.answered:
            return [*lost, Log(events.Note(to_seconds(at), what))]
        sent = tuple(sorted({used.client for used in wanted.contributions}))
        wrong = events.WrongSum(to_seconds(at), sent, settled.answered)
        what = f"{what}; {wrong.senders}"
        return [*lost, Log(wrong), Log(events.Note(to_seconds(at), what))]

    # Evaluations, and the end

    def _evaluate(self, at: Nanoseconds) -> list[Action]:
        return self._evaluations.request(self._server.version, self._server.w, at)

    def _evaluation_done(self, done: inputs.EvaluationDone) -> Actions:
        taken = to_seconds(self._evaluations.done())
        log = Log(events.Evaluated(taken, done.version, done.loss, done.accuracy))
        target = self._settings.stop.target_accuracy
        if target is not None and done.accuracy >= target:
            return [log, *self._end("target_accuracy", done.at)]
        return [log]

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
        self._outgoing.clear()
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
        last = self._settings.last_evaluation
        count = self._evaluations.left(self._server.version)
        what = "evaluation is" if count == 1 else f"{count} evaluations are"
        text = f"the run is over; its last {what} waited for"
        if last is not None and last.timeout is not None:
            text += f", at most {last.timeout:g} s (without limit: evaluate: {{when: after}})"
        return [Log(events.Note(to_seconds(ended), text))]

    def _give_up(self, why: str, ended: Nanoseconds, reason: str) -> list[Action]:
        """Close the books without the evaluations that are not done."""
        count = self._evaluations.left(self._server.version)
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
            *self._arrivals.unapplied(at),
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
