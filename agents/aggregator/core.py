"""The aggregator's state machine: inputs in, actions out. No clock, no socket, no disk.

The core decides which clients are present and which updates are valid, checks the stop conditions, and
requests evaluations. The rule decides how updates are aggregated, and when a client gets a model.
`inputs` defines which inputs are allowed in each phase of a run. The state of the core has several
parts, without I/O or clock, in four modules: `clients`, `dispatches`, `intake` and `progress`.

A shell passes every input to `handle`, and carries out all actions of one input before it passes the
next. The shell passes `TimersDue` at the time `next_timer`. If the core has requested `EndInstant`, the
shell passes `InstantOver` after all inputs of the instant. The shell passes all other inputs as they
occur.

Some replies are sent immediately, while inputs are handled. At the end of an instant the broadcast is
sent, then the deferred models, then the requests. So a client gets a model before the request for an
update that was trained from this model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
from numpy.random import SeedSequence

from agents import events, user_code
from agents.aggregator import inputs
from agents.aggregator.actions import (
    Action,
    Actions,
    EndInstant,
    Finish,
    Log,
    Save,
    StopClients,
)
from agents.aggregator.clients import Membership, MembershipChange, Reports, Sending, unfinished
from agents.aggregator.dispatches import Dispatched
from agents.aggregator.inputs import REACTIONS, IllegalInputError, Reaction, RunPhase, Settings
from agents.aggregator.intake import Intake
from agents.aggregator.part import CorePart
from agents.aggregator.progress import (
    GRACE_S,
    NOTHING_ARRIVED,
    End,
    Ending,
    Evaluations,
    RunProgress,
    Timer,
    Timers,
    Versions,
)
from agents.checks import DeclarationError
from agents.config import Named
from agents.models import vectors
from agents.models.vectors import Buffers, Vector, unfit
from agents.pipeline.steps import ServerSteps
from agents.rules import RULES
from agents.rules import interface as rules
from agents.rules.interface import RequestUpdate, Rule, Send, Server, State, SumUp
from agents.selection.draws import begin_draws
from agents.timing.nanoseconds import SECOND, Nanoseconds, from_seconds, to_seconds
from agents.wire.messages import ReportRequest
from agents.wire.payloads import FAREWELL, UpdateMessage

_LATE = 3 * SECOND
"""Time in ns after the end that `stop: after` asks for, from which the run has ended late."""
_ORDERS = 256
"""The core remembers this many of the latest records from the shell, to ignore one that MQTT delivers
twice."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All data from which a core is built. Two cores with equal setups, models and inputs behave
    identically, bit by bit."""

    settings: Settings
    rule: Named
    seed: int
    """Seed of the rule's random numbers."""
    chooser: Named | None = None
    """Chooser of the clients that train next; None if the rule draws by itself."""

    def core(self, w: Vector, model_buffers: Buffers = vectors.NONE) -> tuple[AggregatorCore, Server]:
        """Build a core and its server. `w`: parameters of the first model, shape (d,), changed in place.
        `model_buffers`: buffers of the first model."""
        rule = user_code.build(self.rule, RULES, Rule)
        rng = np.random.default_rng(SeedSequence(self.seed, spawn_key=(0, 0)))
        population = self.settings.importance
        server = Server(w, {}, rng, population=population, buffers=model_buffers)
        steps = ServerSteps(self.settings.steps, w.size)
        server.sums_only = steps.sums is not None
        parts: list[CorePart] = []
        if self.chooser is not None:
            server.draws = draws = begin_draws(self.chooser, population, self.settings.samples)
            parts.append(draws)
        return AggregatorCore(self.settings, rule.begin(server), server, steps, parts), server


class AggregatorCore:
    """The aggregator's state machine. It returns the actions that follow from each input."""

    def __init__(
        self,
        settings: Settings,
        rule: State,
        server: Server,
        steps: ServerSteps,
        parts: Sequence[CorePart] = (),
    ) -> None:
        """`parts`: what takes part beside the rule and `steps`."""
        self.settings = settings
        self.rule = rule
        self.server = server
        self._parts = [*steps.halves, *parts]
        self._element, self._size = server.w.dtype.char, server.w.size
        self._phase = RunPhase.WAITING
        self._epoch: Nanoseconds = 0
        self.timers = Timers()
        self._members = Membership(settings.importance, server, settings.idle)
        self.progress = RunProgress(settings.patience)
        self._versions = Versions(settings, server, steps)
        self.arrivals = self._versions.arrivals
        self._sending = Sending(settings, server, self.arrivals, steps)
        self._dispatches, self._outgoing = self._sending.dispatches, self._sending.outgoing
        self._reports = Reports(settings, server, self.timers, self._sending)
        self._sums = steps.sums
        self._evaluations = Evaluations(several=settings.evaluate_after)
        self._ending = Ending(settings, self.timers, self._evaluations)
        self._intake = Intake(settings, server, self._sending, self.progress, self._ending, steps)
        self._orders: deque[str] = deque(maxlen=_ORDERS)

    # Properties for the shell

    @property
    def phase(self) -> RunPhase:
        return self._phase

    @property
    def ready(self) -> Sequence[str]:
        """Clients that are ready and train, in device order."""
        return self._members.ready

    @property
    def largest_answer(self) -> int | None:
        """Maximum size in bytes of a client's answer to `UnmaskRequest`; None if none is asked for."""
        return None if self._sums is None else self._sums.answer_size

    @property
    def next_timer(self) -> Nanoseconds | None:
        """Time at which the next `TimersDue` is due; None if no timer is set."""
        return self.timers.next

    @property
    def rule_waits(self) -> bool:
        """Whether the rule has set a timer, or waits for a part."""
        return self.timers.any_of_rule or any(part.waits for part in self._parts)

    @property
    def epoch(self) -> Nanoseconds | None:
        """Time of the clients' clocks at device time 0; None while the run clock stands still."""
        stands_still = self._phase in (RunPhase.WAITING, RunPhase.SUSPENDED)
        return None if stands_still else self._epoch

    @property
    def ended(self) -> Nanoseconds | None:
        """Device time at which the run ended; None if the run has not ended. The run's last evaluation
        may end later."""
        return None if self._ending.end is None else self._ending.end.at

    @property
    def is_cut_short(self) -> bool:
        """Whether the run has ended early and can be resumed."""
        return self._ending.is_cut_short

    def silent_since(self, at: Nanoseconds) -> Nanoseconds | None:
        """Return the time since which nothing has arrived. Return None if nothing had to arrive by the
        time `at`."""
        if self._phase is not RunPhase.RUNNING:
            return None
        present, open_since = self.server.clients, self._sending.open_since()
        all_wait = len(present) == len(self.settings.importance) and not self.rule_waits
        return self.progress.silent_since(at, present, open_since, all_wait=all_wait)

    def overdue(self, at: Nanoseconds) -> dict[str, Nanoseconds]:
        """Return the time at which the model was sent, for each client that takes far longer to answer
        than in its earlier rounds."""
        if self._phase is not RunPhase.RUNNING:
            return {}
        return self.progress.overdue(at, self._sending.open_since())

    def validate(self) -> None:
        """Raise AssertionError if this state is inconsistent. Tests call this after each input."""
        if problems := [*self._problems()]:
            raise AssertionError(f"while the run is {self._phase}: {'; '.join(problems)}")

    def _problems(self) -> Iterator[str]:
        phase, timers = self._phase, self.timers.names()
        is_over = phase in (RunPhase.ENDED, RunPhase.FINISHED)
        if is_over != (self._ending.end is not None):
            yield f"its end is {self._ending.end}"
        if phase is RunPhase.WAITING and self.server.clients:
            yield "clients are present before the start"
        if phase is RunPhase.ENDED and not (self._evaluations and timers <= {"waiting", "give up"}):
            yield f"{len(self._evaluations)} evaluations and the timers {timers} are waited for"
        if phase in (RunPhase.WAITING, RunPhase.FINISHED) and timers:
            yield f"the timers {timers} are set"
        yield from self._members.problems(clock_runs=phase is RunPhase.RUNNING)
        yield from self._reports.problems()
        yield from self._sending.problems(is_over=is_over)
        yield from self._versions.problems(self._dispatches.was_sent)
        yield from self._evaluations.problems(self.server.version)
        for part in self._parts:
            yield from part.problems(self)

    # Inputs

    def handle(self, event: inputs.Input) -> Actions:
        """Handle an input; return the actions to carry out. Raises IllegalInputError if the input is
        impossible in this phase of the run."""
        reaction = REACTIONS[type(event)][self._phase]
        if reaction is not Reaction.HANDLED:
            if reaction is Reaction.ILLEGAL:
                raise IllegalInputError(event, self._phase)
            return []
        after = self.timers.due("after")
        if after is not None and event.at > after + _LATE and self._phase is RunPhase.RUNNING:
            return [*self._end_late(after, event.at), *self.handle(event)]
        for part in self._parts:
            part.begin_input(event.at)
        actions: Actions
        match event:
            case inputs.UpdateArrived():
                actions = self._update_arrived(event)
            case inputs.InstantOver(at):
                actions = self._sending.instant_over(at)
            case inputs.Answered(at, client, message):
                actions = [
                    one for part in self._parts for one in part.receive_answer(client, message, at, self)
                ]
            case inputs.TimersDue(at):
                actions = self._fire_due_timers(at)
            case inputs.StatusChanged(at, client, state):
                actions = self._status_changed(client, state, at)
            case inputs.PartEvaluated():
                actions = [self._evaluations.part(event)]
            case inputs.EvaluationDone():
                actions = self._evaluation_done(event)
            case inputs.Reported():
                actions = self._reported(event)
            case inputs.Reconnected(at, since):
                actions = self._reports.record_disruption(
                    "the aggregator had no connection to the broker", since, at
                )
            case inputs.Restarted(at, since):
                self.progress.restart_silence(at)
                away = events.Disrupted(to_seconds(at), to_seconds(since), "the aggregator was away")
                actions = [Log(away)]
            case inputs.Stalled(at, since):
                actions = self._stalled(since, at)
            case inputs.Unreadable(at, sender, reason):
                actions = self._intake.stray(sender, reason, at)
            case inputs.Written(line):
                actions = self._write(line)
            case inputs.EndRequested(at, reason):
                actions = self._interrupt(reason, at)
            case inputs.Started():
                change = self._resume if self._phase is RunPhase.SUSPENDED else self._start
                actions = change(event)
            case inputs.Suspended():
                actions = self._suspend()
            case _:
                assert_never(event)
        if self._phase is RunPhase.RUNNING and not self._outgoing.is_empty:
            return [*actions, EndInstant()]
        end = self._ending.end
        if self._phase is not RunPhase.ENDED or self._evaluations or end is None:
            return actions
        return [*actions, *(self._evaluate(end.at) or self._finish(end))]

    def _fire_due_timers(self, at: Nanoseconds) -> Actions:
        """Fire all timers that are due at time `at`, the earliest first."""
        actions: list[Action] = []
        while (popped := self.timers.pop(at)) is not None:
            actions += self._fire(*popped, at)
        return actions

    def _fire(self, timer: Timer, due: Nanoseconds, at: Nanoseconds) -> Actions:
        """Handle `timer`. `due`: time at which the timer was due, at most the present time `at`."""
        match timer, self._ending.end:
            case ("rule", str(name)), _:
                return self.carry_out(self.rule.timer(name), at, ticked=due)
            case "evaluate", _:
                return self._evaluate(at)
            case "checkpoint", _:
                return [Save(self.server.version)]
            case ("part", str(name), int(number)), _:
                return [one for part in self._parts for one in part.fire(name, number, at, self)]
            case ("report", str(client)), _:
                gone = self._take_status(client, "offline", at)
                self._reports.miss(client)
                return gone
            case "after", _:
                return self._end("after", at)
            case "waiting", End() as end:
                return [self._ending.note_waiting(end, self.server.version)]
            case "give up", End() as end:
                return self._give_up(end, "the run waits no longer")
        raise RuntimeError(f"timer {timer} must not be set now")

    def _write(self, line: str) -> list[Action]:
        """Write the record in `line`, which the shell passed, once."""
        if line in self._orders:
            return []
        self._orders.append(line)
        record = events.from_line(line)
        if isinstance(record, events.Acted) and record.action is not None:
            self.progress.note_action(record.device, record.action)
        if record is None:
            return []
        for part in self._parts:
            part.note_record(record)
        return [Log(record)]

    # The run clock starts, is suspended, and resumes

    def _start(self, started: inputs.Started) -> Actions:
        """Start the run clock with the clients that are ready now."""
        at = started.at
        self._phase, self._epoch = RunPhase.RUNNING, started.epoch
        self.server.began = at
        self.progress.restart_silence(at)
        self._members.admit({*self._members.ready})
        self.timers.set_periodic("evaluate", self.settings.evaluate_every, at)
        if self.settings.checkpoint_every is not None:
            self.timers.set_periodic("checkpoint", self.settings.checkpoint_every, at)
        if self.settings.stop.after is not None:
            self.timers.set("after", from_seconds(self.settings.stop.after))
        return [*self._clock_starts(started), *self.carry_out(self.rule.start(), at)]

    def _suspend(self) -> Actions:
        """Stop the run clock. If the run had ended early, undo the end."""
        if self._ending.is_cut_short:
            self._ending.undo()
            self._phase = RunPhase.SUSPENDED
        elif self._phase is RunPhase.RUNNING:
            self._phase = RunPhase.SUSPENDED
        self._members.suspend()
        self._reports.suspend()
        self.progress.start_over()
        return []

    def _resume(self, started: inputs.Started) -> Actions:
        """Resume the run clock. From the rule's point of view, clients join that were absent, and then
        clients leave that are not ready. In this order, no rule aggregates or begins a round without a
        client that is ready. Clients that were present train again."""
        at = started.at
        self._epoch = started.epoch
        self.progress.restart_silence(at)
        present, ready = [*self.server.clients], self._members.ready
        back = [client for client in present if client in ready]
        find, newest = self._dispatches.find, self._dispatches.newest_open
        lost = {client: find(client, newest(client)) for client in back}
        changes: list[Action] = []
        for client in back:
            changes += [*self._sending.unanswered(client, at), *self._lose_process(client, at)]
            self._dispatches.forget(client)
        self._members.admit({*present, *ready})
        for client in ready:
            self._dispatches.restart(client)
            for part in self._parts:
                part.note_join(client)
            if client not in present:
                changes += self.carry_out(self.rule.join(client), at)
        for client in present:
            if client not in ready:
                changes += self._leave(client, at)
        for client, dispatch in lost.items():
            if dispatch is not None:
                changes += self._send_again(client, dispatch, at)
        if self._phase is RunPhase.SUSPENDED:
            self._phase = RunPhase.RUNNING
        return [*self._clock_starts(started), *changes]

    def _clock_starts(self, started: inputs.Started) -> list[Action]:
        """Return the actions at every start of the run clock: write a record, save the model, and
        evaluate the model."""
        clients = (*self.server.clients, *self._members.waiting)
        missing = tuple(self._members.missing)
        at = to_seconds(started.at)
        return [
            Log(events.RunStarted(at, started.wall_clock, clients, missing)),
            Save(self.server.version),
            *self._evaluate(started.at),
        ]

    # Clients join and leave

    def _status_changed(self, client: str, state: str, at: Nanoseconds) -> Actions:
        """Handle a client's new state. A client that is ready is asked for its unacknowledged
        updates. If the client is also asked for a report, it sends its unacknowledged updates before
        the report."""
        is_idle = client in self.settings.idle
        if client not in self.settings.importance and not is_idle:
            return []
        actions = [] if self._phase is RunPhase.ENDED else self._take_status(client, state, at)
        if is_idle or state != "ready" or any(isinstance(action, ReportRequest) for action in actions):
            return actions
        return [*actions, ReportRequest(client, 0)]

    def _take_status(self, client: str, state: str, at: Nanoseconds) -> list[Action]:
        change = self._members.report(client, state)
        if state == "joining" and self._phase is not RunPhase.SUSPENDED:
            self._dispatches.restart(client)
        if self._phase is not RunPhase.RUNNING:
            return []
        actions: list[Action] = [Log(events.ClientStatus(to_seconds(at), client, state))]
        match change:
            case MembershipChange.LEFT:
                actions += self._leave(client, at)
                if not self.server.clients and not self.settings.patient:
                    actions += self._end("no clients left", at)
            case MembershipChange.JOINED:
                actions += self._join(client, at)
            case MembershipChange.RECONNECTED:
                actions.append(self._reports.ask(client, at))
        return actions

    def _join(self, client: str, at: Nanoseconds) -> list[Action]:
        self._members.admit({*self.server.clients, client})
        for part in self._parts:
            part.note_join(client)
        return self.carry_out(self.rule.join(client), at)

    def _leave(self, client: str, at: Nanoseconds) -> list[Action]:
        del self.server.clients[client]
        self._reports.expect_none(client)
        unanswered = self._sending.unanswered(client, at)
        self._sending.forget(client)
        lost = self._lose_process(client, at)
        return [*unanswered, *lost, *self.carry_out(self.rule.leave(client), at)]

    def _lose_process(self, client: str, at: Nanoseconds) -> list[Action]:
        """Let the parts react to the end of the process of `client`."""
        return [one for part in self._parts for one in part.lose_process(client, at, self)]

    def _lose_work(self, client: str, at: Nanoseconds) -> list[Action]:
        """Tell the rule that the work of `client` is lost, unless another model is under way to the
        client. The rule may wait for the client's update."""
        if self._sending.has_model(client):
            self._outgoing.request_again(client)
            return []
        self._outgoing.close_request(client)
        return self.carry_out(self.rule.lose_work(client), at)

    def _send_again(self, client: str, lost: Dispatched, at: Nanoseconds) -> list[Action]:
        """Send a model to `client`, because the model in the dispatch `lost` or the training from it was
        lost. The rule is not informed, because it still waits for an answer. But only the rule knows the
        vectors that it sends with its models."""
        if self.settings.side.model_vectors:
            return self._lose_work(client, at)
        self._outgoing.request_again(client)
        is_sent = self._sending.has_model(client)
        return [] if is_sent else self._perform([Send(client, lr=lost.lr)], at)

    def _farewell(self, sender: str, message: UpdateMessage, at: Nanoseconds) -> Actions:
        """Handle the farewell of `sender`. The farewell contains the vector that the client saved after
        its last applied update. If no update of the client was applied, the farewell has the sequence
        number 0. The client's sequence numbers are forgotten, so that the client starts like a new one
        if it comes back. The farewell of an idle client is ignored."""
        if sender not in self.settings.importance:
            return []
        acknowledged = self._sending.acknowledged(sender)
        told = message.run, message.client, message.sequence
        if told != (self.settings.run, sender, acknowledged) or self._sums is not None:
            return []
        if acknowledged and (problem := unfit(message.vector, self.server.w)) is not None:
            return self._intake.reject(sender, problem, at)
        self._sending.retire(sender)
        memory = message.vector if acknowledged else None
        return self.carry_out(self.rule.retire(sender, memory), at)

    # Messages that may be lost

    def _stalled(self, since: Nanoseconds, at: Nanoseconds) -> Actions:
        asked = self._reports.record_disruption(NOTHING_ARRIVED, self.progress.note_stall(since, at), at)
        clients = list(self.server.clients)
        if any(self._dispatches.newest_open(client) for client in clients):
            return asked
        return [*asked, *(action for client in clients for action in self._lose_work(client, at))]

    def _reported(self, event: inputs.Reported) -> Actions:
        if self._reports.brings_back(event.client):
            return self._take_status(event.client, "ready", event.at)
        client, at = event.client, event.at
        if (lost := self._reports.handle(event)) is None:
            return []
        record = unfinished(client, lost, event.about, at, at)
        return [record, *self._send_again(client, lost, at)]

    # Updates arrive

    def _update_arrived(self, event: inputs.UpdateArrived) -> Actions:
        at, message, is_over = event.at, event.message, self._phase is RunPhase.ENDED
        if is_over and self._ending.is_cut_short:
            return []  # the client keeps the update until the run is resumed
        if message.kind == FAREWELL:
            return [] if is_over else self._farewell(event.sender, message, at)
        runs = self._phase is RunPhase.RUNNING
        verdict = self._intake.judge(event, self._epoch, clock_runs=runs)
        done = verdict.first
        if verdict.update is not None:
            for part in self._parts:
                part.note_update(verdict.update, message, self)
            wanted = self._checked(self.rule.update(verdict.update))
            self._sending.note_passed(message, wanted)
            done = [*done, *self._perform(wanted, at, verdict.update)]
        elif verdict.is_work_lost:
            done = [*done, *self._lose_work(event.sender, at)]
            is_endless = runs and self.settings.stop.after is None
            if is_endless and self.progress.has_diverged(self._at_work()):
                done += self._end("diverged", at)
        return [*done, *verdict.last]

    def _at_work(self) -> Iterator[str]:
        """Yield the present clients that train or will train, even if no update arrives any more."""
        has_model, owes = self._outgoing.has_model, self._dispatches.newest_open
        for client in self.server.clients:
            if self.rule_waits or has_model(client) or owes(client):
                yield client

    # Actions of the rule

    def carry_out(
        self, returned: rules.Actions, at: Nanoseconds, ticked: Nanoseconds | None = None
    ) -> list[Action]:
        """Check and perform what the rule returned for an input that is no update. `ticked`: time at
        which the rule's timer was due; None if the input is no timer either."""
        return self._perform(self._checked(returned), at, ticked=ticked)

    def _perform(
        self,
        actions: rules.Actions,
        at: Nanoseconds,
        update: rules.Update | None = None,
        ticked: Nanoseconds | None = None,
    ) -> list[Action]:
        """Perform the rule's checked actions. The actions react to `update`, or to the timer that was
        due at `ticked`, or to another input if both are None."""
        done = [one for part in self._parts for one in part.after_rule(at, self)]
        if self.settings.side.model_vectors:
            actions = self._with_copies(actions)
        for action in actions:
            match action:
                case rules.Aggregated():
                    done += self._versions.add(action, at)
                    limit = self.settings.stop.updates
                    if limit is not None and self._versions.applied >= limit:
                        done += self._end("updates", at)
                case rules.Ignored(reason) if update is not None:
                    done += self._unused(update.client, update.dispatch, reason, at)
                case rules.Remark(text):
                    done.append(Log(events.Note(to_seconds(at), text)))
                case _ if self._ending.end is not None:
                    continue  # after the last version, no models are sent and no timers set
                case SumUp() if self._sums is not None:
                    done += self._sums.sum_up(action, at, self)
                case Send(deferred=deferred) if deferred or self._phase is RunPhase.SUSPENDED:
                    self._outgoing.send(action)
                case Send():
                    done.append(self._sending.dispatch(action, at))
                case rules.Broadcast():
                    self._sending.check_broadcast()
                    self._outgoing.broadcast()
                case RequestUpdate():
                    self._outgoing.request(action)
                case rules.SetTimer(name, after):
                    # Measured from the time at which the timer was due, so that delays do not add up.
                    self.timers.set(("rule", name), (at if ticked is None else ticked) + after)
                case rules.SetPeriodicTimer(name, period):
                    self.timers.set_periodic(("rule", name), period, at)
        return done

    def _checked(self, returned: rules.Actions) -> rules.Actions:
        """Return what the rule returned. Raises DeclarationError if it is not a list of actions, or if
        the rule has replaced the global model by something of another type or shape."""
        name = type(self.rule).__name__
        if not rules.is_action_list(returned):
            raise DeclarationError(f"{name} returned {returned!r:.80}, expected a list of actions")
        w: Any = self.server.w
        if not isinstance(w, np.ndarray):
            raise DeclarationError(f"{name} replaced server.w by {w!r:.80}: change it in place")
        if w.dtype.char != self._element or w.shape != (self._size,):
            raise DeclarationError(
                f"{name} replaced server.w by {w.dtype} of shape {w.shape}, expected shape "
                f"({self._size},): change it in place"
            )
        return returned

    def _with_copies(self, actions: rules.Actions) -> rules.Actions:
        """Return `actions` with copies of the vectors that the rule sends."""
        copied = iter(self._sending.with_copies([a for a in actions if isinstance(a, Send)]))
        return [next(copied) if isinstance(a, Send) else a for a in actions]

    def lose_update(self, client: str, dispatch: int, reason: str, at: Nanoseconds) -> list[Action]:
        lost = self._unused(client, dispatch, reason, at)
        self._sending.lose(client, dispatch)
        return lost

    def refuse(self, client: str, reason: str, at: Nanoseconds) -> list[Action]:
        return self._intake.stray(client, reason, at)

    def _unused(self, client: str, dispatch: int, reason: str, at: Nanoseconds) -> list[Action]:
        """Record that an update is not applied. The update is the answer of `client` to `dispatch`."""
        for part in self._parts:
            part.drop_update(client, dispatch)
        return [
            *self._intake.reject(client, reason, at, dispatch),
            self.arrivals.drop(client, dispatch, at),
        ]

    # Evaluations, and the end

    def _evaluate(self, at: Nanoseconds) -> list[Action]:
        return self._evaluations.request(self.server.version, self.server.w, at)

    def _evaluation_done(self, done: inputs.EvaluationDone) -> Actions:
        log = self._evaluations.done(done)
        target = self.settings.stop.target_accuracy
        if target is not None and done.accuracy >= target:
            return [log, *self._end("target_accuracy", done.at)]
        return [log]

    def _interrupt(self, reason: str, at: Nanoseconds) -> list[Action]:
        """End the run now; if it has ended already, stop waiting for its last evaluation."""
        end = self._ending.end
        if end is None or not self._ending.is_waited_for:
            return self._end(reason, at, GRACE_S)
        return self._give_up(end, "the run was interrupted")

    def _end_late(self, at: Nanoseconds, now: Nanoseconds) -> list[Action]:
        """End the run at the time `at` that `stop: after` asks for, though it is `now`, because nothing
        was handled in between. What came after `at` does not count."""
        late = f"the aggregator ended the run {to_seconds(now - at):.1f} s late"
        record = events.Disrupted(to_seconds(at), to_seconds(at), late)
        return [Log(record), *self._end("after", at, now=now)]

    def _end(
        self, reason: str, at: Nanoseconds, timeout: float = math.inf, now: Nanoseconds | None = None
    ) -> list[Action]:
        """End the run. The last records are written after the evaluation of the final model. If that
        evaluation takes longer than the timeout in the settings or than `timeout` host seconds, the
        records are written without the result of the evaluation."""
        if self._ending.end is not None:
            return []
        self._phase = RunPhase.ENDED
        self._ending.begin(reason, at, at if now is None else now, timeout)
        return [StopClients()]

    def _give_up(self, end: End, why: str) -> list[Action]:
        """Finish the run without the missing evaluations."""
        return [self._ending.note_giving_up(end, self.server.version, why), *self._finish(end)]

    def _finish(self, end: End) -> list[Action]:
        """Write the last records."""
        self._phase = RunPhase.FINISHED
        self.timers.clear()
        at, version = end.at, self.server.version
        return [
            *self._versions.buffered_records(at, is_cut_short=end.is_cut_short),
            *self.progress.end_stall(at),
            *self.arrivals.unapplied_records(at),
            *(log for client in self.server.clients for log in self._sending.unanswered(client, at)),
            *self._intake.unrecorded_notes(at),
            Save(version, final=True),
            Log(events.RunEnded(to_seconds(at), end.reason, version, self._versions.applied)),
            Finish(end.reason),
        ]
