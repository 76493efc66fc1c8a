"""`testbed up`: from a topology file to a finished run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from agents import events
from agents.clock import in_device_time
from agents.events import COMPLETE
from testbed import broker as brokers
from testbed import console
from testbed.broker import BROKER
from testbed.errors import BadInputError, of_os
from testbed.fidelity import Clock, host_load, measure, requested
from testbed.fidelity.host_load import FreeCores
from testbed.fidelity.validity import Judgement, Validity, verdict
from testbed.host.cpu_latency import keep_awake
from testbed.host.nodes import Node
from testbed.host.signals import uninterrupted
from testbed.plan import Plan, datasets, model_check, plan, preparation, resolution, rounds, this_host
from testbed.plan.agent_configs import RunSpec
from testbed.plan.calibration import Calibration, calibrate
from testbed.plan.preparation import Prepared
from testbed.plan.resolution import needs_calibration, on_host, on_nodes, resolved, with_shares
from testbed.run import manifest
from testbed.rundir.directory import RunDirectory
from testbed.rundir.tail import Samples
from testbed.runtimes import emulator, simulator
from testbed.topology import Topology, load, machines, profiles
from testbed.traits import emulated, those, traits
from testbed.view import View

if TYPE_CHECKING:
    from testbed.run.controller import Controller


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses for a run beside its topology."""

    runtime: str | None = None
    """Overrides the topology's runtime."""
    oversubscribe: bool = False
    data_root: Path | None = None
    resume: bool = False
    """Continue an earlier run in its directory."""
    dashboard: int | None = None
    """The port of the page to show it on, 0 for a free one; None: no page."""
    metrics: int | None = None
    """The same for the Prometheus metrics."""
    track: tuple[str, ...] = ()
    """Experiment trackers (`testbed.tracking`) that are told of it."""
    nodes: Path | None = None
    """File that describes the machines to plan for; None: those that there are."""
    verbose: bool = False
    """Have clients log each round."""


def planned(path: Path, options: Options) -> tuple[Topology, Plan]:
    """The topology and its plan on this host. Raises BadInputError."""
    return planned_here(load(path), options)


def planned_rounds(topology: Topology, made: Plan, options: Options) -> dict[str, rounds.Round]:
    """How long a round of each device is expected to take. Raises BadInputError."""
    samples = preparation.known_samples(topology, options.data_root)
    return rounds.expected(topology, made, model_check.check(topology), samples)


def planned_here(topology: Topology, options: Options) -> tuple[Topology, Plan]:
    """`topology`, resolved, and its plan on this host. Raises BadInputError."""
    topology = resolved(topology)
    check_model(topology)
    runtime = chosen_runtime(options, topology.runtime.name)
    if not traits(runtime).images:
        _check_requirements(topology)
    nodes = _nodes(runtime, options)
    shares: tuple[str, ...] = ()
    by_node: dict[str, dict[str, float]] = {}
    if needs_calibration(topology) and nodes:
        speeds = _speeds(nodes, topology, options)
        topology, shares, by_node = on_nodes(topology, speeds, nodes[0].id)
        here = speeds[nodes[0].id].gflops
        nodes = tuple(replace(node, core=speeds[node.id].gflops / here) for node in nodes)
    elif needs_calibration(topology):
        topology, shares = on_host(topology, calibrate())
    host = this_host(
        netem=traits(runtime).shaper is None,
        gpus=traits(runtime).gpus and any(group.gpu for group in topology.devices),
        cuda=topology.runtime.device == "cuda" and not traits(runtime).images,
    )
    host = replace(host, nodes=nodes)
    profiled = any(group.profile is not None for group in topology.devices)
    known = profiles.load(Path(topology.source.name).parent) if profiled else profiles.Profiles()
    free = None if traits(runtime).simulated else host.memory
    model = 4 * model_check.check(topology)
    # Not kept: another time more may be free.
    limited = resolution.with_memory(topology, known, free, model)
    made = plan(limited, runtime, host, oversubscribe=options.oversubscribe, model=model, shares=by_node)
    topology = with_shares(topology, made, by_node)
    notes = tuple(resolution.notes(topology, made, known, host))
    return topology, replace(made, notes=notes, shares=shares)


def _nodes(runtime: str, options: Options) -> tuple[Node, ...]:
    """The machines to plan for, as described or as they are; none where the runtime has this one alone.
    Raises BadInputError."""
    if traits(runtime).many_hosts:
        from testbed.host import swarm  # with the Docker SDK

        return tuple(swarm.here() if options.nodes is None else machines.read(options.nodes))
    if options.nodes is not None:
        other = those(lambda t: t.many_hosts)
        raise BadInputError(f"--nodes: the {runtime} runtime has one machine; add --runtime {other}")
    return ()


def _speeds(nodes: Sequence[Node], topology: Topology, options: Options) -> dict[str, Calibration]:
    """How fast a core of each node is: as described, by this host's, or as measured there."""
    if options.nodes is not None:
        return {node.id: calibrate().scaled(node.core or 1.0) for node in nodes}
    from testbed.runtimes import swarm_maintenance  # with the Docker SDK, which takes half a second

    return swarm_maintenance.calibrations(nodes, topology.runtime.registry, console.remark)


def _check_requirements(topology: Topology) -> None:
    """Raise BadInputError where this host lacks packages that own code imports."""
    problems = []
    for index, text in enumerate(topology.requirements):
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found = None
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            state = "is not installed here" if found is None else f"is {found} here"
            problems.append(
                topology.source.problem(
                    ("requirements", index),
                    f"{wanted.name} {state}: {sys.executable} -m pip install '{text}'",
                )
            )
    if problems:
        raise topology.source.error(problems)


def check_model(topology: Topology) -> None:
    model_check.check(topology)
    if topology.task.initial is not None:
        from testbed.plan import models  # with torch, which takes a second

        models.check_initial(topology)


def chosen_runtime(options: Options, requested: str = "auto") -> str:
    """Name of the runtime: the command line's, else the topology's; `auto` is resolved for this host."""
    runtime = options.runtime or requested
    if runtime == "auto":
        here = (name for name in emulated() if not traits(name).many_hosts)
        return next(name for name in here if emulator(name).available())
    return runtime


def run(
    topology: Topology, plan: Plan, directory: RunDirectory, options: Options, view: View
) -> events.RunEnded:
    """Execute the plan in `directory`; return how it ended.

    Raises TestbedError where it cannot or does not end well, KeyboardInterrupt when interrupted. In
    either case nothing is left running, the directory is readable, and what the devices got is judged
    if the run clock has started.
    """
    entries: dict[str, Any] = {"outcome": "interrupted"}
    try:
        simulated = plan.traits.simulated
        free = None if simulated else FreeCores(plan.cpus)
        spec, prepared = _prepare(topology, plan, directory, options, view)
        if free is not None:
            view.progress(free.expectation())
        ended = (_simulate if simulated else _emulate)(spec, prepared, view, entries)
        entries["outcome"] = ended.reason
        if topology.differential is not None:
            from analysis import privacy  # with pandas, as what follows
            from analysis.load import load as load_run

            entries["privacy"] = privacy.record(load_run(directory.path))
        if ended.reason in COMPLETE:
            directory.remove_state()
        return ended
    except OSError as error:
        entries |= {"outcome": "failed", "error": str(failure := of_os(error, directory.path))}
        raise failure from error
    except Exception as error:
        entries |= {"outcome": "failed", "error": str(error)}
        raise
    finally:
        with uninterrupted(), suppress(OSError, BadInputError):  # the directory may be what failed
            directory.remove_work()
            directory.write_manifest(**entries)


def _prepare(
    topology: Topology, plan: Plan, directory: RunDirectory, options: Options, view: View
) -> tuple[RunSpec, Prepared]:
    """Partition the data and write what the run directory holds from the start."""
    if options.resume and (why := plan.traits.unresumable):
        raise BadInputError(
            f"a run of the {plan.runtime} runtime cannot be resumed: {why}, "
            f"testbed up {directory.topology}"
        )
    topology = with_kept_code(topology, directory, resume=options.resume)
    if not options.resume:
        directory.topology.write_text(topology.to_yaml(), encoding="utf-8")
        directory.write_manifest(run=directory.run, created=time.time())
        if topology.task.initial is not None or model_check.freezes(topology):
            from testbed.plan import models

            models.write_start(topology, directory)
    directory.claim()
    task = topology.task
    chosen = datasets.source(topology)
    data = f"{chosen.name}, {task.partition.scheme} partition" if chosen else task.name
    for sentence in plan.shares:
        view.progress(sentence)
    view.progress(f"Preparing the data: {data}")
    prepared = preparation.prepare(topology, options.data_root, view.progress)
    model_check.check_data(topology, prepared)
    model_check.try_step(topology, prepared)
    for remark in prepared.remarks:
        view.progress(remark)
    samples = {client: len(own) for client, own in prepared.indices.items()}
    spec = RunSpec(directory, topology, plan, samples, options.verbose)
    remarks = {"data": list(prepared.remarks)} if prepared.remarks else {}
    own = own_data(topology, directory, view)
    described = manifest.describe(spec, preparation.label_counts(prepared))
    directory.write_manifest(**described, **remarks, **own)
    return spec, prepared


def own_data(topology: Topology, directory: RunDirectory, view: View) -> dict[str, str]:
    """What the manifest has of the run's own data files; `view` is told where a run goes on with others
    than it began with. Raises BadInputError."""
    files = datasets.own_files(topology)
    if directory.read_manifest().get("data_files", files) != files:
        view.progress(
            "Warning: the data files have other sizes, or times of change, than when the run began; if "
            "their content is another, too, start a new run"
        )
    return {"data_files": files} if files else {}


def with_kept_code(topology: Topology, directory: RunDirectory, *, resume: bool) -> Topology:
    """`topology` with its own code as `directory` keeps it, by the path from there: a copy, so that a
    run that goes on, or is replayed, is of the same code. Raises BadInputError where it was changed."""
    code = topology.own_code
    if code is None:
        return topology
    if not resume:
        code.copy(directory.code)
        directory.write_manifest(code=code.digest)
    elif directory.read_manifest().get("code") != code.digest:
        raise BadInputError(f"{directory.code} was changed since the run began: start a new run with it")
    return topology.with_code(directory.code.name)


def _simulate(spec: RunSpec, prepared: Prepared, view: View, entries: dict[str, Any]) -> events.RunEnded:
    """Run in virtual time, in this process."""
    begin = time.monotonic()
    try:
        return simulator(spec.plan.runtime).run(spec, prepared, view)
    finally:
        entries["timings"] = {"real": round(time.monotonic() - begin, 2)}


def _emulate(spec: RunSpec, prepared: Prepared, view: View, entries: dict[str, Any]) -> events.RunEnded:
    """Run in wall time, on devices that a runtime starts and ends."""
    from testbed.run.controller import Controller  # with MQTT, of which virtual time has no use

    preparation.write(prepared, spec.directory)
    preparation.write_device_set(prepared, spec.topology, spec.directory)
    spec.directory.begin_telemetry()
    with emulator(spec.plan.runtime).launcher(spec, view) as runtime, keep_awake() as awake:
        spec.directory.write_manifest(cores_awake=awake)
        if not awake:
            view.progress("Idle cores may sleep, which slows small CPU shares: see `testbed doctor`")
        controller = Controller(spec, runtime, view)
        try:
            return controller.run()
        finally:  # interrupted once more, a run has no verdict
            entries["timings"] = controller.timings.as_dict()
            if refused := _refused(spec):
                entries["refused"] = refused
                view.progress(
                    f"The broker refused {sum(refused.values())} requests: see "
                    f"{spec.directory.log(BROKER)}"
                )
            if controller.epoch is not None:
                with suppress(ValueError):  # a record that cannot be read has failed the run already
                    judgement, segments = _judged(spec, controller, controller.epoch)
                    entries["host_load"] = host_load.summary(controller.host_samples)
                    entries |= {"validity": judgement.validity.as_dict(), "judged_segments": segments}
                    view.judged(judgement)


def _refused(spec: RunSpec) -> dict[str, int]:
    """How much the broker refused, by login."""
    try:
        log = spec.directory.log(BROKER).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    topology = spec.topology
    accounts = brokers.accounts(
        spec.directory.run, topology.device_names, secure=topology.secure is not None
    )
    return brokers.refusals(log, accounts)


def _judged(spec: RunSpec, controller: Controller, epoch: float) -> tuple[Judgement, int]:
    """The fidelity of the run's last segment, saved in the run directory; the validity of the whole run;
    and of how many segments it is, each from a start of the run clock."""
    records = list(events.read(spec.directory.events))
    begins = [record.at for record in records if isinstance(record, events.RunStarted)]
    begin = begins[-1] if begins else 0.0
    end = max((record.at for record in records), default=math.inf)
    dilation = spec.plan.dilation
    devices = requested.devices(spec, records)
    trainings = requested.trainings(devices, records)
    fidelity = measure(
        devices,
        (in_device_time(one, dilation) for one in Samples(spec.directory.telemetry).read()),
        Clock(epoch / dilation, begin=begin, end=end),
        trainings,
    )
    fidelity = replace(fidelity, clocks=controller.clocks)
    fidelity.save(spec.directory.fidelity)
    steps = tuple(requested.steps(records))
    judged = verdict(
        controller.host_samples,
        fidelity,
        steps=steps,
        trainings=trainings.values(),
        failures=controller.failures,
        others=controller.other_samples,
        disruptions=[
            record for record in records if isinstance(record, events.Disrupted) and record.at >= begin
        ],
    )
    former = spec.directory.read_manifest()
    earlier = former.get("validity")
    covered = 0 if earlier is None else former.get("judged_segments", 1)
    whole = judged.after(Validity.from_dict(earlier or {}), max(0, len(begins) - 1 - covered))
    return Judgement(fidelity, whole, steps), len(begins)
