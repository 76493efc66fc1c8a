"""Planning of a topology on this host. The module also makes the measurements that a plan needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata

from packaging.requirements import Requirement

from testbed.host.nodes import Node
from testbed.plan import model_check
from testbed.plan.assignment import plan
from testbed.plan.catalog import HERE, Catalog, needs_speeds, with_cpu
from testbed.plan.host import this_host
from testbed.plan.planned_devices import Plan
from testbed.speed.calibration import Calibration, calibrate
from testbed.topology import Topology
from testbed.traits import traits


def check_model(topology: Topology) -> None:
    """Raises BadInputError if the model or its initial state is invalid."""
    model_check.check(topology)
    if topology.task.initial is not None:
        from testbed.plan import models  # imports torch, which takes a second

        models.check_initial(topology)


def check_requirements(topology: Topology, *, installed: bool) -> None:
    """Raise BadInputError if the user's own code requires packages that are for another PyTorch than the
    testbed's. If `installed` is true, the packages must also be installed on this host."""
    if not topology.requirements:
        return
    from testbed.images import torch_companions  # imports the Docker SDK, which takes half a second

    problems = []
    for index, text in enumerate(topology.requirements):
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        if (refusal := torch_companions.refusal(wanted)) is not None:
            message = f"{text} {refusal}"
            problems.append(topology.source.problem(("requirements", index), message))
            continue
        if not installed:
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found = None
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            state = "is not installed" if found is None else f"is installed as {found}"
            problems.append(
                topology.source.problem(
                    ("requirements", index),
                    f"{wanted.name} {state}: run {torch_companions.install_command(text)}",
                )
            )
    if problems:
        raise topology.source.error(problems)


def plan_on_host(
    topology: Topology,
    catalog: Catalog,
    runtime: str,
    nodes: Sequence[Node],
    speeds: Callable[[], Mapping[str, Calibration]],
    *,
    oversubscribe: bool,
) -> Plan:
    """`nodes`: the machines, this machine first; empty if the runtime uses only one. `speeds`: measures
    the speed of a core of each node, and returns node's id -> calibration. Raises BadInputError."""
    if needs_speeds(topology, catalog, many_hosts=bool(nodes)):
        found = speeds() if nodes else {HERE: calibrate()}
        here = nodes[0].id if nodes else HERE
        catalog = with_cpu(catalog, topology, found, here)
        nodes = [replace(one, core=found[one.id].gflops / found[here].gflops) for one in nodes]
    host = this_host(
        netem=traits(runtime).shaper is None,
        gpus=traits(runtime).gpus and any(group.gpu for group in topology.devices),
        cuda=topology.runtime.device == "cuda" and not traits(runtime).images,
    )
    catalog = replace(catalog, model=4 * model_check.check(topology))
    host = replace(host, nodes=tuple(nodes))
    return plan(topology, runtime, host, catalog, oversubscribe=oversubscribe)
