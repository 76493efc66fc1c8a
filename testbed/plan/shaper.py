"""Shapers, which make a run's links.

`netem` is the child of each tbf in the device's own network namespace; `tbf+delay` is that tbf and a
delay line in the router between devices and broker. Rates are tbf's in both. Processes, which share
their host's network, have a `relay` (testbed.relay).
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
    def netem(self) -> bool:
        return self.name == "netem"


def choose(topology: Topology, runtime: Traits, lack: str | None) -> tuple[Shaper | None, list[Problem]]:
    """The shaper of the links of `topology`, None where there are none; and the problems with it.

    `lack` is why the kernel's netem cannot be used; None where it can.
    """
    linked = any(group.link is not None or group.access is not None for group in topology.devices)
    linked = linked or any(entry.link is not None for entry in topology.scenario)
    if runtime.simulated or not linked:
        return None, []
    if runtime.shaper is not None:
        return Shaper(runtime.shaper, runtime.shaper_why), []
    requested = topology.runtime.shaper
    if requested == "netem" and lack is not None:
        text = f"found netem, but {lack}: take auto or tbf+delay, or see `testbed doctor` for the fix"
        return None, [topology.source.problem(("runtime", "shaper"), text)]
    if requested != "auto":
        return Shaper(requested, "asked for"), []
    if runtime.many_hosts:
        lack = "other machines' kernels may have no netem"
    if lack is not None:
        return Shaper("tbf+delay", f"auto: {lack}"), []
    return Shaper("netem", "auto: this kernel has it"), []


def lack_of_netem() -> str | None:
    """Why this kernel's netem cannot be used, found by trying; None where it can."""
    works, answer = kernel.supports(kernel.NETEM)
    if works is None:
        return f"whether this kernel has netem cannot be tried ({answer})"
    return None if works else f"this kernel has no netem ({answer})"
