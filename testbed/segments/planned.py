"""Segments in a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from agents.config import Segment, path_of
from agents.router.segments import MAX_LEVELS
from testbed.segments import schema
from testbed.topology import Topology
from testbed.topology.yamlfile import Problem
from testbed.traits import runtime_names, traits

if TYPE_CHECKING:  # the plan imports this module
    from testbed.plan.machines import HostResources
    from testbed.plan.planned_devices import Plan


def refusals(topology: Topology, runtime: str, _: HostResources) -> Iterator[Problem]:
    """Yield a problem for each segment on a level that the kernel of a router cannot shape."""
    if traits(runtime).simulated or traits(runtime).shaper is not None:
        return
    levels: dict[str | None, int] = {None: 0}
    for name, segment in topology.segments.items():  # parents come first
        level = levels[name] = levels[segment.parent] + 1
        if level > MAX_LEVELS:
            yield topology.source.problem(
                ("network", name, "parent"),
                f"is level {level} of the tree, but the kernel shares at most {MAX_LEVELS} levels: "
                "leave out levels without a rate, or use the "
                f"{runtime_names(lambda t: t.shaper is not None)} runtime",
            )


def place(made: Plan, topology: Topology, _: HostResources) -> tuple[Plan, Sequence[Problem]]:
    """Find groups that share a segment with devices on another node."""
    return made, [*_split(topology, made.segments, made.placement)] if made.placement else ()


def _split(
    topology: Topology, segments: Mapping[str, Segment], placement: Mapping[str, str]
) -> Iterator[Problem]:
    """`placement`: device -> node."""
    first: dict[str, str] = {}
    for index, group in enumerate(topology.devices):
        path = path_of(group.segment_name, segments)
        split = (
            segment.name
            for name in group.device_names
            for segment in path
            if placement[name] != first.setdefault(segment.name, placement[name])
        )
        if (shared := next(split, None)) is not None:
            yield topology.source.problem(
                ("devices", index, "segment" if group.access is None else "access"),
                f"{shared} is shared by devices on several nodes, which cannot share a link: put all of "
                "them on one node, with hosts: [NODE]",
                at_key=True,
            )


def notes(_: Topology, plan: Plan) -> Iterator[str]:
    used = frozenset(segment.name for device in plan.devices for segment in device.path)
    yield from schema.notes(plan.segments, used)
