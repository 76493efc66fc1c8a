"""Actions on the devices during a run: scenario, churn, heat and link traces."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from agents.config import OUTAGE_RATE
from testbed.plan.planned_devices import Plan
from testbed.topology import Topology, link_traces, scenario
from testbed.topology.action_timeline import Heat, Step, timeline


def steps(topology: Topology, plan: Plan) -> Iterator[Step]:
    """Yield the steps in the order of their times."""
    heat = {
        device.name: Heat(device.cpu, device.thermal)
        for device in plan.devices
        if device.cpu is not None and device.thermal is not None
    }
    played = timeline(topology.scenario, topology.churn, topology.devices, topology.seed, heat=heat)
    traced = [link_traces.steps(device.name, device.trace) for device in plan.devices if device.trace]
    return heapq.merge(played, *traced, key=lambda step: step.at)


def has_steps(topology: Topology, plan: Plan) -> bool:
    return next(steps(topology, plan), None) is not None


def lowest_rates(topology: Topology, plan: Plan) -> dict[str, float]:
    """Return the lowest planned rate of each device's path during the run, in bit/s; infinite if the
    path is never limited. Outages do not count.

    A user may set a lower rate during the run (`testbed set`).
    """
    rates: dict[str, list[float | None]] = {
        device.name: [
            *(
                rate
                for link in (device.as_shaped.link, *device.path)
                if link is not None
                for rate in (link.up, link.down)
            ),
            *(
                rate
                for trace in device.trace
                for way in ("up", "down")
                for rate in trace.columns.get(way, ())
            ),
        ]
        for device in plan.devices
    }
    by_group = scenario.devices_by_group(topology.devices)
    below = plan.devices_below
    for entry in topology.scenario:
        if entry.link is not None:
            for target in scenario.expand(entry.targets, by_group):
                for name in below.get(target, (target,)):
                    rates[name] += [entry.link.changes.get(way) for way in ("up", "down")]
    return {
        name: min((rate for rate in found if rate and rate >= OUTAGE_RATE), default=math.inf)
        for name, found in rates.items()
    }
