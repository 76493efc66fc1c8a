"""`testbed up`: from a topology file to a finished run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from agents import events
from testbed import data, engine, manifest
from testbed.configs import RunSpec
from testbed.controller import Controller, View
from testbed.plan import Plan, plan, this_host
from testbed.rundir import RunDirectory
from testbed.runtimes import Runtime
from testbed.topology import Topology, load


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line may say about a run."""

    runtime: str | None = None
    """Overrides the topology's runtime."""
    oversubscribe: bool = False
    data_root: Path | None = None
    resume: bool = False
    """Carry on in a run directory that has a past."""


def planned(path: Path, options: Options) -> tuple[Topology, Plan]:
    """The topology and its plan on this host. Raises BadInputError."""
    topology = load(path)
    runtime = options.runtime or topology.runtime.name
    if runtime == "auto":
        runtime = "docker" if engine.available() else "process"
    return topology, plan(topology, runtime, this_host(), oversubscribe=options.oversubscribe)


def run(
    topology: Topology, plan: Plan, directory: RunDirectory, options: Options, view: View
) -> events.RunEnded:
    """Execute the plan in `directory`; return how it ended.

    Raises TestbedError where it cannot or does not end well, KeyboardInterrupt when interrupted. In
    either case nothing is left running and the directory is readable.
    """
    controller: Controller | None = None
    try:
        spec = _prepare(topology, plan, directory, options, view)
        controller = Controller(spec, _runtime(spec, view), view)
        ended = controller.run()
        directory.write_manifest(outcome=ended.reason)
        return ended
    except KeyboardInterrupt:
        directory.write_manifest(outcome="interrupted")
        raise
    except Exception as error:
        directory.write_manifest(outcome="failed", error=str(error))
        raise
    finally:
        directory.remove_work()
        if controller is not None:
            directory.write_manifest(timings=controller.timings.as_dict())


def _prepare(
    topology: Topology, plan: Plan, directory: RunDirectory, options: Options, view: View
) -> RunSpec:
    """Partition the data and write what the run directory holds from the start."""
    if not options.resume:
        directory.topology.write_text(topology.to_yaml(), encoding="utf-8")
        directory.write_manifest(run=directory.run, created=time.time())
    directory.write_manifest(controller=manifest.controller(), outcome=None)
    dataset_name = topology.task.dataset
    scheme = topology.task.partition
    view.progress(f"Preparing the data: {dataset_name}, {scheme.scheme} partition")
    root = options.data_root or _environment_path("TESTBED_DATA")
    dataset = data.load(dataset_name, root)
    clients = [device.name for device in plan.devices]
    shards = data.partition(dataset.train, scheme.scheme, scheme.params, clients, topology.seed)
    data.write(dataset, shards, directory)
    samples = {name: len(shard) for name, shard in shards.items()}
    spec = RunSpec(directory, topology, plan, samples, options.resume)
    directory.write_manifest(**manifest.describe(spec, data.label_counts(shards)))
    return spec


def _runtime(spec: RunSpec, view: View) -> Runtime:
    if spec.plan.runtime == "process":
        from testbed.runtimes.process import ProcessRuntime

        return ProcessRuntime(spec)
    from testbed import images
    from testbed.runtimes.docker import DockerRuntime

    client = engine.connect()
    built = images.ensure(client, view.progress)
    spec.directory.write_manifest(images={"agent": built.agent, "broker": built.broker})
    return DockerRuntime(client, built, spec)


def _environment_path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
