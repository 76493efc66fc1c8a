"""Virtual time: an event queue around the same cores that run in containers.

Within an instant, events on devices come first, then arrivals of updates in device order, then timers,
and then messages that the aggregator sends at the end of the instant. This repeats as long as new events
are due at the same time.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import inputs
from agents.aggregator.core import AggregatorCore
from agents.aggregator.evaluation import Evaluation
from agents.client import core as client
from agents.config import StopConditions
from agents.device_actions import SetBackground, to_json
from agents.models.vectors import Buffers, Vector
from agents.pipeline.interface import SimulatedExchange, Wanted
from agents.rules.interface import RequestUpdate, Server
from agents.timing.nanoseconds import Nanoseconds, to_seconds
from agents.wire import payloads
from agents.wire.messages import UnmaskRequest
from testbed.errors import RunFailedError
from testbed.topology.scenario import Step
from testbed.virtual import faults
from testbed.virtual.device import OngoingTraining, VirtualDevice
from testbed.virtual.part import VirtualFleet
from testbed.virtual.timing import ARRIVAL, DEVICE, LINK, SCENARIO, EventQueue

_DEADLOCK = "nothing can happen: the rule waits for its clients, and the clients wait for the rule"
_MAX_EVENTS_AT_ONCE = 100
"""Maximum events per device in an instant. Only a device whose work takes no time has more."""


class Recorder(Protocol):
    def input(self, event: inputs.Input) -> None:
        """Called before the core gets `event`."""

    def record(self, record: events.Record) -> None: ...
    def save(self, version: int, w: Vector, buffers: Buffers, *, final: bool) -> None: ...
    def pulse(self) -> None:
        """Called after all records of an instant."""


class Simulation:
    """Simulation of one aggregator and its clients until the end of the run.

    `devices`: makes a device when it first gets a model, so that only participating devices need memory,
    and again from its last state when it restarts.

    `evaluate`: runs in a separate thread. Its result is used at the next timer, or at once if the run
    may end because of it. With `evaluates_alone`, it is always used at once, because the task must not
    evaluate and train at the same time.

    `steps`: in the order of time. `absent`: at the start. `sizes`: bytes of a model and of an update.
    `parts`: features of the run.
    """

    def __init__(
        self,
        queue: EventQueue,
        core: AggregatorCore,
        server: Server,
        devices: Callable[[str, VirtualDevice | None], VirtualDevice],
        evaluate: Callable[[int, Vector, Buffers], Evaluation],
        recorder: Recorder,
        *,
        run: str,
        schema: str,
        sizes: tuple[int, int],
        stop: StopConditions,
        steps: Iterator[Step],
        absent: frozenset[str],
        idle: Sequence[str] = (),
        evaluates_alone: bool = False,
        parts: Sequence[VirtualFleet] = (),
    ) -> None:
        self._events = queue
        self._parts = parts
        self._core = core
        self._server = server
        self._make = devices
        self._evaluate = evaluate
        self._recorder = recorder
        self._run = run
        self._schema = schema
        self._model_size, self._update_size = sizes
        self._steps = steps
        self._absent = absent
        self.names = [*server.population, *idle]
        self._evaluates_at_once = evaluates_alone or stop.target_accuracy is not None
        self._ends_by_itself = stop.after is not None
        self._devices: dict[str, VirtualDevice] = {}
        self._snapshot: tuple[int, Vector] | None = None
        self._thread = ThreadPoolExecutor(1, "evaluation")
        self._evaluation: Future[Evaluation] | None = None
        self._inputs: deque[inputs.Input] = deque()
        self._handling = False
        self._finished = self._deadlocked = False
        self._has_deferred = False
        """The core waits for the end of the instant."""

    def run(self, wall_clock: float, interrupted: Callable[[], bool]) -> None:
        """Run until the end, or until `interrupted`. `wall_clock`: Unix seconds of the start. Raises
        RunFailedError if the run cannot end."""
        try:
            unpowered = {name for part in self._parts for name in part.begin(self)}
            for name in self.names:
                if name in self._absent or name in unpowered:
                    device = self.new_device(name)
                    device.alive = False  # until it joins, or has power
                    device.restarts_with_power = name in unpowered
                else:
                    self.report_status(name, "ready")
            self._plan_step()
            self._handle(inputs.Started(0, wall_clock, 0))
            for part in self._parts:
                part.start()
            self._instant()
            while not self._finished:
                self._events.now = self._next()
                self._instant()
                for part in self._parts:
                    part.record(at_end=self._finished)
                self._recorder.pulse()
                if interrupted():
                    self._handle(inputs.EndRequested(self._events.now, "interrupted"))
        finally:
            is_interrupted = isinstance(sys.exception(), KeyboardInterrupt)  # an evaluation may hang
            self._thread.shutdown(wait=not is_interrupted)

    def _next(self) -> Nanoseconds:
        """Raises RunFailedError if the run cannot end."""
        timer, first = self._core.next_timer, self._events.next
        idle = sum([part.idle_callbacks for part in self._parts])
        if idle and len(self._events) == idle and not any(part.will_act for part in self._parts):
            first = None
        if first is not None:
            return first if timer is None else min(first, timer)
        if timer is None or not (self._ends_by_itself or self._core.rule_waits):
            raise RunFailedError(
                f"after {to_seconds(self._events.now):g} s {_DEADLOCK}. Add stop.after to end the run"
            )
        if not (self._core.rule_waits or self._core.ended is not None or self._deadlocked):
            self._deadlocked = True
            self.write(events.Note(to_seconds(self._events.now), f"from here on {_DEADLOCK}"))
        return timer

    def _instant(self) -> None:
        now = self._events.now
        for _ in range(_MAX_EVENTS_AT_ONCE * (1 + len(self._server.population))):
            if self._finished:
                return
            if (callback := self._events.pop_due()) is not None:
                callback()
                continue
            timer = self._core.next_timer
            if timer is not None and timer <= now:
                self._hand_in_evaluation()
                self._handle(inputs.TimersDue(now))
                continue
            if self._has_deferred:
                self._has_deferred = False
                self._handle(inputs.InstantOver(now))
            first = self._events.next
            if first is None or first > now:
                return
        raise RunFailedError(
            f"time stands still at {to_seconds(now):g} s, because the training of some device takes no "
            "time. Give every device a cpu, gflops or timing above zero."
        )

    # Devices

    def _plan_step(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._events.plan(step.at, SCENARIO, 0, lambda: self._play(step))

    def _play(self, step: Step) -> None:
        """Plans the next step, too."""
        now = self._events.now
        details = to_json(step.action)
        self.write(events.Acted(to_seconds(now), step.device, "scenario", 0.0, details))
        is_done = any(part.act(step.device, step.action) for part in self._parts)
        if not is_done and not isinstance(step.action, SetBackground):  # which no device has
            faults.act(self, step.device, step.action, now)
        self._plan_step()

    def _receives(self, device: VirtualDevice, size: int, dispatch: int = 0) -> bool:
        """A message of `size` bytes arrives. Return whether the device still has power."""
        if device.features:
            there, back = device.line.bytes_of(size)
            for feature in device.features:
                feature.receive(self._events.now, dispatch, there, back)
            self.check(device.name)
        return device.alive

    def _sends(self, device: VirtualDevice, size: int, sequence: int | None = None) -> bool:
        """A message of `size` bytes begins to be sent. `sequence`: of the update in it. Return whether
        the device still has power."""
        if device.features:
            now, (there, back) = self._events.now, device.line.bytes_of(size)
            for feature in device.features:
                if sequence is None:
                    feature.send(now, there, back)
                else:
                    self._write_all(feature.send_update(now, sequence, there, back))
            self.check(device.name)
        return device.alive

    # The following methods implement `testbed.virtual.faults.World`.

    def stop_features(self, device: VirtualDevice) -> None:
        for feature in device.features:
            self._write_all(feature.stop(self._events.now))

    def check(self, name: str) -> None:
        for part in self._parts:
            part.check(name)

    def when_reachable(self, device: VirtualDevice, callback: Callable[[], None]) -> None:
        self._message(self._events.now, device, callback, to_device=True)

    def call_at(self, time: Nanoseconds, device: VirtualDevice, callback: Callable[[], None]) -> None:
        if time <= self._events.now:
            callback()
        else:
            self._events.plan(time, DEVICE, device.index, callback)

    def report_status(self, name: str, state: str) -> None:
        self._handle(inputs.StatusChanged(self._events.now, name, state))

    @property
    def now(self) -> Nanoseconds:
        return self._events.now

    def send_last(
        self,
        device: VirtualDevice,
        messages: Sequence[payloads.UpdateMessage],
        on_gone: Callable[[], None],
    ) -> None:
        def send(size: int, then: Callable[[], None]) -> None:
            device.line.upload(size, lambda at: self._message(at, device, then, to_device=False))

        for message in messages:
            send(self._update_size if message.vector.size else 0, partial(self._deliver, message))
        send(0, on_gone)

    def _deliver(self, message: payloads.UpdateMessage) -> None:
        now, name = self._events.now, message.client
        size = self._update_size if message.encoded is None else self.device(name).update_size
        self._handle(inputs.UpdateArrived(now, name, size, now, message))

    def device(self, name: str) -> VirtualDevice:
        return self._devices.get(name) or self.new_device(name)

    def new_device(self, name: str) -> VirtualDevice:
        device = self._devices[name] = self._make(name, self._devices.get(name))
        halves = (part.half(name) for part in self._parts)
        device.features = tuple(half for half in halves if half is not None)
        return device

    def set_work(self, device: VirtualDevice, work: OngoingTraining) -> None:
        device.working_on = work
        work.training.due = work.end_time
        now = self._events.now
        if device.features:
            at = device.running_time(now)
            for feature in device.features:
                feature.compute(now, max(0, work.computed - at), max(0, work.end_time - at))
            self.check(device.name)

        def end() -> None:
            if device.working_on is work:  # else it was interrupted, or its speed has changed
                training = work.training
                for feature in device.features:
                    feature.end_training(self._events.now)
                trained = client.Trained(
                    training.outcome, training.steps, work.started, self._events.now
                )
                self._obey(device, device.core.on_trained(trained))

        left = work.end_time - device.running_time(now)
        self._local(device.last_awake(now) + left, device, end)

    def _local(self, time: Nanoseconds, device: VirtualDevice, callback: Callable[[], None]) -> None:
        """Plan an action of the client's process, which a pause of the device before `time` delays."""
        lost = device.lost_to_pauses

        def due() -> None:
            if not device.alive:
                return
            if device.frozen_at is not None:
                device.held_by_pause.append(due)
            elif device.lost_to_pauses > lost:
                self._local(time + device.lost_to_pauses - lost, device, callback)
            else:
                callback()

        self.call_at(time, device, due)

    def _message(
        self, time: Nanoseconds, device: VirtualDevice, callback: Callable[[], None], *, to_device: bool
    ) -> None:
        """Plan the arrival of a message from or to `device`."""

        def due() -> None:
            if not device.alive and (to_device or not device.leaving):
                return
            if device.is_cut_off:
                device.held_by_network.append(due)
            elif to_device and device.frozen_at is not None:
                device.held_by_pause.append(due)
            else:
                callback()

        # A goodbye that takes no time is handled with the action that makes the device leave.
        at_once = to_device or (device.leaving and not device.under_way)
        if at_once and time <= self._events.now:
            due()
        else:
            rank = LINK if to_device else DEVICE if at_once else ARRIVAL
            self._events.plan(time, rank, device.index, due)

    # Actions of the aggregator's core

    def _handle(self, event: inputs.Input) -> None:
        """Pass `event` to the core after all actions of earlier events."""
        self._inputs.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inputs and not self._finished:
                event = self._inputs.popleft()
                self._recorder.input(event)
                for action in self._core.handle(event):
                    self._execute(action)
        finally:
            self._handling = False

    def write(self, record: events.Record) -> None:
        """Make the core record an event that it cannot observe itself."""
        self._handle(inputs.Written.from_record(record))

    def _write_all(self, records: Iterable[events.Record]) -> None:
        for record in records:
            self.write(record)

    def _execute(self, action: act.Action) -> None:
        match action:
            case act.Dispatch(name):
                self._send(name, self._model(action))
            case act.Log(record):
                self._recorder.record(record)
            case act.BroadcastModel():
                model = self._model(action)
                for name in list(self._server.clients):
                    self._send(name, model)
            case RequestUpdate(name, what):
                device = self.device(name)
                self._download(device, 0, device.core.pull if what == "pull" else device.core.interrupt)
            case UnmaskRequest(name, number, updates):
                self._ask_for_shares(self.device(name), number, updates)
            case act.Evaluate(version):
                for part in self._parts:
                    part.sample()
                self._submit_evaluation(version)
            case act.Save(version, final):
                self._recorder.save(version, self._server.w, self._server.buffers, final=final)
            case act.StopClients():
                self._events.clear()
                for part in self._parts:
                    part.end()
                self._hand_in_evaluation()
            case act.EndInstant():
                self._has_deferred = True
            case act.Finish():
                self._finished = True

    def _model(self, dispatch: act.Dispatch | act.BroadcastModel) -> payloads.ModelMessage:
        """All dispatches of a version share one copy of w."""
        if self._snapshot is None or self._snapshot[0] != dispatch.version:
            self._snapshot = (dispatch.version, self._server.w.copy())
        return payloads.ModelMessage(
            run=self._run,
            version=dispatch.version,
            dispatch=dispatch.number,
            schema=self._schema,
            vector=self._snapshot[1],
            buffers=self._server.buffers,
            **dispatch.to_client,
        )

    def _send(self, name: str, model: payloads.ModelMessage) -> None:
        device = self.device(name)
        self._download(
            device,
            self._model_size,
            lambda now: device.core.on_model(model, now),
            model.dispatch,
        )

    def _download(
        self,
        device: VirtualDevice,
        size: int,
        handle: Callable[[Nanoseconds], client.Actions],
        dispatch: int = 0,
    ) -> None:
        """When `size` bytes arrive, the device's core gets them by `handle`. `dispatch`: of a model; 0
        otherwise."""

        def arrived() -> None:
            if self._receives(device, size, dispatch):
                self._obey(device, handle(self._events.now))

        device.line.download(size, lambda at: self._message(at, device, arrived, to_device=True))

    def _submit_evaluation(self, version: int) -> None:
        w, buffers = self._server.w.copy(), self._server.buffers
        self._evaluation = self._thread.submit(self._evaluate, version, w, buffers)
        if self._evaluates_at_once or self._core.ended is not None:
            self._hand_in_evaluation()

    def _hand_in_evaluation(self) -> None:
        if self._evaluation is not None:
            done, self._evaluation = self._evaluation.result(), None
            for event in done.inputs(self._events.now):
                self._handle(event)

    # Actions of a client's core

    def _obey(self, device: VirtualDevice, actions: client.Actions) -> None:
        for action in actions:
            match action:
                case client.Train():
                    self._train(device, action)
                case client.Think(duration):
                    self._think(device, duration)
                case client.CutShort():
                    assert device.working_on is not None  # noqa: S101  (it is training)
                    work = device.working_on.cut_short(device.running_time(self._events.now))
                    self.set_work(device, work)
                case client.SendUpdate(sequence, message):
                    device.trainings.pop(sequence).request_result()
                    if not self._sends(device, device.line.update_size(device.update_size), sequence):
                        return
                    self._upload(device, message)
                case client.Remember(memory):
                    device.memory = memory

    def _train(self, device: VirtualDevice, wanted: client.Train) -> None:
        model, sequence = wanted.model, wanted.sequence
        for feature in device.features:
            self._write_all(feature.begin_training(self._events.now, sequence, model.dispatch))
        device.timing.begin()
        training = device.trainings[sequence] = device.train(wanted)
        device.trainings.pop(sequence - 2, None)  # replaced in the send buffer by its successor
        preparing = sending = 0
        if device.exchange is not None:
            preparing = device.speed.preparing()
            messages = self._prepare(device, device.exchange, model.dispatch, preparing)
            sending = device.speed.passing_on(messages)
        begun = device.running_time(self._events.now) + preparing
        work = OngoingTraining(
            training=training,
            started=self._events.now + preparing,
            since=begun,
            computed=begun + device.speed.computing(training.work) + sending,
            floor=begun - preparing + device.timing.floor,
        )
        self.set_work(device, work)

    def _prepare(
        self, device: VirtualDevice, exchange: SimulatedExchange, dispatch: int, took: Nanoseconds
    ) -> int:
        """Prepare the exchange between clients for the update that answers `dispatch`; return the number
        of messages: one to every other present client after `took`."""
        name = device.name
        count = exchange.prepare(dispatch, self._server.clients, took)

        def send() -> None:
            for recipient in [peer for peer in self._server.clients if peer != name]:
                self._pass_on(device, exchange.share_size, recipient, dispatch)

        self._local(self._events.now + took, device, send)
        return count

    def _computes(self, device: VirtualDevice, duration: Nanoseconds) -> None:
        """Make `device` compute something else for `duration`. If a training is in progress, it is
        delayed."""
        at, work = device.running_time(self._events.now), device.working_on
        if duration and work is not None and work.end_time > at:
            self.set_work(device, work.delayed(at, duration))
        elif duration and device.features:
            for feature in device.features:
                feature.compute_more(self._events.now, duration)
            self.check(device.name)

    def _pass_on(self, sender: VirtualDevice, size: int, recipient: str, dispatch: int) -> None:
        """Send `size` bytes to another client, over the lines of both."""

        def passed_on() -> None:
            receiver = self.device(recipient)

            def arrived() -> None:
                if not self._receives(receiver, size):
                    return
                if receiver.exchange is not None:
                    receiver.exchange.receive_share(sender.name, dispatch)
                self._computes(receiver, receiver.speed.passing_on(1))

            receiver.line.download(size, lambda at: self._message(at, receiver, arrived, to_device=True))

        if self._sends(sender, size):
            sender.line.upload(size, lambda at: self._message(at, sender, passed_on, to_device=False))

    def _ask_for_shares(self, device: VirtualDevice, number: int, updates: Wanted) -> None:
        """Ask `device` for the sum of its shares for `updates`; its answer goes to the aggregator."""

        def answer_request(_: Nanoseconds) -> client.Actions:
            assert device.exchange is not None  # noqa: S101  (only runs with an exchange ask)
            answer = device.exchange.answer(number, updates)
            size = len(answer)

            def arrive() -> None:
                self._handle(inputs.Answered(self._events.now, device.name, answer))

            def arrives(at: Nanoseconds) -> None:
                self._message(at, device, arrive, to_device=False)

            def send() -> None:
                if self._sends(device, size):
                    device.line.upload(size, arrives)

            took = device.speed.answering()
            self._computes(device, took)
            self._local(self._events.now + took, device, send)
            return []

        self._download(device, 32 * len(updates), answer_request)

    def _think(self, device: VirtualDevice, duration: Nanoseconds) -> None:
        work = device.working_on

        def end() -> None:
            if device.working_on is work:  # else it was interrupted
                self._obey(device, device.core.on_thought(self._events.now))

        self._local(self._events.now + duration, device, end)

    def _upload(self, device: VirtualDevice, message: Callable[[], payloads.UpdateMessage]) -> None:
        def arrive() -> None:
            device.line.acknowledge()
            while (lost := device.under_way.pop(0)) is not message:
                lost()  # make the update, so that the client keeps what compression left out
            self._deliver(message())

        device.under_way.append(message)
        size = device.update_size
        device.line.hand_in(size, lambda at: self._message(at, device, arrive, to_device=False))
