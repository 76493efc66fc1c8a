"""One run in virtual time: the run directory becomes what any other runtime would have made of it."""

from __future__ import annotations

import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from agents import durations, events, wire
from agents.aggregator import storage
from agents.aggregator.actions import Save
from agents.aggregator.core import Settings, Setup
from agents.aggregator.evaluation import Evaluator
from agents.aggregator.inputs import Input
from agents.aggregator.recording import Recording
from agents.client import core as client
from agents.client import randomness
from agents.client.training import Trainer
from agents.config import Link, Local
from agents.device_actions import DeviceState
from agents.flat import first_model, initial
from agents.nanoseconds import Nanoseconds, from_seconds
from agents.rules.interface import ClientSide
from agents.shards import Shard
from agents.tasks.interface import Task
from agents.vectors import Vector
from testbed.errors import RunFailedError
from testbed.host.signals import noted
from testbed.plan import PlannedDevice
from testbed.plan.agent_configs import RunSpec, importance
from testbed.plan.datasets import Prepared
from testbed.rundir.directory import RunDirectory
from testbed.view import View
from testbed.virtual.device import Device
from testbed.virtual.event_queue import EventQueue
from testbed.virtual.network import Network
from testbed.virtual.pool import Pool, Ticket
from testbed.virtual.simulation import Simulation
from testbed.virtual.timing import Speed, Work
from testbed.virtual.training import BatchTrainer

_LOOK_EVERY = 0.1
"""Seconds of wall time between two looks at the clock's doings: refreshing the view, writing out."""
_MEASURED_SECONDS = 0.5
"""CPU time given to measuring a step."""


def run(spec: RunSpec, prepared: Prepared, view: View) -> events.RunEnded:
    """Simulate the run of `spec` to its end; return how it ended.

    Raises RunFailedError where it cannot end, KeyboardInterrupt when interrupted. In either case the
    run directory is whole.
    """
    recorder = Recorder(spec.directory, view)
    gc.freeze()  # what is there by now stays, and need not be looked through time and again
    try:
        with noted() as interrupted:
            simulation = _simulation(spec, prepared, view, recorder)
            simulation.run(time.time(), interrupted)
    finally:
        gc.unfreeze()
        recorder.close()
    if interrupted():
        raise KeyboardInterrupt
    if recorder.ended is None:
        raise RunFailedError("the run ended without saying why")
    return recorder.ended


@dataclass(slots=True)
class Recorder:
    """Implements `testbed.virtual.simulation.Recorder`: events.jsonl, models/, and the view."""

    directory: RunDirectory
    view: View
    schema: str = ""
    ended: events.RunEnded | None = None
    _journal: storage.Journal = field(init=False)
    _recording: Recording | None = None
    _due: float = field(init=False)
    _looks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._journal = storage.Journal(self.directory.events)
        self._due = time.monotonic() + _LOOK_EVERY

    def record(self, record: events.Record) -> None:
        self._journal.write(record)
        self.view.record(record)
        if isinstance(record, events.RunEnded):
            self.ended = record

    def keep_inputs(self, setup: Setup) -> None:
        """From now on keep all inputs of the core of `setup`."""
        self._recording = Recording(self.directory.inputs, setup)

    def input(self, event: Input) -> None:
        if self._recording is not None:
            self._recording.write(event)

    def save(self, version: int, w: Vector, *, final: bool) -> None:
        name = Save(version, final).name
        storage.save_model(self.directory.models, name, w, version, self.schema)

    def pulse(self) -> None:
        self._looks += 1
        if self._looks % 64 == 0 and time.monotonic() >= self._due:
            self._journal.flush()
            self.view.refresh(time.monotonic())
            self._due = time.monotonic() + _LOOK_EVERY

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()
        self._journal.close()
        self.view.refresh(time.monotonic())


def _simulation(spec: RunSpec, prepared: Prepared, view: View, recorder: Recorder) -> Simulation:
    topology, run_id = spec.topology, spec.directory.run
    task: Task = topology.task.build()
    rule = topology.rule.build()
    w, schema = first_model(task, topology.seed)
    recorder.schema = schema
    stop = topology.stop.plain()
    population = importance(topology, spec.samples)
    settings = Settings(
        run=run_id,
        schema=schema,
        side=rule.client_side,
        importance=population,
        stop=stop,
        evaluate_every=from_seconds(topology.evaluate.every),
        patient=spec.eventful,
    )
    setup = Setup(settings, topology.rule.named, topology.seed)
    core, server = setup.core(w)
    if topology.record == "updates":
        recorder.keep_inputs(setup)
    queue = EventQueue()
    fleet = _Fleet(spec, prepared, rule.client_side, task, _work(spec, prepared, task, view), queue)
    return Simulation(
        queue,
        core,
        server,
        fleet.device,
        Evaluator(task, prepared.test, lambda _: None).evaluate,
        recorder,
        run=run_id,
        schema=schema,
        sizes=_sizes(run_id, schema, w),
        stop=stop,
        steps=spec.steps(),
        absent=spec.absent,
    )


class _Fleet:
    """Makes devices as they are needed."""

    def __init__(
        self,
        spec: RunSpec,
        prepared: Prepared,
        side: ClientSide,
        task: Task,
        work: Work,
        queue: EventQueue,
    ) -> None:
        self._spec = spec
        self._prepared = prepared
        self._side = side
        self._work = work
        self._planned = {device.name: (k, device) for k, device in enumerate(_at_first(spec))}
        server = spec.topology.server
        link = None if server.link is None else server.link.plain()
        self._network = Network(queue, spec.topology.seed, link, steady=not spec.eventful)
        gradient, lazily = side.kind == "gradient", side.send_buffer is not None
        self._pool = Pool(BatchTrainer(task, prepared.train), gradient, lazily)

    def device(self, name: str, last: Device | None = None) -> Device:
        """A life of a device; what is on its disk, and what was set of its share and link, outlives the
        `last` one."""
        index, planned = self._planned[name]
        indices = self._prepared.indices[name]
        local, seed = planned.local, self._spec.topology.seed
        steps = 1 if self._side.kind == "gradient" else local.count(len(indices))
        identity = client.Identity(self._spec.directory.run, name, len(indices), self._side, local)

        def train(model: wire.ModelMessage, sequence: int) -> Ticket:
            def rng() -> np.random.Generator:
                return randomness.generator(seed, name, randomness.TRAINING, sequence)

            lr = local.lr if model.lr is None else model.lr
            return self._pool.hand_in(
                Ticket(
                    pool=self._pool,
                    start=model.vector,
                    indices=indices,
                    local=local,
                    lr=lr,
                    steps=steps,
                    rng=rng,
                )
            )

        memory = None if last is None else last.memory
        timing = randomness.generator(seed, name, randomness.TIMING)
        speed = Speed(planned, self._work, timing)
        return Device(
            index=index,
            core=client.ClientCore(identity, self._thinking_time(planned), memory),
            line=self._network.line(planned) if last is None else last.line,
            train=train,
            speed=speed if last is None else last.speed,
            memory=memory,
        )

    def _thinking_time(self, planned: PlannedDevice) -> Callable[[Nanoseconds], Nanoseconds]:
        if planned.think is None:
            return lambda _: 0
        rng = randomness.generator(self._spec.topology.seed, planned.name, randomness.THINKING)
        think = durations.sampler(planned.think, rng)
        return lambda _: from_seconds(think())


def _at_first(spec: RunSpec) -> Iterator[PlannedDevice]:
    """The devices, with the links that they have when the first models are sent, at 0 s: a trace begins
    there."""
    made: defaultdict[str, DeviceState] = defaultdict(DeviceState)
    for step in itertools.takewhile(lambda step: step.at <= 0, spec.steps()):
        made[step.device] = made[step.device].after(step.action)
    for device in spec.plan.devices:
        changes = made[device.name].link
        yield replace(device, link=(device.link or Link()).changed(changes)) if changes else device


def _sizes(run: str, schema: str, w: Vector) -> tuple[int, int]:
    """Bytes of a model and of an update on the wire; their headers' digits vary, and are not counted."""
    model = wire.ModelMessage(run=run, version=0, dispatch=0, schema=schema, vector=w)
    update = wire.UpdateMessage(
        run=run,
        client="client",
        sequence=0,
        dispatch=0,
        base_version=0,
        schema=schema,
        kind="delta",
        samples=0,
        steps=0,
        effective_steps=1.0,
        loss=0.0,
        downloaded=0,
        train_start=0,
        train_end=0,
        sent=0,
        vector=w,
    )
    return len(wire.encode(model)), len(wire.encode(update))


def _work(spec: RunSpec, prepared: Prepared, task: Task, view: View) -> Work:
    """What a step costs. Where a `cpu` share needs the time that it takes here and the topology does
    not give it, it is measured, and written into the run's topology: from there it is the same again."""
    topology = spec.topology
    flops, seconds = topology.task.flops_per_step, topology.runtime.step_time
    shares = [d for d in spec.plan.devices if d.cpu is not None and d.gflops is None]
    if shares and seconds is None:
        device = shares[0]
        indices = prepared.indices[device.name]
        train = prepared.train
        shard = Shard(train.x[indices], train.y[indices], train.scale)
        seconds = _measured_step(task, shard, device.local)
        view.progress(f"A step takes {seconds * 1e3:.2f} ms of a core here (runtime.step_time)")
        timed = topology.runtime.model_copy(update={"step_time": seconds})
        text = topology.model_copy(update={"runtime": timed}).to_yaml()
        spec.directory.topology.write_text(text, encoding="utf-8")
    return Work(flops, seconds)


def _measured_step(task: Task, shard: Shard, local: Local) -> float:
    """Seconds of CPU time of one mini-batch step, in trainings as the client does them, on one thread.

    CPU time, as a share of the CPU is what a device has; the clock on the wall counts others' work too.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = Trainer(task, shard, local)
        trainer.warm_up()
        start, rng = initial(trainer.flat.module), np.random.default_rng(0)
        steps, begin = 0, time.thread_time()
        end = begin + _MEASURED_SECONDS
        while time.thread_time() < end:
            steps += trainer.train(start, rng, stopped=lambda: time.thread_time() >= end).steps
        return (time.thread_time() - begin) / max(1, steps)
    finally:
        torch.set_num_threads(threads)
