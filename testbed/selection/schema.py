"""Conflicts of the key `selection` of a topology, and notes on it in a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agents.selection.uniform import UniformSelection
from testbed.topology.yamlfile import Where

if TYPE_CHECKING:  # it imports this module
    from testbed.topology.schema import Topology


def problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """Conflicts of the selection with the rule, and with privacy that hides what it needs."""
    settings, rule = topology.selection, topology.rule
    if settings is None or isinstance(selection := settings.build(), UniformSelection):
        return
    if not rule.build().draws:
        keys = [key for key in ("concurrency", "sample") if key in rule.params]
        mend = f"set rule.{keys[0]}" if keys else "remove this"
        yield (
            ("selection",),
            f"the rule {rule.name} draws no clients here, so that a selection has no effect: {mend}, or "
            "choose a rule that draws clients, such as fedbuff with concurrency, fedavg with sample",
        )
    noise = topology.differential
    if selection.needs_loss and noise is not None and noise.at == "client":
        yield (
            ("selection", "name"),
            f"{settings.name} needs the losses of clients, which privacy.differential hides: choose "
            "another selection, or write at: server",
        )


def notes(topology: Topology, _: object) -> Iterator[str]:
    """Yield what a user of the selection should know."""
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
