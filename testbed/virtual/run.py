"""One run in virtual time, with the same run directory as in any other runtime."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO

from agents import events, features, random_generators, user_code
from agents.aggregator import storage
from agents.aggregator.actions import Save
from agents.aggregator.core import Setup
from agents.aggregator.evaluation import Evaluator
from agents.aggregator.inputs import Input, Settings
from agents.aggregator.recording import Recording
from agents.client import factory
from agents.client.core import Train
from agents.client.training import make_trainer
from agents.config import AccessLink, Named, silence_timeout
from agents.device_actions import DeviceState
from agents.disturbances import Watchdog
from agents.models import flat
from agents.models.flat import first_model
from agents.models.vectors import Buffers, Vector
from agents.pipeline.interface import ExchangeCost
from agents.pipeline.steps import build_step
from agents.process import frozen
from agents.rules.interface import ClientSide
from agents.tasks import TASKS
from agents.tasks.interface import Task
from agents.timing.nanoseconds import from_seconds
from agents.wire import messages
from agents.wire.messages import NetworkUse
from testbed.data.preparation import Prepared, evaluation_parts
from testbed.errors import RunFailedError
from testbed.host import cpus
from testbed.host.processes import interrupting
from testbed.plan import PlannedDevice, costs
from testbed.plan.agent_configs import (
    RunSpec,
    client_setup,
    initial_model,
    keepalive,
    run_settings,
)
from testbed.plan.costs import (
    StepCost,
    StepTime,
    cache_step_time,
    message_sizes,
    with_step_time,
)
from testbed.plan.planned_devices import action_steps
from testbed.rundir.directory import RunDirectory
from testbed.topology import Virtual
from testbed.view import View
from testbed.virtual import slices
from testbed.virtual.device import VirtualDevice
from testbed.virtual.features import PARTS
from testbed.virtual.module_state import refuse_hidden_state
from testbed.virtual.network import VirtualNetwork
from testbed.virtual.simulation import Simulation
from testbed.virtual.stacked_training import BatchTrainer, Pool, Ticket
from testbed.virtual.timing import ComputeTimes, EventQueue

_PATIENCE_SECONDS = 30.0
"""Wall time after which own code that has not returned is reported."""
_STDERR = 2
_REFRESH_EVERY = 0.1
"""Wall time in seconds between two refreshes of the view, and writes of the records."""


def run(spec: RunSpec, prepared: Prepared, view: View) -> events.RunEnded:
    """Raises RunFailedError if the run cannot end, and KeyboardInterrupt if it is interrupted. In both
    cases, the run directory is complete."""
    recorder = FileRecorder(spec.directory, view)
    user_code.use_folder(None if spec.topology.user_code is None else str(spec.directory.code))
    try:
        with (
            frozen(),
            flat.unchanged_generators(),
            cpus.one_blas_thread(),
            interrupting(spared=1) as interrupted,
        ):
            _simulation(spec, prepared, view, recorder).run(time.time(), interrupted)
    except Exception as error:
        task = spec.topology.task.name
        if not user_code.is_caused_by_user_code(error, task):
            raise
        parts = (one.named.name for one in spec.topology.exchangeable.values())
        names = " and ".join(filter(user_code.is_user_code, parts))
        raise RunFailedError(f"{names} failed:\n{user_code.user_traceback(error)}") from error
    finally:
        recorder.close()
    if interrupted():
        raise KeyboardInterrupt
    if recorder.ended is None:
        raise RunFailedError("the run ended without a record of its end")
    return recorder.ended


class FileRecorder:
    """Recorder that writes events.jsonl and models/, and updates the view."""

    def __init__(self, directory: RunDirectory, view: View) -> None:
        self.directory, self.view = directory, view
        self.schema = ""
        self.ended: events.RunEnded | None = None
        self._journal = storage.Journal(directory.events)
        self._recording: Recording | None = None
        self._telemetry: IO[bytes] | None = None
        self._due = time.monotonic() + _REFRESH_EVERY
        self._pulses = 0
        self._watchdog = Watchdog(
            view.progress,
            patience=lambda: _PATIENCE_SECONDS,
            own_code_only=True,
            locked=_STDERR,
            ends=True,
        ).start()

    def record(self, record: events.Record) -> None:
        self._journal.write(record)
        self.view.record(record)
        if isinstance(record, events.RunEnded):
            self.ended = record

    def keep_inputs(self, setup: Setup) -> None:
        self._recording = Recording(self.directory.inputs, setup)

    def input(self, event: Input) -> None:
        if self._recording is not None:
            self._recording.write(event)

    def save(self, version: int, w: Vector, buffers: Buffers, *, final: bool) -> None:
        name = Save(version, final).name
        storage.save_model(self.directory.models, name, w, buffers, version, self.schema)

    def pulse(self) -> None:
        self._watchdog.begin()
        self._pulses += 1
        if self._pulses % 64 == 0 and time.monotonic() >= self._due:
            self._journal.flush()
            if self._telemetry is not None:
                self._telemetry.flush()
            self.view.refresh(time.monotonic())
            self._due = time.monotonic() + _REFRESH_EVERY

    def sample(self, sample: features.Telemetry | NetworkUse) -> None:
        if self._telemetry is None:
            self._telemetry = self.directory.telemetry.open("ab")
        self._telemetry.write(messages.encode(sample) + b"\n")

    def close(self) -> None:
        self._watchdog.close()
        if self._telemetry is not None:
            self._telemetry.close()
        if self._recording is not None:
            self._recording.close()
        self._journal.close()
        self.view.refresh(time.monotonic())


def _simulation(spec: RunSpec, prepared: Prepared, view: View, recorder: FileRecorder) -> Simulation:
    topology, run_id = spec.topology, spec.directory.run
    task = user_code.build(topology.task.named, TASKS, Task)
    side: ClientSide = topology.rule.build().client_side
    start = initial_model(topology, spec.directory)
    w, buffers, schema = first_model(task, topology.seed, start)
    recorder.schema = schema
    settings = Settings.complete(run_settings(spec), schema=schema, side=side)
    setup = Setup(settings, topology.rule.named, topology.seed, topology.named_selection)
    core, server = setup.core(w, buffers)
    if topology.durability == "recording":
        recorder.keep_inputs(setup)
    queue = EventQueue()
    cost = _step_cost(spec, prepared, task, view, w.size)
    model = run_id, schema, w, buffers
    fleet = _Fleet(spec, prepared, side, task, cost, queue, model, view)
    made = (part(spec, queue, fleet.network, recorder.sample) for part in PARTS)
    evaluator = Evaluator(
        task, prepared.test, lambda _: None, start=start, parts=evaluation_parts(prepared, topology)
    )
    return Simulation(
        queue,
        core,
        server,
        fleet.device,
        evaluator.evaluate,
        recorder,
        run=run_id,
        schema=schema,
        sizes=message_sizes(run_id, schema, w, buffers, side=side),
        stop=settings.stop,
        steps=action_steps(topology, spec.plan),
        absent=spec.plan.absent,
        idle=settings.idle,
        parts=[part for part in made if part is not None],
        evaluates_alone=evaluator.draws,
    )


class _Fleet:
    """Makes devices, when they are needed."""

    def __init__(
        self,
        spec: RunSpec,
        prepared: Prepared,
        side: ClientSide,
        task: Task,
        cost: StepCost,
        queue: EventQueue,
        model: tuple[str, str, Vector, Buffers],
        view: View,
    ) -> None:
        """`model`: run id, and schema, vector and buffers, from which the sizes of messages follow."""
        self._model = model
        self._sizes: dict[str, int] = {}
        """Bytes of an update on the wire, by the names of its pipeline steps."""
        self._spec = spec
        self._prepared = prepared
        self._side = side
        self._cost = cost
        self._patience = from_seconds(silence_timeout(keepalive(task)))
        self._planned = {device.name: (k, device) for k, device in enumerate(_at_first(spec))}
        server = spec.topology.server
        link = None if server.link is None else server.link.plain()
        runtime = spec.topology.runtime
        self.network = VirtualNetwork(
            queue,
            spec.topology.seed,
            link,
            packets=spec.plan.simulates_packets,
        )
        if not task.fits:
            refuse_hidden_state(task, prepared.train, initial_model(spec.topology, spec.directory))
        trainer = BatchTrainer(
            task, prepared.train, initial_model(spec.topology, spec.directory), runtime.device
        )
        if trainer.remark is not None:
            view.progress(trainer.remark)
        self._fits = task.fits
        self._pool = Pool(trainer, lazily=side.send_buffer is not None)
        self._common = spec.topology.update_steps

    def device(self, name: str, last: VirtualDevice | None = None) -> VirtualDevice:
        """`last`: state in which the device ended, None for a new device. A restarted one keeps its
        disk, link, CPU share, and random durations."""
        index, planned = self._planned[name]
        indices = self._prepared.indices[name]
        setup = client_setup(self._spec, planned, index, self._common)
        gradient = self._side.kind == "gradient"
        round_settings = replace(setup.local, steps=1, epochs=None) if gradient else setup.local
        steps, work = round_settings.count(len(indices)), round_settings.work(len(indices))

        def train(wanted: Train) -> Ticket:
            model = wanted.model
            ticket = Ticket(
                pool=self._pool,
                start=model.vector,
                buffers=model.buffers,
                indices=indices,
                local=setup.local,
                lr=setup.local.rate(model.version, model.lr),
                steps=steps,
                work=work,
                client=name,
                index=index,
                rng=lambda: factory.rng(setup, random_generators.TRAINING, wanted.sequence),
                gradient=gradient,
                terms=wanted.terms,
                memory=wanted.memory,
            )
            return self._pool.hand_in(ticket)

        if last is None:
            line = self.network.line(planned, index)
            speed = ComputeTimes(planned, self._cost)
            timing = factory.timing(setup)
        else:
            line, speed, timing = last.line, last.speed, last.timing
        memory = None if last is None else last.memory
        client_steps = factory.steps(setup, self._model[2].size, simulated=True)
        exchanges = (step.simulated_exchange for step in client_steps)
        return VirtualDevice(
            index=index,
            name=name,
            core=factory.core(
                *(setup, len(indices), lambda _: timing.thinking, client_steps),
                memory=memory,
                fits=self._fits,
            ),
            line=line,
            train=train,
            speed=speed,
            timing=timing,
            all_lost=line.link.is_outage,
            patience=self._patience,
            update_size=self._update_size(setup.steps),
            exchange=next((one for one in exchanges if one is not None), None),
            memory=memory,
        )

    def _update_size(self, steps: Sequence[Named]) -> int:
        """Bytes of an update on the wire after `steps`."""
        names = tuple(step.name if step in self._common else repr(step) for step in steps)
        key = repr(names)
        if key not in self._sizes:
            clients = [*self._planned]
            self._sizes[key] = message_sizes(*self._model, steps, clients, self._side)[1]
        return self._sizes[key]


def _at_first(spec: RunSpec) -> Iterator[PlannedDevice]:
    """Devices with the links that they have at time 0, when the first models are sent: by a trace's
    first values."""
    made: defaultdict[str, DeviceState] = defaultdict(DeviceState)
    for step in itertools.takewhile(lambda step: step.at <= 0, action_steps(spec.topology, spec.plan)):
        made[step.device] = made[step.device].with_action(step.action)
    for device in spec.plan.devices:
        changes = made[device.name].link if device.name in made else None
        yield (
            replace(device, link=(device.link or AccessLink()).with_changes(changes))
            if changes
            else device
        )


def _step_cost(spec: RunSpec, prepared: Prepared, task: Task, view: View, parameters: int) -> StepCost:
    """If a `cpu` share needs the time of a step, and the topology does not give it, measure it, and
    write it to the run directory, so that the run can be repeated with it."""
    topology, plan = spec.topology, spec.plan
    virtual = plan.virtual
    if plan.measures_steps:
        idle = topology.idle_devices(spec.samples)
        usable = [d for d in plan.devices if d.cpu is not None and d.gflops is None]
        device = next((d for d in usable if d.name not in idle), None)
        if device is None:
            return costs.step_cost(virtual, topology.task.flops_per_step)
        shard = prepared.shard(device.name)
        view.progress("Measuring how long a step takes here: a few seconds")
        beginning = initial_model(topology, spec.directory)
        make_trainer(task, shard, device.local, beginning).warm_up()  # raises if own code fails
        code = None if topology.user_code is None else str(spec.directory.code)
        whole, sliced = slices.measure_step(
            slices.StepTrial(
                task=topology.task.named, code=code, shard=shard, local=device.local, start=beginning
            )
        )
        step = StepTime(whole, sliced)
        cache_step_time(topology.task.build(), device.local, step, topology.task.frozen)
        view.progress(f"A step takes {whole * 1e3:.2f} ms of a core here (virtual.step_time)")
        virtual = with_step_time(virtual, step)
    if plan.simulates_packets:
        for one in topology.update_steps:
            virtual = _with_exchange(virtual, build_step(one).exchange_cost(parameters), view)
    if virtual != plan.virtual:
        plan.with_measurements(virtual).measured.write(spec.directory.measured)
    return costs.step_cost(virtual, topology.task.flops_per_step)


def _with_exchange(virtual: Virtual, cost: ExchangeCost, view: View) -> Virtual:
    """Add the measured costs of an exchange between clients. Keys that already have a value keep it."""
    measured = {"mask_time": cost.prepare, "share_time": cost.share, "answer_time": cost.answer}
    found = {name: value for name, value in measured.items() if value}
    for name, value in found.items():
        if getattr(virtual, name) is None:
            view.progress(
                f"{name.removesuffix('_time')}: {value * 1e3:.2f} ms of a core (virtual.{name})"
            )
    return virtual.with_defaults(found.items())
