"""Shapers, which emulate a run's links.

`netem`: the device's own network namespace has a token bucket filter (tbf) for each direction, and netem
is the child qdisc of each tbf. `tbf+delay`: the device has the same tbf, and the router between devices
and broker has a delay line. In both cases, tbf limits the rates. `relay`: local processes share their
host's network, so they use a relay (testbed.relay).
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.host import kernel
from testbed.topology import Topology
from testbed.topology.yamlfile import Problem
from testbed.traits import Traits


@dataclass(frozen=True, slots=True)
class Shaper:
    name: str
    """`netem`, `tbf+delay` or `relay`."""
    why: str

    @property
    def is_netem(self) -> bool:
        return self.name == "netem"


def choose_shaper(
    topology: Topology, runtime: Traits, lack: str | None
) -> tuple[Shaper | None, list[Problem]]:
    """`lack`: why the kernel's netem cannot be used; None if it can. There is no shaper if there are no
    links."""
    linked = any(
        (group.link is not None or group.segment_name is not None) and not group.is_real
        for group in topology.devices
    )
    linked = linked or any(entry.link is not None for entry in topology.scenario)
    if runtime.simulated or not linked:
        return None, []
    if runtime.shaper is not None:
        return Shaper(runtime.shaper, runtime.shaper_why), []
    requested = topology.runtime.shaper
    if requested == "netem" and lack is not None:
        text = f"found netem, but {lack}: use auto or tbf+delay, or see `testbed doctor` for the fix"
        return None, [topology.source.problem(("runtime", "shaper"), text)]
    if requested != "auto":
        return Shaper(requested, "asked for"), []
    if runtime.many_hosts:
        lack = "other machines' kernels may have no netem"
    if lack is not None:
        return Shaper("tbf+delay", f"auto: {lack}"), []
    return Shaper("netem", "auto: this kernel has it"), []


def lack_of_netem() -> str | None:
    works, answer = kernel.supports(kernel.NETEM)
    if works is None:
        return f"it is unknown whether this kernel has netem ({answer})"
    return None if works else f"this kernel has no netem ({answer})"
