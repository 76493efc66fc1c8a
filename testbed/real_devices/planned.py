"""Real devices in a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from testbed.topology import Topology
from testbed.topology.yamlfile import Problem
from testbed.traits import runtime_names, traits

if TYPE_CHECKING:  # the plan imports this module
    from testbed.plan.machines import HostResources
    from testbed.plan.planned_devices import Plan


def refusals(topology: Topology, runtime: str, _: HostResources) -> Iterator[Problem]:
    found = traits(runtime)
    if found.real_devices:
        return
    others = runtime_names(lambda t: t.real_devices)
    why = "simulates its devices" if found.simulated else "cannot reach real devices"
    for index, group in enumerate(topology.devices):
        if group.is_real:
            yield topology.source.problem(
                ("devices", index, "hosts"),
                f"the {runtime} runtime {why}: use the {others} runtime, or replace the real devices by "
                "emulated ones",
                at_key=True,
            )


def notes(_: Topology, plan: Plan) -> Iterator[str]:
    if plan.server is not None:
        address, port = plan.server
        yield (
            f"Real devices reach the broker at {address}, port {port}, with TLS and a login each: a "
            f"firewall of this host must let them, such as sudo ufw allow proto tcp to {address} port "
            f"{port}. Nothing of them is limited or shaped, unless their group has shape: true: step "
            "time, rates, round trip, clock and load are measured."
        )
