"""The aggregator's state machine: events in, actions out. No clock, no socket, no disk.

It guards the rule (who is present, which updates are valid), keeps the run's records (stop conditions,
when to evaluate) and leaves the mathematics, and who gets a model when, to the rule. `run_phase` says
which inputs it takes when. Its state is in parts, each pure and in a module of its own: `membership`,
`reports`, `sending` (with `dispatches` and `outgoing`), `intake` (with `validation`), `versions` (with
`arrivals`), `losses`, `evaluations`, `ending`, `timers`, `progress`.

A shell hands it every input through `handle`, and carries out all the actions of one input before it
hands in the next: `Started` once, then the others as things happen, `TimersDue` when `next_timer` has
come, and, if `EndInstant` asks for it, `InstantOver` when all that happened at one instant has been
handed in. What the server sends
within an instant leaves in this order: immediate replies, as each arrival is handled; then, once the
instant is over, the broadcast, the deferred models, and the requests, so that no request overtakes the
model that it is about.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.random import SeedSequence

from agents import events, user_code
from agents.aggregator import inputs
from agents.aggregator.actions import (
    Action,
    Actions,
    AskForReport,
    AskForShares,
    AskForUnacknowledged,
    EndInstant,
    Finish,
    Log,
    Save,
    StopClients,
)
from agents.aggregator.ending import GRACE_S, End, Ending
from agents.aggregator.evaluations import Evaluations
from agents.aggregator.intake import Intake
from agents.aggregator.membership import Change, Membership
from agents.aggregator.progress import NOTHING_ARRIVED, Progress
from agents.aggregator.reports import Reports
from agents.aggregator.run_phase import REACTIONS, IllegalInputError, Reaction, RunPhase
from agents.aggregator.sending import Sending
from agents.aggregator.settings import Settings
from agents.aggregator.timers import Timer, Timers
from agents.aggregator.versions import Versions
from agents.config import Named
from agents.models import buffers
from agents.models.buffers import Buffers
from agents.models.vectors import Vector, unfit
from agents.pipeline import ServerSteps
from agents.pipeline.secure.server import SecureSums, SumBegun, SumLost, SumOpened
from agents.rules import RULES
from agents.rules import interface as rules
from agents.rules.interface import Request, Rule, Send, Server, State, SumUp
from agents.timing.nanoseconds import Nanoseconds, from_seconds, to_seconds
from agents.wire.payloads import FAREWELL, UpdateMessage

_ORDERS = 64
"""Latest orders that are known as recorded, as one may come twice."""


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
        rule = user_code.build(self.rule, RULES, Rule)
        rng = np.random.default_rng(SeedSequence(self.seed, spawn_key=(0, 0)))
        population = self.settings.importance
        server = Server(w, {}, rng, population=population, buffers=model_buffers)
        steps = ServerSteps(self.settings.steps, w.size)
        server.masked = steps.sums is not None
        return AggregatorCore(self.settings, rule.begin(server), server, steps), server


class AggregatorCore:
    def __init__(self, settings: Settings, rule: State, server: Server, steps: ServerSteps) -> None:
        self._settings = settings
        self._rule = rule
        self._server = server
        self._phase = RunPhase.WAITING
        self._epoch: Nanoseconds = 0
        self._timers = Timers()
        self._members = Membership(settings.importance, server)
        self.progress = Progress(settings.patience)
        self._versions = Versions(settings, server, steps)
        self._arrivals = self._versions.arrivals
        self._sending = Sending(settings, server, self._arrivals, steps)
        self._dispatches, self._outgoing = self._sending.dispatches, self._sending.outgoing
        self._reports = Reports(settings, server, self._timers, self._sending)
        self._sums = steps.sums
        self._evaluations = Evaluations(several=settings.evaluate_after)
        self._ending = Ending(settings, self._timers, self._evaluations)
        self._intake = Intake(settings, server, self._sending, self.progress, self._ending, steps)
        self._orders: deque[str] = deque(maxlen=_ORDERS)

    # What a shell may ask

    @property
    def phase(self) -> RunPhase:
        return self._phase

    @property
    def ready(self) -> Sequence[str]:
        """The clients that are ready, in device order."""
        return self._members.ready

    @property
    def largest_answer(self) -> int | None:
        """Bytes of a client's answer about a sum, at most; None: clients are asked about none."""
        return None if self._sums is None else self._sums.answer_size

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
        stands_still = self._phase in (RunPhase.WAITING, RunPhase.SUSPENDED)
        return None if stands_still else self._epoch

    @property
    def ended(self) -> Nanoseconds | None:
        """When the run ended, but for its last evaluation; None if it has not."""
        return None if self._ending.end is None else self._ending.end.at

    @property
    def is_cut_short(self) -> bool:
        """Whether the run has ended in a way after which it can be continued."""
        return self._ending.is_cut_short

    def silent_since(self, at: Nanoseconds) -> Nanoseconds | None:
        """Since when nothing has arrived, if at time `at` something should have; else None."""
        if self._phase is not RunPhase.RUNNING:
            return None
        present, open_since = self._server.clients, self._sending.open_since()
        all_wait = len(present) == len(self._settings.importance) and not self.rule_waits
        return self.progress.silent_since(at, present, open_since, all_wait=all_wait)

    def overdue(self, at: Nanoseconds) -> dict[str, Nanoseconds]:
        """When the model was sent that each client is to answer, for those that take far longer than
        for any round before."""
        if self._phase is not RunPhase.RUNNING:
            return {}
        return self.progress.overdue(at, self._sending.open_since())

    def validate(self) -> None:
        """Raise AssertionError if this state cannot be. For tests, after each input."""
        if problems := [*self._problems()]:
            raise AssertionError(f"while the run is {self._phase}: {'; '.join(problems)}")

    def _problems(self) -> Iterator[str]:
        phase, timers = self._phase, self._timers.names()
        is_over = phase in (RunPhase.ENDED, RunPhase.FINISHED)
        if is_over != (self._ending.end is not None):
            yield f"its end is {self._ending.end}"
        if phase is RunPhase.WAITING and self._server.clients:
            yield "clients are present before the start"
        if phase is RunPhase.ENDED and not (self._evaluations and timers <= {"waiting", "give up"}):
            yield f"{len(self._evaluations)} evaluations and the timers {timers} are waited for"
        if phase in (RunPhase.WAITING, RunPhase.FINISHED) and timers:
            yield f"the timers {timers} are set"
        yield from self._members.problems(clock_runs=phase is RunPhase.RUNNING)
        yield from self._reports.problems()
        yield from self._sending.problems(is_over=is_over)
        yield from self._versions.problems(self._dispatches.were_sent)
        yield from self._evaluations.problems(self._server.version)
        if self._sums is not None:
            yield from self._sums.problems(self._arrivals)
            sums = {timer[1] for timer in timers if timer[0] == "shares"}
            if not is_over and sums != self._sums.waiting:
                yield f"timers of the sums {sums} are set, and {self._sums.waiting} wait"

    # Inputs

    def handle(self, event: inputs.Input) -> Actions:
        """Return what is to be done because of `event`. Raises IllegalInputError if it cannot come in
        this phase of the run."""
        reaction = REACTIONS[type(event)][self._phase]
        if reaction is not Reaction.HANDLED:
            if reaction is Reaction.ILLEGAL:
                raise IllegalInputError(event, self._phase)
            return []
        actions: Actions
        match event:
            case inputs.UpdateArrived():
                actions = self._update_arrived(event)
            case inputs.InstantOver(at):
                actions = self._sending.instant_over(at)
            case inputs.SharesSummed(at, client, message):
                actions = self._shares_summed(client, message, at)
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
                actions = self._reports.disrupted(
                    "the aggregator had no connection to the broker", since, at
                )
            case inputs.Restarted(at, since):
                self.progress.went_on(at)
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
        if self._outgoing.waits and self._phase is RunPhase.RUNNING:
            return [*actions, EndInstant()]
        end = self._ending.end
        if self._phase is not RunPhase.ENDED or self._evaluations or end is None:
            return actions
        return [*actions, *(self._evaluate(end.at) or self._finish(end))]

    def _fire_due_timers(self, at: Nanoseconds) -> Actions:
        """Fire every timer that is due at time `at`, the earliest first."""
        actions: list[Action] = []
        while (popped := self._timers.pop(at)) is not None:
            actions += self._fire(*popped, at)
        return actions

    def _fire(self, timer: Timer, due: Nanoseconds, at: Nanoseconds) -> Actions:
        """Do what `timer` is for, at `at`, which may be later than it was `due`."""
        match timer, self._ending.end:
            case ("rule", str(name)), _:
                return self._carry_out(self._rule.timer(name), at, ticked=due)
            case "evaluate", _:
                return self._evaluate(at)
            case "checkpoint", _:
                return [Save(self._server.version)]
            case ("shares", int(number)), _ if self._sums is not None:
                return self._settle(self._sums.give_up(number), at)
            case ("report", str(client)), _:
                gone = self._take_status(client, "offline", at)
                self._reports.miss(client)
                return gone
            case "after", _:
                return self._end("after", at)
            case "waiting", End() as end:
                return [self._ending.waits(end, self._server.version)]
            case "give up", End() as end:
                return self._give_up(end, "the run waits no longer")
        raise RuntimeError(f"a timer {timer} that cannot be set now")

    def _write(self, line: str) -> list[Action]:
        """Record what the shell knows, once if it is an order."""
        record = events.from_line(line)
        if isinstance(record, events.Acted):
            if line in self._orders:
                return []
            self._orders.append(line)
            if record.action is not None:
                self.progress.acted(record.device, record.action)
        return [] if record is None else [Log(record)]

    # The run clock starts, stands still, and goes on

    def _start(self, started: inputs.Started) -> Actions:
        """The run clock starts, with the clients that are ready now."""
        at = started.at
        self._phase, self._epoch = RunPhase.RUNNING, started.epoch
        self._server.began = at
        self.progress.went_on(at)
        self._members.admit(self._members.ready)
        self._timers.set_periodic("evaluate", self._settings.evaluate_every, at)
        if self._settings.checkpoint_every is not None:
            self._timers.set_periodic("checkpoint", self._settings.checkpoint_every, at)
        if self._settings.stop.after is not None:
            self._timers.set("after", from_seconds(self._settings.stop.after))
        return [*self._clock_starts(started), *self._carry_out(self._rule.start(), at)]

    def _suspend(self) -> Actions:
        """The run clock stands still. An end that only cut the run short is undone."""
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
        """The run clock goes on. To the rule, who was present leaves, and who is ready joins: one client
        after the other, as rules make do with what they have if everybody leaves."""
        at = started.at
        self._epoch = started.epoch
        self.progress.went_on(at)
        present, ready = set(self._server.clients), set(self._members.ready)
        changes: list[Action] = []
        for client in self._settings.importance:
            if client in present:
                changes += self._leave(client, at)
            if client in ready:
                changes += self._join(client, at)
        if self._phase is RunPhase.SUSPENDED:
            self._phase = RunPhase.RUNNING
        return [*self._clock_starts(started), *changes]

    def _clock_starts(self, started: inputs.Started) -> list[Action]:
        """The run clock starts, or goes on, with the clients that are present now."""
        clients, missing = tuple(self._server.clients), tuple(self._members.missing)
        at = to_seconds(started.at)
        return [
            Log(events.RunStarted(at, started.wall_clock, clients, missing)),
            Save(self._server.version),
            *self._evaluate(started.at),
        ]

    # Clients come and go

    def _status_changed(self, client: str, state: str, at: Nanoseconds) -> Actions:
        """A client that is ready is asked for what is not acknowledged, which it also sends with a
        report."""
        if client not in self._settings.importance:
            return []
        actions = [] if self._phase is RunPhase.ENDED else self._take_status(client, state, at)
        if state != "ready" or any(isinstance(action, AskForReport) for action in actions):
            return actions
        return [*actions, AskForUnacknowledged(client)]

    def _take_status(self, client: str, state: str, at: Nanoseconds) -> list[Action]:
        change = self._members.report(client, state)
        if state == "joining":
            self._dispatches.restart(client)
        if self._phase is not RunPhase.RUNNING:
            return []
        actions: list[Action] = [Log(events.ClientStatus(to_seconds(at), client, state))]
        match change:
            case Change.LEFT:
                actions += self._leave(client, at)
                if not self._server.clients and not self._settings.patient:
                    actions += self._end("no clients left", at)
            case Change.JOINED:
                actions += self._join(client, at)
            case Change.RECONNECTED:
                actions.append(self._reports.ask(client, at))
        return actions

    def _join(self, client: str, at: Nanoseconds) -> list[Action]:
        self._members.admit({*self._server.clients, client})
        return self._carry_out(self._rule.join(client), at)

    def _leave(self, client: str, at: Nanoseconds) -> list[Action]:
        del self._server.clients[client]
        self._reports.expect_none(client)
        unanswered: list[Action] = [*self._sending.unanswered(client, at)]
        self._sending.forget(client)
        for lost in [] if self._sums is None else self._sums.remove_client(client):
            unanswered += self._settle(lost, at)
        return [*unanswered, *self._carry_out(self._rule.leave(client), at)]

    def _rejoin(self, client: str, at: Nanoseconds) -> list[Action]:
        """The work of `client` came to nothing. It waits for a model, and perhaps the rule for it: to
        the rule it leaves and joins again, which both know how to go on from."""
        return [*self._leave(client, at), *self._join(client, at)]

    def _farewell(self, sender: str, message: UpdateMessage, at: Nanoseconds) -> Actions:
        """`sender` leaves for good and hands in what it remembers of its last applied update, or says
        (as of update 0) that none was applied. From then on its numbers are forgotten: if it comes back,
        it begins as one that never was here."""
        acknowledged = self._sending.acknowledged(sender)
        told = message.run, message.client, message.sequence
        if told != (self._settings.run, sender, acknowledged) or self._sums is not None:
            return []
        if acknowledged and (problem := unfit(message.vector, self._server.w)) is not None:
            return self._intake.reject(sender, problem, at)
        self._sending.retire(sender)
        memory = message.vector if acknowledged else None
        return self._carry_out(self._rule.retire(sender, memory), at)

    # Messages that may be lost

    def _stalled(self, since: Nanoseconds, at: Nanoseconds) -> Actions:
        asked = self._reports.disrupted(NOTHING_ARRIVED, self.progress.stall(since, at), at)
        clients = list(self._server.clients)
        if any(self._dispatches.newest_open(client) for client in clients):
            return asked
        return [*asked, *(action for client in clients for action in self._rejoin(client, at))]

    def _reported(self, event: inputs.Reported) -> Actions:
        if self._reports.brings_back(event.client):
            return self._take_status(event.client, "ready", event.at)
        return self._reports.received(event)

    # Updates arrive

    def _update_arrived(self, event: inputs.UpdateArrived) -> Actions:
        at, message, is_over = event.at, event.message, self._phase is RunPhase.ENDED
        if is_over and self._ending.is_cut_short:
            return []  # it stays with the client until the run continues
        if message.kind == FAREWELL:
            return [] if is_over else self._farewell(event.sender, message, at)
        runs = self._phase is RunPhase.RUNNING
        verdict = self._intake.judge(event, self._epoch, clock_runs=runs)
        done = verdict.first
        if verdict.update is not None:
            wanted = self._rule.update(verdict.update)
            self._sending.given(message, wanted)
            done = [*done, *self._carry_out(wanted, at, verdict.update)]
        elif verdict.is_model_due:
            done = [*done, *self._rejoin(event.sender, at)]
        return [*done, *verdict.last]

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
                    done += self._versions.made(action, at)
                    if self._versions.are_enough:
                        done += self._end("updates", at)
                case rules.Ignored(reason) if update is not None:
                    if self._sums is not None:
                        self._sums.drop(update.client, update.dispatch)
                    done += self._unused(update.client, update.dispatch, reason, at)
                case rules.Remark(text):
                    done.append(Log(events.Note(to_seconds(at), text)))
                case _ if self._ending.end is not None:
                    continue  # the last version is made: no models, no timers
                case SumUp() if self._sums is not None:
                    done += self._sum_up(action, self._sums, at)
                case Send(deferred=deferred) if deferred or self._phase is RunPhase.SUSPENDED:
                    self._outgoing.send(action)
                case Send():
                    done.append(self._sending.dispatch(action, at))
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

    def _unused(self, client: str, dispatch: int, reason: str, at: Nanoseconds) -> list[Action]:
        """Nothing comes of the update of `client` that answered `dispatch`."""
        return [
            *self._intake.reject(client, reason, at, dispatch),
            self._arrivals.dropped(client, dispatch, at),
        ]

    # Secure sums

    def _sum_up(self, wanted: SumUp, sums: SecureSums, at: Nanoseconds) -> list[Action]:
        """Ask those who hold shares of the masks of these updates for their sums."""
        begun = sums.begin(wanted, self._server.clients.keys())
        if not isinstance(begun, SumBegun):
            return self._settle(begun, at)
        self._timers.set(("shares", begun.number), at + sums.timeout)
        asked = self._server.in_order(begun.holders)
        return [AskForShares(client, begun.number, begun.updates) for client in asked]

    def _shares_summed(self, client: str, message: inputs.SharesSum, at: Nanoseconds) -> Actions:
        """An answer to `AskForShares`. It is of no use if enough others were faster."""
        sums, shares = self._sums, message.words
        if sums is None:  # only a run with secure aggregation has the topic
            return []
        if not sums.is_waiting_for(client, message.number):
            return []
        if shares is not None and (problem := sums.problem_with_shares(shares)) is not None:
            return self._intake.stray(client, problem, at)
        settled = sums.answer(message.number, client, shares)
        return [] if settled is None else self._settle(settled, at)

    def _settle(self, settled: SumOpened | SumLost, at: Nanoseconds) -> list[Action]:
        """A sum waits no longer: the model moves by it, or nothing comes of its updates."""
        self._timers.cancel(("shares", settled.number))
        wanted = settled.wanted
        if isinstance(settled, SumOpened):
            return self._carry_out([self._rule.summed(wanted, settled.total)], at)
        lost: list[Action] = []
        for used in wanted.contributions:
            lost += self._unused(used.client, used.dispatch, f"its buffer {settled.reason}", at)
            self._sending.lose(used.client, used.dispatch)
        return [*lost, *settled.records(to_seconds(at))]

    # Evaluations, and the end

    def _evaluate(self, at: Nanoseconds) -> list[Action]:
        return self._evaluations.request(self._server.version, self._server.w, at)

    def _evaluation_done(self, done: inputs.EvaluationDone) -> Actions:
        log = self._evaluations.done(done)
        target = self._settings.stop.target_accuracy
        if target is not None and done.accuracy >= target:
            return [log, *self._end("target_accuracy", done.at)]
        return [log]

    def _interrupt(self, reason: str, at: Nanoseconds) -> list[Action]:
        """End the run now; if it has ended already, do not wait for its last evaluation."""
        end = self._ending.end
        if end is None or not self._ending.is_waited_for:
            return self._end(reason, at, GRACE_S)
        return self._give_up(end, "the run was interrupted")

    def _end(self, reason: str, at: Nanoseconds, timeout: float = math.inf) -> list[Action]:
        """The run is over; the final model is evaluated before the last records are written, which wait
        for it as long as the settings say, and at most `timeout` seconds of the host."""
        if self._ending.end is not None:
            return []
        self._phase = RunPhase.ENDED
        self._ending.begin(reason, at, timeout)
        self._outgoing.clear()
        return [StopClients()]

    def _give_up(self, end: End, why: str) -> list[Action]:
        """Finish without the evaluations that are not done."""
        return [self._ending.gives_up(end, self._server.version, why), *self._finish(end)]

    def _finish(self, end: End) -> list[Action]:
        """Write the last records."""
        self._phase = RunPhase.FINISHED
        self._timers.clear()
        at, version = end.at, self._server.version
        return [
            *self._versions.left_in_buffer(at, is_cut_short=end.is_cut_short),
            *self.progress.stall_ends(at),
            *self._arrivals.unapplied(at),
            *(log for client in self._server.clients for log in self._sending.unanswered(client, at)),
            *self._intake.not_recorded(at),
            Save(version, final=True),
            Log(events.RunEnded(to_seconds(at), end.reason, version, self._versions.applied)),
            Finish(end.reason),
        ]
