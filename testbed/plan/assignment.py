"""From a topology to its plan on a host: which cores are for what, and what each device has of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from agents.config import Link
from testbed.plan import feasibility, gpus, memory
from testbed.plan.gpus import PlannedGpu
from testbed.plan.host import Host
from testbed.plan.placement import SHARED_CAPACITY, PlannedNode, Unplaced, Wish, place
from testbed.plan.placement import planned as planned_node
from testbed.plan.planned import Plan, PlannedDevice, cpuset
from testbed.plan.shaper import choose
from testbed.topology import Topology, link_traces
from testbed.topology.devices import DeviceGroup
from testbed.traits import traits

_STRETCH = 1.02
"""By which time is stretched more, until the devices fit on the nodes."""
_ROUNDING = 1e-9
"""Error allowed when a dilation is rounded up to two decimals."""


def plan(
    topology: Topology,
    runtime: str,
    host: Host,
    *,
    oversubscribe: bool = False,
    model: int = 0,
    shares: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> Plan:
    """What the runtime of that name will launch on `host`, for a model of so many bytes.

    Broker and aggregator have the first core to themselves, evaluations the last ones where they are to
    have their own, and the devices the others. `shares` are what groups have of a core, by
    node, where that depends on the node. Raises BadInputError, with the numbers, where the devices
    ask for more than that, unless `oversubscribe`; and always where the runtime cannot do what the
    topology asks, or there is none of that name.
    """
    found = traits(runtime)
    problems = list(feasibility.without_gpu(topology, runtime, host.lack_of_cuda))
    if found.simulated:
        if problems:
            raise topology.source.error(problems)
        return Plan(runtime=runtime, devices=tuple(_devices(topology)))
    if found.many_hosts:
        return _on_nodes(
            topology, runtime, host, oversubscribe=oversubscribe, model=model, shares=shares
        )
    alone = len(host.cores) > 1
    evaluating = topology.evaluate.cores or 0
    if problem := feasibility.no_cores_to_evaluate(topology, len(host.cores)):
        raise topology.source.error([problem])
    split = len(host.cores) - evaluating
    device_cores = host.cores[1:split] if alone else host.cores
    capacity = float(len(device_cores)) if alone else SHARED_CAPACITY
    dilation = _dilation(topology, capacity)
    problems += feasibility.unsupported(topology, runtime)
    if found.cgroups:
        problems += feasibility.too_little_cpu(topology, dilation)
        problems += feasibility.too_little_memory(topology)
    shaper, shaper_problems = choose(topology, found, host.lack_of_netem)
    problems += shaper_problems
    if found.gpus:
        problems += gpus.problems(topology, host.gpus, dilation)
    reserved = memory.reserved(model, len(topology.device_names))
    if not oversubscribe:
        problems += [
            *feasibility.too_much_cpu(topology, len(host.cores), capacity * dilation),
            *feasibility.too_much_later(
                topology, capacity * dilation, feasibility.shares_at_start(topology)
            ),
            *feasibility.too_much_memory(topology, host.memory, reserved),
        ]
    on_gpus: Mapping[str, PlannedGpu] = {}
    if found.gpus and not problems:
        on_gpus, no_room = gpus.placed(topology, host.gpus, oversubscribe=oversubscribe)
        problems += [] if no_room is None else [no_room]
    if problems:
        raise topology.source.error(problems)
    devices = [replace(one, gpu=on_gpus.get(one.name)) for one in _devices(topology, dilation)]
    return Plan(
        runtime=runtime,
        devices=tuple(devices),
        dilation=dilation,
        infrastructure_cpus=cpuset(host.cores[:1]),
        device_cpus=cpuset(device_cores),
        evaluation_cpus=cpuset(host.cores[split:]),
        device_capacity=capacity,
        oversubscribed=oversubscribe,
        shaper=shaper,
        aggregator_memory=memory.left(host.memory, devices, reserved),
    )


def _on_nodes(
    topology: Topology,
    runtime: str,
    host: Host,
    *,
    oversubscribe: bool,
    model: int,
    shares: Mapping[str, Mapping[str, float]],
) -> Plan:
    """What is launched on the nodes of `host`. Raises BadInputError."""
    found, source = traits(runtime), topology.source
    evaluating = topology.evaluate.cores or 0
    if problem := feasibility.no_cores_to_evaluate(topology, host.nodes[0].cores):
        raise source.error([problem])
    reserved = memory.reserved(model, len(topology.device_names))
    nodes = tuple(planned_node(one, reserved, evaluating if one.here else 0) for one in host.nodes)
    capacity = math.fsum(node.capacity for node in nodes)
    least = {group: min(of.values()) for group, of in shares.items()}
    dilation = _dilation(topology, capacity, least)
    placed = place(_wishes(topology, dilation, shares), nodes, oversubscribe=oversubscribe)
    while isinstance(placed, Unplaced) and placed.by_cores and topology.dilation == "auto":
        dilation = math.ceil(dilation * _STRETCH * 100) / 100  # whole devices leave gaps on each node
        placed = place(_wishes(topology, dilation, shares), nodes, oversubscribe=oversubscribe)
    shaper, problems = choose(topology, found, host.lack_of_netem)
    problems += [
        *feasibility.unsupported(topology, runtime),
        *feasibility.too_little_cpu(topology, dilation),
        *feasibility.too_little_memory(topology),
    ]
    if not isinstance(placed, Unplaced):
        problems += feasibility.access_apart(topology, placed)
    if isinstance(placed, Unplaced):
        problems.append(feasibility.on_no_node(topology, placed.wish.device, placed.why))
    if problems or isinstance(placed, Unplaced):
        raise source.error(problems)
    devices = tuple(_of_nodes(topology, dilation, placed, nodes, shares))
    if not oversubscribe:
        for node in nodes:
            asked = {one.name: one.cpu or 0.0 for one in devices if placed[one.name] == node.id}
            most = node.capacity * dilation
            problems += feasibility.too_much_later(topology, most, asked, node.name)
    if problems:
        raise source.error(problems)
    first = nodes[0]
    beside = [one for one in devices if placed[one.name] == first.id]
    return Plan(
        runtime=runtime,
        devices=devices,
        dilation=dilation,
        infrastructure_cpus=cpuset(first.infrastructure),
        device_cpus=cpuset(first.devices),
        evaluation_cpus=cpuset(first.evaluation),
        device_capacity=capacity,
        oversubscribed=oversubscribe,
        shaper=shaper,
        nodes=nodes,
        placement=placed,
        aggregator_memory=memory.left(host.nodes[0].memory, beside, reserved),
    )


def _wishes(
    topology: Topology, dilation: float, shares: Mapping[str, Mapping[str, float]]
) -> list[Wish]:
    wishes = []
    for group in topology.devices:
        own = {node: one / dilation for node, one in shares.get(group.name, {}).items()}
        wishes += [
            Wish(
                name,
                max(own.values(), default=(group.cpu or 0.0) / dilation),
                group.memory_limit,
                group.hosts or (),
                tuple((group.placement or {}).items()),
                own or None,
            )
            for name in group.device_names
        ]
    return wishes


def _of_nodes(
    topology: Topology,
    dilation: float,
    placed: Mapping[str, str],
    nodes: Sequence[PlannedNode],
    shares: Mapping[str, Mapping[str, float]],
) -> Iterator[PlannedDevice]:
    """The devices, each with its share of a core of its node."""
    cores = {node.id: node.core or 1.0 for node in nodes}
    for device in _devices(topology, dilation):
        node = placed[device.name]
        cpu = shares.get(device.group, {}).get(node, device.cpu)
        yield replace(device, cpu=cpu, core=cores[node])


def _dilation(
    topology: Topology, capacity: float, shares: Mapping[str, float] = MappingProxyType({})
) -> float:
    """The topology's dilation; `auto` is the smallest at which the devices fit on `capacity` cores, with
    `shares` of these groups."""
    if topology.dilation != "auto":
        return topology.dilation
    cores = math.fsum(
        shares.get(group.name, group.cpu or 0.0)
        for group in topology.devices
        for _ in group.device_names
    )
    return max(1.0, math.ceil(cores / capacity * 100 - _ROUNDING) / 100)


def _devices(topology: Topology, dilation: float = 1.0) -> Iterator[PlannedDevice]:
    for group in topology.devices:
        planned = PlannedDevice(
            name=group.name,
            group=group.name,
            cpu=group.cpu,
            memory=group.memory_limit,
            local=group.local.build(),
            link=None if group.link is None else link_traces.link_at_start(group.link),
            access=None if group.access is None else group.access.build(),
            think=None if group.think is None else group.think.plain(),
            timing=None if group.timing is None else group.timing.plain(),
            gflops=group.gflops,
            steps=tuple(group.update_steps),
            power=None if group.power is None else group.power.plain(),
            dilation=dilation,
        )
        for name in group.device_names:
            yield replace(planned, name=name, speed=group.speed.draw(topology.seed, name))


def end_to_end(group: DeviceGroup) -> Link:
    """The path from a device of `group` to the server as the run begins, for a device alone on it, in
    device time. Raises ValueError, OSError for a trace that cannot be read."""
    link = Link() if group.link is None else link_traces.link_at_start(group.link)
    return link.behind(None if group.access is None else group.access.build())
