"""The plan of a topology on this host, or on the machines of a Swarm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testbed import console
from testbed.errors import BadInputError
from testbed.host.nodes import Node
from testbed.plan import Plan, catalog, plan_on_host
from testbed.run.options import Options
from testbed.runtimes import emulator
from testbed.speed.calibration import Calibration, calibrate
from testbed.topology import Topology, load, machines
from testbed.traits import emulated_runtime_names, runtime_names, traits


def plan_file(path: Path, options: Options) -> tuple[Topology, Plan]:
    """Raises BadInputError."""
    topology = load(path)
    return topology, plan_topology(topology, options)


def plan_topology(topology: Topology, options: Options) -> Plan:
    """Raises BadInputError."""
    found = catalog.read(topology)
    plan_on_host.check_model(topology)
    runtime = choose_runtime(options, topology.runtime.name)
    plan_on_host.check_requirements(topology, installed=not traits(runtime).images)
    nodes = _nodes(runtime, options)
    return plan_on_host.plan_on_host(
        topology,
        found,
        runtime,
        nodes,
        lambda: _speeds(nodes, topology, options),
        oversubscribe=options.oversubscribe,
    )


def choose_runtime(options: Options, requested: str = "auto") -> str:
    """`auto` is replaced by a runtime that this host has."""
    runtime = options.runtime or requested
    if runtime == "auto":
        single = (name for name in emulated_runtime_names() if not traits(name).many_hosts)
        return next(name for name in single if emulator(name).is_available())
    return runtime


def check_host(topology: Topology, plan: Plan) -> None:
    """A quick check of this host and of real devices. Raises HostError."""
    if plan.traits.simulated:
        return
    emulator(plan.runtime).check_host()
    if plan.real_devices:
        from testbed.runtimes.ssh import hosts

        hosts.check_hosts(plan, topology)


def _nodes(runtime: str, options: Options) -> tuple[Node, ...]:
    """Machines of a file that `options` names, or of the Swarm; empty for a runtime that uses this host
    only. Raises BadInputError."""
    if traits(runtime).many_hosts:
        from testbed.host import swarm_nodes  # imports the Docker SDK

        return tuple(
            swarm_nodes.local_nodes() if options.nodes is None else machines.read(options.nodes)
        )
    if options.nodes is not None:
        other = runtime_names(lambda t: t.many_hosts)
        raise BadInputError(f"--nodes: the {runtime} runtime uses one machine; add --runtime {other}")
    return ()


def _speeds(nodes: Sequence[Node], topology: Topology, options: Options) -> dict[str, Calibration]:
    """Speeds of described nodes are computed, others are measured there."""
    if options.nodes is not None:
        return {node.id: calibrate().scaled(node.core or 1.0) for node in nodes}
    from testbed.runtimes.swarm import node_calibration  # imports the Docker SDK: half a second

    return node_calibration.calibrations(nodes, topology.runtime.registry, console.remark)
