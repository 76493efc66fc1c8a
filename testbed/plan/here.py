"""A topology planned on this host, with what is measured or found on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from testbed.host.nodes import Node
from testbed.plan import model_check, resolution
from testbed.plan.assignment import plan
from testbed.plan.host import this_host
from testbed.plan.planned import Plan
from testbed.speed.calibration import Calibration, calibrate
from testbed.topology import Topology, profiles
from testbed.traits import traits


def check_model(topology: Topology) -> None:
    """Raises BadInputError."""
    model_check.check(topology)
    if topology.task.initial is not None:
        from testbed.plan import models  # with torch, which takes a second

        models.check_initial(topology)


def check_requirements(topology: Topology) -> None:
    """Raise BadInputError where this host lacks packages that own code imports, and where it runs."""
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


def plan_here(
    topology: Topology,
    runtime: str,
    nodes: Sequence[Node],
    speeds: Callable[[], Mapping[str, Calibration]],
    *,
    oversubscribe: bool,
) -> tuple[Topology, Plan]:
    """`topology`, which is resolved, with the shares of this host, and its plan. `nodes`: the machines,
    this one first, where the runtime has several; `speeds` measures how fast a core of each is, by id.
    Raises BadInputError."""
    shares: tuple[str, ...] = ()
    by_node: dict[str, dict[str, float]] = {}
    if resolution.needs_calibration(topology) and nodes:
        found = speeds()
        topology, shares, by_node = resolution.on_nodes(topology, found, nodes[0].id)
        first = found[nodes[0].id].gflops
        nodes = [replace(node, core=found[node.id].gflops / first) for node in nodes]
    elif resolution.needs_calibration(topology):
        topology, shares = resolution.on_host(topology, calibrate())
    host = this_host(
        netem=traits(runtime).shaper is None,
        gpus=traits(runtime).gpus and any(group.gpu for group in topology.devices),
        cuda=topology.runtime.device == "cuda" and not traits(runtime).images,
    )
    host = replace(host, nodes=tuple(nodes))
    profiled = any(group.profile is not None for group in topology.devices)
    known = profiles.load(Path(topology.source.name).parent) if profiled else profiles.Profiles()
    free = None if traits(runtime).simulated else host.memory
    model = 4 * model_check.check(topology)
    # Not kept: another time more may be free.
    limited = resolution.with_memory(topology, known, free, model)
    made = plan(limited, runtime, host, oversubscribe=oversubscribe, model=model, shares=by_node)
    topology = resolution.with_shares(topology, made, by_node)
    notes = tuple(resolution.notes(topology, made, known, host))
    return topology, replace(made, notes=notes, shares=shares)
