"""Execution of a plan, from the run's directory to the judgement of the run."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents import events
from agents.events import COMPLETE
from agents.texts import quantity
from testbed import broker as brokers
from testbed.broker import BROKER
from testbed.data import preparation
from testbed.data.preparation import Prepared
from testbed.errors import BadInputError, from_os_error
from testbed.fidelity import LegClock, host_load, measure, requested
from testbed.fidelity.features import feature_figures
from testbed.fidelity.host_load import FreeCores
from testbed.fidelity.part import Evidence
from testbed.fidelity.validity import Judgement, Validity, verdict
from testbed.host.cpus import keep_awake
from testbed.host.processes import uninterrupted
from testbed.plan import Plan
from testbed.plan.agent_configs import RunSpec
from testbed.run import preparing
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import emulator, simulator
from testbed.topology import Topology, load
from testbed.topology.devices import DeviceGroup
from testbed.traits import refuse_simulated, traits
from testbed.view import View

if TYPE_CHECKING:
    from testbed.run.controller import Controller


def judge(spec: RunSpec, controller: Controller, epoch: float) -> tuple[Judgement, int]:
    """Return the number of legs that the judgement covers, too. Each start of the run clock begins a
    leg.

    The fidelity is that of the last leg, and is saved in the run directory. The validity is that of
    the whole run. `epoch`: reading of the monotonic clock at device time 0.
    """
    hosts, run = controller.hosts, controller.core.run
    records = list(events.read(spec.directory.events))
    begins = [record.at for record in records if isinstance(record, events.RunStarted)]
    begin = begins[-1] if begins else 0.0
    end = max((record.at for record in records), default=math.inf)
    evidence = Evidence(
        spec=spec,
        records=records,
        clock=LegClock(epoch / spec.plan.dilation, begin=begin, end=end),
        clocks=hosts.clocks,
        loads=hosts.other_samples,
    )
    devices = requested.devices(spec, records)
    trainings = requested.trainings(devices, records)
    fidelity = measure(
        devices,
        evidence.samples(),
        evidence.clock,
        trainings,
    )
    fidelity = replace(
        fidelity,
        clocks=hosts.clocks,
        features=(*controller.core.figures(), *feature_figures(evidence)),
    )
    fidelity.save(spec.directory.fidelity)
    in_manifest = {one.feature: one.entry for one in fidelity.features if one.is_in_manifest}
    if in_manifest:
        spec.directory.write_manifest(**in_manifest)
    steps = tuple(requested.steps(records))
    last = verdict(
        hosts.samples,
        fidelity,
        steps=steps,
        trainings=trainings.values(),
        failures=run.failures,
        others=hosts.other_samples,
        disruptions=[
            replace(one, at=min(one.at, end))
            for one in (*records, *run.disruptions)  # most are in both
            if isinstance(one, events.Disrupted) and one.at >= begin and one.since <= end
        ],
        wrong_sums=[
            record for record in records if isinstance(record, events.WrongSum) and record.at >= begin
        ],
    )
    former = spec.directory.read_manifest()
    earlier = former.get("validity")
    covered = 0 if earlier is None else former.get("judged_legs", 1)
    whole = last.after(Validity.from_dict(earlier or {}), max(0, len(begins) - 1 - covered))
    return Judgement(fidelity, whole, steps), len(begins)


def run(
    topology: Topology, plan: Plan, directory: RunDirectory, options: Options, view: View
) -> events.RunEnded:
    """Raises TestbedError if the run fails, and KeyboardInterrupt if it is interrupted. In all cases, no
    process or container is left running, and the directory is readable. If the run clock had started,
    the run is judged."""
    entries: dict[str, Any] = {"outcome": "interrupted"}
    try:
        simulated = plan.traits.simulated
        free = None if simulated else FreeCores(plan.cpus)
        spec, prepared = preparing.prepare(topology, plan, directory, options, view)
        if free is not None:
            view.progress(free.expectation())
        for compromise in plan.compromises:
            view.progress(compromise)
        ended = (_simulate if simulated else _emulate)(spec, prepared, view, entries)
        entries["outcome"] = ended.reason
        if topology.differential is not None:
            from analysis import privacy  # imports pandas, as does the next line
            from analysis.load import load as load_run

            entries["privacy"] = privacy.record(load_run(directory.path))
        if ended.reason in COMPLETE:
            directory.remove_state()
        return ended
    except OSError as error:
        entries |= {"outcome": "failed", "error": str(failure := from_os_error(error, directory.path))}
        raise failure from error
    except Exception as error:
        entries |= {"outcome": "failed", "error": str(error)}
        raise
    finally:
        with uninterrupted(), suppress(OSError, BadInputError):  # the directory itself may have failed
            directory.remove_work()
            directory.write_manifest(**entries)


def _simulate(spec: RunSpec, prepared: Prepared, view: View, entries: dict[str, Any]) -> events.RunEnded:
    begin = time.monotonic()
    try:
        return simulator(spec.plan.runtime).run(spec, prepared, view)
    finally:
        entries["timings"] = {"real": round(time.monotonic() - begin, 2)}


def _emulate(spec: RunSpec, prepared: Prepared, view: View, entries: dict[str, Any]) -> events.RunEnded:
    from testbed.run.controller import Controller  # imports MQTT, which virtual time does not use

    launcher = emulator(spec.plan.runtime).launcher
    if spec.plan.real_devices:
        from testbed.runtimes.ssh import mixed

        launcher = mixed.launcher
    preparation.write(prepared, spec.directory)
    preparation.write_device_set(prepared, spec.topology, spec.directory)
    spec.directory.begin_telemetry()
    with launcher(spec, view) as runtime, keep_awake() as awake:
        spec.directory.write_manifest(cores_awake=awake)
        if not awake:
            view.progress("Idle cores may sleep, which slows small CPU shares: see `testbed doctor`")
        controller = Controller(spec, runtime, view)
        try:
            return controller.run()
        finally:  # a second interruption leaves the run without a verdict
            entries["timings"] = {name: round(value, 2) for name, value in controller.timings.items()}
            if refused := _refused_requests(spec):
                entries["refused"] = refused
                view.progress(
                    f"The broker refused {quantity(sum(refused.values()), 'request')}: see "
                    f"{spec.directory.log(BROKER)}"
                )
            if (epoch := controller.core.run.epoch) is not None:
                with suppress(ValueError):  # a record that cannot be read has failed the run already
                    judgement, legs = judge(spec, controller, epoch)
                    entries["host_load"] = host_load.summary(controller.hosts.samples)
                    entries |= {"validity": judgement.validity.as_dict(), "judged_legs": legs}
                    view.judged(judgement)


def _refused_requests(spec: RunSpec) -> dict[str, int]:
    try:
        log = spec.directory.log(BROKER).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    topology = spec.topology
    accounts = brokers.accounts(spec.directory.run, topology.device_names, peers=topology.has_exchange)
    return brokers.refusals(log, accounts)


_GRIDS = Path(__file__).parents[1] / "catalog"
_CPU, _LINKS = _GRIDS / "fidelity-cpu.yaml", _GRIDS / "fidelity-links.yaml"


def run_selfcheck(runtime: str | None, runs: Path, view: View) -> list[RunDirectory]:
    """If the runtime cannot lose packets, links with loss are left out. Raises TestbedError."""
    refuse_simulated(runtime)
    made = []
    options = Options(runtime)
    lossless = traits(preparing.choose_runtime(options)).lossless_reason
    for grid in (_CPU, _LINKS):
        topology = load(grid)
        if lossless:
            devices = tuple(filter(_loses_nothing, topology.devices))
            topology = topology.model_copy(update={"devices": devices})
        plan = preparing.plan_topology(topology, options)
        preparing.check_host(topology, plan)
        directory = RunDirectory.new(runs, topology.name)
        run(topology, plan, directory, options, view)
        made.append(directory)
    return made


def _loses_nothing(group: DeviceGroup) -> bool:
    return group.link is None or not group.link.loss
