"""From a topology to its plan on this host, or on the machines that there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testbed import console
from testbed.errors import BadInputError
from testbed.host.nodes import Node
from testbed.plan import Plan, catalog, here
from testbed.run.options import Options
from testbed.runtimes import emulator
from testbed.speed.calibration import Calibration, calibrate
from testbed.topology import Topology, load, machines
from testbed.traits import emulated, those, traits


def plan_file(path: Path, options: Options) -> tuple[Topology, Plan]:
    """The topology and its plan on this host. Raises BadInputError."""
    topology = load(path)
    return topology, plan_topology(topology, options)


def plan_topology(topology: Topology, options: Options) -> Plan:
    """The plan of `topology` on this host. Raises BadInputError."""
    found = catalog.read(topology)
    here.check_model(topology)
    runtime = chosen_runtime(options, topology.runtime.name)
    if not traits(runtime).images:
        here.check_requirements(topology)
    nodes = _nodes(runtime, options)
    return here.plan_here(
        topology,
        found,
        runtime,
        nodes,
        lambda: _speeds(nodes, topology, options),
        oversubscribe=options.oversubscribe,
    )


def chosen_runtime(options: Options, requested: str = "auto") -> str:
    """Name of the runtime: the command line's, else the topology's; `auto` is resolved for this host."""
    runtime = options.runtime or requested
    if runtime == "auto":
        single = (name for name in emulated() if not traits(name).many_hosts)
        return next(name for name in single if emulator(name).is_available())
    return runtime


def check_host(plan: Plan) -> None:
    """Raise HostError if this host would refuse to run `plan`, as far as can be asked at once."""
    if not plan.traits.simulated:
        emulator(plan.runtime).check_host()


def _nodes(runtime: str, options: Options) -> tuple[Node, ...]:
    """The machines to plan for, as described or as they are; none where the runtime has this one alone.
    Raises BadInputError."""
    if traits(runtime).many_hosts:
        from testbed.host import swarm_nodes  # with the Docker SDK

        return tuple(swarm_nodes.here() if options.nodes is None else machines.read(options.nodes))
    if options.nodes is not None:
        other = those(lambda t: t.many_hosts)
        raise BadInputError(f"--nodes: the {runtime} runtime has one machine; add --runtime {other}")
    return ()


def _speeds(nodes: Sequence[Node], topology: Topology, options: Options) -> dict[str, Calibration]:
    """How fast a core of each node is: as described, by this host's, or as measured there."""
    if options.nodes is not None:
        return {node.id: calibrate().scaled(node.core or 1.0) for node in nodes}
    from testbed.runtimes.swarm import node_calibration  # with the Docker SDK, which takes half a second

    return node_calibration.calibrations(nodes, topology.runtime.registry, console.remark)
