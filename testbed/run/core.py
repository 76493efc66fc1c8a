"""The controller's state machine: inputs in, actions out. No clock, no socket, no process.

It waits for the devices at the start barrier, follows the run, and decides when it has ended or failed.
`inputs` defines which inputs are allowed in each phase of a run. The state has several parts, with one
interface (`part.ControllerPart`): the barrier, supervision, the scenario, and those of features.

A shell passes every input to `handle`, and carries out all actions of one input before it passes the
next, except the answers to these actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

from agents import events, user_code
from agents.mqtt.rate_limit import RateLimit
from agents.mqtt.topics import AGGREGATOR
from agents.wire import messages
from agents.wire.messages import Message, MessageError, NoteOrder
from testbed.errors import BadInputError
from testbed.fidelity.part import FeatureFigures
from testbed.fidelity.validity import doubt_note
from testbed.plan.agent_configs import RunSpec
from testbed.run import inputs
from testbed.run.barrier import Barrier
from testbed.run.features import PARTS
from testbed.run.inputs import REACTIONS, ControllerAction, ControllerInput, ControllerPhase
from testbed.run.part import ControlledRun, EndOfRunError
from testbed.run.scenario_player import ScenarioPlayer
from testbed.run.supervision import Supervision

_MESSAGE_RATE = 100, 10.0
"""Messages per topic: burst size, and messages per second. A device sends only one sample per second."""
_LAST_SECONDS = 1.0
"""Seconds that devices have to end after the aggregator."""
_END_TIMEOUT_SECONDS = 3.0
"""Seconds within which a container must end after its client."""
_STOP_TIMEOUT_SECONDS = 4.0
"""Seconds that the aggregator has to finish its records when a run is interrupted."""


class ControllerCore:
    def __init__(self, spec: RunSpec) -> None:
        self.run = run = ControlledRun(spec)
        features = [part(run) for part in PARTS]
        self.supervision = Supervision(run)
        self._barrier = Barrier(run)
        self._scenario = ScenarioPlayer(run, features)
        self.parts = (self.supervision, self._barrier, *features, self._scenario)
        self._rate_limit = RateLimit(*_MESSAGE_RATE)
        self._refusals = messages.Refusals(run.note)
        self._until: float | None = None
        """Time in seconds, on the monotonic clock, until which devices may end after the aggregator."""
        for remark in spec.remarks:
            run.note(remark)

    # Properties for the shell

    @property
    def next_due(self) -> float:
        """Time of the scenario's next step, in seconds on the monotonic clock; infinity if there is
        none."""
        return self._scenario.next_due

    @property
    def have_all_ended(self) -> bool:
        return self.run.devices.keys() <= self.run.exit_codes.keys()

    def figures(self) -> Sequence[FeatureFigures]:
        return [figures for part in self.parts if (figures := part.figures()) is not None]

    def validate(self) -> None:
        """Raise AssertionError if this state is inconsistent. Tests call this after each input."""
        if problems := [*self._problems()]:
            raise AssertionError(f"while the run is {self.run.phase}: {'; '.join(problems)}")

    def _problems(self) -> Iterator[str]:
        run = self.run
        if run.epoch is not None and run.phase < ControllerPhase.STARTING:
            yield f"the run clock has started at {run.epoch}"
        if run.ended is None and run.phase is ControllerPhase.ENDED:
            yield "the aggregator has recorded no end"
        if run.ended is not None and run.phase < ControllerPhase.ENDED:
            yield f"it ended at {run.ended.at}"
        if run.is_over and not run.was_over:
            yield "the aggregator has reported that it is over"
        for part in self.parts:
            yield from part.problems()

    def story(self, device: str) -> str:
        """Return the state of `device`, for errors."""
        run = self.run
        exit_code, actions = run.exit_codes.get(device), [*run.state(device).actions()]
        return f"{device}: {run.status.get(device)}, exit code {exit_code}, {actions}"

    # Inputs

    def handle(self, event: ControllerInput) -> Sequence[ControllerAction]:
        """Handle an input; return the actions to carry out. Raises WrongPhaseError if the input is
        impossible in this phase of the run."""
        run = self.run
        reaction = REACTIONS[type(event)][run.phase]
        if reaction == "X":
            raise inputs.WrongPhaseError(event, run.phase)
        run.actions = []  # of an input whose handling Ctrl-C has ended
        if reaction == "H":
            try:
                self._take(event)
            except EndOfRunError as failure:
                run.do(failure.action)
        actions, run.actions = run.actions, []
        return actions

    def _take(self, event: ControllerInput) -> None:
        run, at = self.run, event.at
        match event:
            case inputs.Connected():
                self._barrier.wait(at)
            case inputs.MessageArrived():
                self._receive(event)
            case inputs.Metered():
                for sample in event.samples:
                    run.write(sample)
                for message in event.received:
                    if isinstance(message, messages.Disturbance):
                        self.supervision.disturbed(message)
                    else:
                        self._pass_on(message, at)
            case inputs.ProcessesEnded():
                self.supervision.check_exits(event.codes, at)
            case inputs.ProcessesWatched():
                self.supervision.watch(event)
                if run.epoch is not None and not run.is_over:
                    for part in self.parts:
                        part.sample(at)
            case inputs.EarlierRecords():
                for part in self.parts:
                    part.resume(event.records, event.samples)
            case inputs.RecordRead():
                self._record(event)
            case inputs.LastRecordsRead():
                self._end()
            case inputs.LinksRead():
                self._barrier.links_read(event)
            case inputs.CommandGiven():
                try:
                    self._scenario.execute(event.command, at)
                except BadInputError as error:
                    run.do(inputs.Refuse(str(error)))
            case inputs.ActionDone():
                self._done(event)
            case inputs.StoodStill():
                self.supervision.record_disruption(at, event.since, "the controller stood still")
            case inputs.Tick():
                for part in self.parts:
                    part.tick(at)
            case inputs.TickOver():
                run.publish_orders()
                self._check_end(at)
            case inputs.Interrupted():
                self._interrupt()
            case _:
                assert_never(event)

    def _receive(self, event: inputs.MessageArrived) -> None:
        run, topic = self.run, event.topic
        try:
            if not self._rate_limit.admits(topic, event.at):
                raise MessageError("too many")
            message = messages.decode(run.topics, topic, event.payload)
            if isinstance(message, messages.Telemetry) and message.at > event.at:  # of the same clock
                raise MessageError(f"at: {message.at:g} s is in the future")
            if isinstance(message, messages.Status):
                run.status[message.component] = message.state
                run.was_over |= (message.component, message.state) == (AGGREGATOR, "over")
            self._pass_on(message, event.at)
        except MessageError as error:
            first = self._refusals.add(topic, error) == 1
            if first and topic.startswith(run.topics.failure("")):  # some action has failed
                run.failures.append(f"invalid message on {topic}: {error}")

    def _pass_on(self, message: Message, at: float) -> None:
        """Raises MessageError."""
        is_taken = [part.message(message, at) for part in self.parts]
        if not any(is_taken) and not isinstance(message, messages.Status):
            raise MessageError("it is not for the controller")

    def _record(self, read: inputs.RecordRead) -> None:
        run, record, at = self.run, read.record, read.at
        for part in self.parts:
            part.record(record, at)
        match record:
            case events.Acted() if record.action is not None:
                run.states[record.device] = run.state(record.device).with_action(record.action)
            case events.RunStarted():  # both clocks are this host's
                run.start_clock(at - (read.unix - record.wall_clock), record.at)
                if run.phase is ControllerPhase.STARTING:
                    run.phase = ControllerPhase.RUNNING
                for part in self.parts:
                    part.start(record.at, at)
            case events.RunEnded():
                run.ended = record
                if run.phase is not ControllerPhase.INTERRUPTED:
                    run.phase = ControllerPhase.ENDED

    def _done(self, done: inputs.ActionDone) -> None:
        run = self.run
        match done.action:
            case inputs.Act() if done.failure is not None:
                run.record_failure(done.failure)
            case inputs.Act() as act:
                self._scenario.done(act, done.orders, done.at)
            case inputs.ApplyLimit(device):
                self._barrier.limit_applied(device, done.at)
            case inputs.Obey():
                run.orders += done.orders
            case inputs.StartAgain(component, code):
                self.supervision.restarted(component, code, done.at)
            case inputs.MeasureAgain():
                self._barrier.measuring_again(done.orders, done.at)
            case inputs.BeginRun(doubt):
                run.phase = ControllerPhase.STARTING
                run.publish(AGGREGATOR, messages.StartOrder())
                if doubt is not None:
                    run.publish(AGGREGATOR, NoteOrder(doubt_note(doubt)))
            case _:
                assert_never(done.action)

    def _check_end(self, at: float) -> None:
        """After the aggregator, the devices have a moment to end."""
        if AGGREGATOR in self.run.exit_codes:
            self._until = self._until or at + _LAST_SECONDS
            if self.have_all_ended or at >= self._until:
                self.run.do(inputs.ReadLastRecords())

    def _interrupt(self) -> None:
        run, phase = self.run, ControllerPhase.INTERRUPTED
        run.phase = phase
        if run.status.get(AGGREGATOR) in ("ready", "over"):
            run.show("Stopping: the aggregator finishes its records")
            run.publish(AGGREGATOR, messages.StopOrder())
            run.do(inputs.ReadLastRecords(_STOP_TIMEOUT_SECONDS))

    def _end(self) -> None:
        run, ended = self.run, self.run.ended
        if ended is not None:
            for part in self.parts:
                part.finish(ended)
        if run.phase is ControllerPhase.INTERRUPTED:
            return
        if ended is None:
            run.fail("the aggregator ended before the run did.", AGGREGATOR)
        if ended.reason == "no clients left":
            is_own = user_code.is_user_code(run.spec.topology.task.name)
            patience = _END_TIMEOUT_SECONDS if is_own else 0.0
            run.do(inputs.FailRun(f"no clients left. See {run.spec.directory.logs}.", patience=patience))
        elif ended.reason == "interrupted":  # not by this process, which would not be here
            run.fail(
                f"the aggregator was ended by a signal at {ended.at:.1f} s, which nobody had "
                f"ordered. To go on with the run: testbed up --resume {run.spec.directory.run}"
            )
        else:
            run.do(inputs.EndRun(ended))
