"""Execution of a plan, from the run's directory to the end of the run."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from agents import events
from agents.events import COMPLETE
from agents.texts import quantity
from testbed import broker as brokers
from testbed.broker import BROKER
from testbed.data import preparation
from testbed.data.preparation import Prepared
from testbed.errors import BadInputError, from_os_error
from testbed.fidelity import host_load
from testbed.fidelity.host_load import FreeCores
from testbed.host.cpu_latency import keep_awake
from testbed.host.signals import uninterrupted
from testbed.plan import Plan
from testbed.plan.agent_configs import RunSpec
from testbed.run import judging, preparing
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import emulator, simulator
from testbed.topology import Topology
from testbed.view import View


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
            entries["timings"] = controller.timings.as_dict()
            if refused := _refused_requests(spec):
                entries["refused"] = refused
                view.progress(
                    f"The broker refused {quantity(sum(refused.values()), 'request')}: see "
                    f"{spec.directory.log(BROKER)}"
                )
            if controller.epoch is not None:
                with suppress(ValueError):  # a record that cannot be read has failed the run already
                    judgement, segments = judging.judge(spec, controller, controller.epoch)
                    entries["host_load"] = host_load.summary(controller.host_samples)
                    entries |= {"validity": judgement.validity.as_dict(), "judged_segments": segments}
                    view.judged(judgement)


def _refused_requests(spec: RunSpec) -> dict[str, int]:
    try:
        log = spec.directory.log(BROKER).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    topology = spec.topology
    accounts = brokers.accounts(
        spec.directory.run, topology.device_names, secure=topology.secure is not None
    )
    return brokers.refusals(log, accounts)
