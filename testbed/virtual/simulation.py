"""Virtual time: an event heap around the same cores that run in the containers.

One instant: what happens on the devices, then the updates that arrive, in device order, then the
timers, then the deferred replies; and again, as long as that makes something happen at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from agents import events, wire
from agents.aggregator import actions as act
from agents.aggregator.core import AggregatorCore
from agents.aggregator.evaluation import Evaluation
from agents.aggregator.recording import RecordedCore
from agents.client import core as client
from agents.config import Stop
from agents.rules.interface import Server
from agents.vectors import Vector
from testbed.errors import RunFailedError
from testbed.topology.timeline import Step, describe
from testbed.virtual import fate
from testbed.virtual.agenda import ARRIVAL, DEVICE, SAME_INSTANT, SCENARIO, Agenda, rounded
from testbed.virtual.device import Device, Work

_MOST_AT_ONCE = 100
"""Events per device at one time: more come only from a device that takes no time at all."""


class Recorder(Protocol):
    """Where a run's records and models go."""

    def record(self, record: events.Record) -> None: ...
    def save(self, version: int, w: Vector, *, final: bool) -> None: ...
    def pulse(self, at: float) -> None:
        """All that happened up to device time `at` has been recorded."""


class Simulation:
    """Runs one aggregator and its clients to the end of the run.

    `devices` makes a device when it is first sent a model, so that a population costs memory only as
    far as it takes part; and its next life, given the last one. `steps` is what happens to devices, in
    the order of time, and `absent` are those that are not there from the start. `evaluate` runs in a
    thread of its own; what it finds is handed in at the next timer, or at once where the run may end by
    it.
    """

    def __init__(
        self,
        agenda: Agenda,
        core: AggregatorCore | RecordedCore,
        server: Server,
        devices: Callable[[str, Device | None], Device],
        evaluate: Callable[[int, Vector], Evaluation],
        recorder: Recorder,
        *,
        run: str,
        schema: str,
        sizes: tuple[int, int],
        stop: Stop,
        steps: Iterator[Step],
        absent: frozenset[str],
    ) -> None:
        self._agenda = agenda
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
        self._wait = stop.target_accuracy is not None
        self._ends_by_itself = stop.after is not None
        self._devices: dict[str, Device] = {}
        self._snapshot: tuple[int, Vector] | None = None
        self._thread = ThreadPoolExecutor(1, "evaluation")
        self._evaluation: Future[Evaluation] | None = None
        self._finished: str | None = None

    def run(self, wall_clock: float, interrupted: Callable[[], bool]) -> None:
        """Until the run is over, or in order when `interrupted`. Raises RunFailedError where time
        stands still."""
        try:
            for name in self._server.population:
                if name in self._absent:
                    self.begin_life(name).alive = False  # the one that it has until it joins
                else:
                    self._execute(self._core.status(name, "ready", 0.0))
            self._plan_step()
            self._execute(self._core.start(wall_clock, 0.0))
            self._instant()
            while self._finished is None:
                self._agenda.now = self._next()
                self._instant()
                self._recorder.pulse(self._agenda.now)
                if interrupted():
                    self._execute(self._core.end("interrupted", self._agenda.now))
        finally:
            self._thread.shutdown(cancel_futures=True)

    def _next(self) -> float:
        """When something happens next."""
        timer, first = self._core.next_timer, self._agenda.next
        if first is not None:
            return first if timer is None else max(self._agenda.now, min(first, rounded(timer)))
        if timer is None or not (self._ends_by_itself or self._core.rule_waits):
            raise RunFailedError(
                f"after {self._agenda.now:g} s nothing happens any more: the rule waits for its "
                "clients, and the clients wait for the rule. Give the run an end: stop.after"
            )
        return max(self._agenda.now, rounded(timer))

    def _instant(self) -> None:
        """All that happens now."""
        for _ in range(_MOST_AT_ONCE * (1 + len(self._server.population))):
            if (happens := self._agenda.due()) is not None:
                happens()
                continue
            timer = self._core.next_timer
            if timer is not None and timer <= self._agenda.now + SAME_INSTANT:
                self._hand_in_evaluation()
                self._execute(self._core.due(max(self._agenda.now, timer)))
                continue
            self._execute(self._core.end_of_instant(self._agenda.now))
            first = self._agenda.next
            if first is None or first > self._agenda.now:
                return
        raise RunFailedError(
            f"time stands still at {self._agenda.now:g} s: some device takes no time at all. "
            "Give every device a cpu, gflops or timing above zero."
        )

    def _at(self, time: float, rank: int, device: Device, happens: Callable[[], None]) -> None:
        """Plan what happens at `time`, at once if that is now and nothing has to wait its turn."""
        if rank == DEVICE and rounded(time) <= self._agenda.now:
            happens()
        else:
            self._agenda.plan(time, rank, device.index, happens)

    # What happens to a device

    def _plan_step(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._agenda.plan(step.at, SCENARIO, 0, lambda: self._play(step))

    def _play(self, step: Step) -> None:
        """Do the step that is due, and plan the next."""
        told = events.Acted(self._agenda.now, step.device, "scenario", 0.0, describe(step.action))
        self._recorder.record(told)
        fate.act(self, step.device, step.action, self._agenda.now)
        self._plan_step()

    def now_and_then(self, happens: Callable[[], None], device: Device) -> None:
        """As soon as `device`'s packets pass and its client runs."""
        self._inbound(self._agenda.now, device, happens)

    def at(self, time: float, happens: Callable[[], None], device: Device) -> None:
        """At `time`, or at once where that is over."""
        self._at(time, DEVICE, device, happens)

    def say(self, name: str, state: str) -> None:
        """The aggregator hears that `name` is `joining`, `ready` or `offline`."""
        self._execute(self._core.status(name, state, self._agenda.now))

    def tell(self, name: str, message: wire.UpdateMessage) -> None:
        """The aggregator hears `message` from `name`."""
        self._execute(self._core.update(name, message, self._update_size, self._agenda.now))

    def device(self, name: str) -> Device:
        """The life that it has, or had last."""
        return self._devices.get(name) or self.begin_life(name)

    def begin_life(self, name: str) -> Device:
        """A new life of a device, after the one that there was."""
        device = self._devices[name] = self._make(name, self._devices.get(name))
        return device

    def _local(self, time: float, device: Device, happens: Callable[[], None]) -> None:
        """Plan what the client's process does at `time`, or later by what it is frozen until then."""
        lost = device.lost_to_pauses

        def due() -> None:
            if not device.alive:
                return
            if device.frozen_at is not None:
                device.held.append(due)
            elif device.lost_to_pauses > lost:
                self._local(time + device.lost_to_pauses - lost, device, happens)
            else:
                happens()

        self._at(time, DEVICE, device, due)

    def _inbound(self, time: float, device: Device, happens: Callable[[], None]) -> None:
        """Plan what the client does with what reaches it at `time`."""

        def due() -> None:
            if not device.alive:
                return
            if device.cut_off:
                device.kept.append(due)
            elif device.frozen_at is not None:
                device.held.append(due)
            else:
                happens()

        self._at(time, DEVICE, device, due)

    def _outbound(self, time: float, device: Device, happens: Callable[[], None]) -> None:
        """Plan what the aggregator does with what reaches it from `device` at `time`."""

        def due() -> None:
            if not device.alive:
                return
            if device.cut_off:
                device.kept.append(due)
            else:
                happens()

        self._at(time, ARRIVAL, device, due)

    # What the aggregator wants

    def _execute(self, actions: act.Actions) -> None:
        for action in actions:
            match action:
                case act.Dispatch(name, version, number, lr, acknowledged):
                    self._send(name, self._model(version, number, lr, acknowledged))
                case act.Log(record):
                    self._recorder.record(record)
                case act.Broadcast(version, number):
                    model = self._model(version, number)
                    for name in list(self._server.clients):
                        self._send(name, model)
                case act.Request(name, what):
                    self._request(self.device(name), what)
                case act.Evaluate(version):
                    self._submit_evaluation(version)
                case act.Save(version, final):
                    self._recorder.save(version, self._server.w, final=final)
                case act.StopClients():
                    self._agenda.clear()
                    self._hand_in_evaluation()
                case act.Finish(reason):
                    self._finished = reason

    def _model(
        self, version: int, number: int, lr: float | None = None, acknowledged: int = 0
    ) -> wire.ModelMessage:
        """One copy of w is shared by all dispatches of a version."""
        if self._snapshot is None or self._snapshot[0] != version:
            self._snapshot = (version, self._server.w.copy())
        return wire.ModelMessage(
            self._run, version, number, self._schema, self._snapshot[1], lr, acknowledged
        )

    def _send(self, name: str, model: wire.ModelMessage) -> None:
        device = self.device(name)

        def arrives() -> None:
            self._obey(device, device.core.model(model, self._agenda.now))

        device.line.download(self._model_size, lambda at: self._inbound(at, device, arrives))

    def _request(self, device: Device, what: str) -> None:
        def arrives() -> None:
            answer = device.core.pull if what == "pull" else device.core.interrupt
            self._obey(device, answer(self._agenda.now))

        device.line.request(lambda at: self._inbound(at, device, arrives))

    def _submit_evaluation(self, version: int) -> None:
        self._evaluation = self._thread.submit(self._evaluate, version, self._server.w.copy())
        if self._wait or self._ending:
            self._hand_in_evaluation()

    @property
    def _ending(self) -> bool:
        return self._core.next_timer is None

    def _hand_in_evaluation(self) -> None:
        if self._evaluation is not None:
            done, self._evaluation = self._evaluation.result(), None
            self._execute(self._core.evaluated(done.version, done.loss, done.accuracy, self._agenda.now))

    # What a client wants

    def _obey(self, device: Device, actions: client.Actions) -> None:
        for action in actions:
            match action:
                case client.Train(model, sequence):
                    self._train(device, model, sequence)
                case client.Think(seconds):
                    self._think(device, seconds)
                case client.CutShort():
                    self._cut_short(device)
                case client.SendUpdate(sequence, message):
                    device.trainings.pop(sequence).wanted()
                    self._upload(device, message)
                case client.Remember(memory):
                    device.memory = memory

    def _train(self, device: Device, model: wire.ModelMessage, sequence: int) -> None:
        training = device.trainings[sequence] = device.train(model, sequence)
        device.trainings.pop(sequence - 2, None)  # overwritten in the send buffer by the one before
        ended = rounded(self._agenda.now + device.training_time(training.steps))
        self.work_on(device, Work(training, self._agenda.now, ended, device.lost_to_pauses))

    def work_on(self, device: Device, work: Work) -> None:
        """What the device works on is `work` now."""
        device.working_on = work

        def ends() -> None:
            if device.working_on is work:  # else it was cut short
                training = work.training
                trained = client.Trained(
                    training.outcome, training.steps, work.started, self._agenda.now
                )
                self._obey(device, device.core.trained(trained))

        self._local(work.ended, device, ends)

    def _cut_short(self, device: Device) -> None:
        """The step that goes on is done to its end."""
        work = device.working_on
        if work is None:
            return
        step = (work.ended - work.started) / max(1, work.training.steps)
        paused = device.lost_to_pauses - work.lost
        worked = self._agenda.now - work.started - paused
        done = 0 if step == 0 else -int(-(worked - SAME_INSTANT) // step)
        done = min(max(done, 0), work.training.steps)
        work.training.cut(done)
        ended = rounded(max(self._agenda.now, work.started + paused + done * step))
        self.work_on(device, Work(work.training, work.started, ended, device.lost_to_pauses))

    def _think(self, device: Device, seconds: float) -> None:
        work = device.working_on

        def ends() -> None:
            if device.working_on is work:  # else an interrupt has ended it
                self._obey(device, device.core.thought(self._agenda.now))

        self._local(self._agenda.now + seconds, device, ends)

    def _upload(self, device: Device, message: Callable[[], wire.UpdateMessage]) -> None:
        def arrives() -> None:
            update = message()
            self._execute(self._core.update(update.client, update, self._update_size, self._agenda.now))

        device.line.upload(self._update_size, lambda at: self._outbound(at, device, arrives))
