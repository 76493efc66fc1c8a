"""Notes of a plan on the selection of clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agents.selection.uniform import UniformSelection
from testbed.topology import Topology

if TYPE_CHECKING:  # the plan imports this module
    from testbed.plan.planned_devices import Plan


def notes(topology: Topology, _: Plan) -> Iterator[str]:
    settings = topology.selection
    if settings is None:
        return
    selection, rule = settings.build(), topology.rule
    result = rule.build().assumes_uniform
    if result and rule.build().draws and not isinstance(selection, UniformSelection):
        yield (
            f"The theory of {rule.name} needs uniform draws: {result}. selection: {settings.name} draws "
            "otherwise, so that the model may head for another optimum. The chart `contributions` shows "
            "how far the weights of the devices are from their importance."
        )
