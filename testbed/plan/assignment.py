"""Planning of a topology on a host. Each core gets a purpose, and each device gets a part of the
cores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

from agents import config
from agents.config import AccessLink, Segment
from testbed.host.cpus import cpuset
from testbed.plan import costs, feasibility, plan_tables
from testbed.plan.catalog import HERE, Catalog
from testbed.plan.features import PARTS
from testbed.plan.machines import (
    HostResources,
    Measurements,
    NodeRequest,
    PlannedNode,
    UnplacedDevice,
    choose_shaper,
    divide_node,
    place,
)
from testbed.plan.planned_devices import Plan, PlannedDevice, PlannedTransfers, RealLimits
from testbed.segments.schema import to_segments
from testbed.topology import Topology, link_traces, scenario
from testbed.topology.devices import DeviceGroup
from testbed.topology.fields import DEFAULT_MEMORY
from testbed.topology.links import TransferSettings
from testbed.topology.yamlfile import Problem
from testbed.traits import Traits, traits

_STRETCH = 1.02
"""Factor by which the dilation grows until the devices fit on the nodes."""
_ROUNDING = 1e-9
"""Tolerance, in hundredths, when a dilation is rounded up to two decimals. Without a tolerance, a
floating-point error could add 0.01."""
_NO_CATALOG = Catalog()


def plan(
    topology: Topology,
    runtime: str,
    host: HostResources,
    catalog: Catalog = _NO_CATALOG,
    *,
    oversubscribe: bool = False,
) -> Plan:
    """Make the plan of a run on `host` with `runtime`, without I/O.

    Broker and aggregator get the first core. Evaluations get the last cores if the topology requests
    cores for them. The devices get all other cores.

    Raises BadInputError if the runtime is unknown, or cannot do what the topology requests. Unless
    `oversubscribe` is true, it also raises BadInputError if the devices request more than the machines
    have.
    """
    found = traits(runtime)
    message = costs.message_memory(catalog.model, topology.rule.build().client_side)
    reserved = costs.server_memory(message, len(topology.device_names))
    segments = to_segments(topology.segments, catalog.series)
    groups = _groups(topology, found, host, catalog, reserved, segments)
    problems = [problem for part in PARTS for problem in part.refusals(topology, runtime, host)]
    made = Plan(
        runtime=runtime,
        devices=(),
        segments=segments,
        server=_server(topology),
        is_oversubscribed=oversubscribe,
        cpu_notes=catalog.cpu_notes,
        profiles=catalog.used_profiles(topology),
        measured=Measurements(
            cpu=_measured_cpu(groups, topology, found), virtual=catalog.measured.virtual
        ),
        virtual=topology.virtual.with_defaults(catalog.measured.virtual),
        absent=scenario.absent_at_start(topology.scenario, topology.devices),
        is_routed=found.many_hosts
        or any(not group.is_direct for group in groups)
        or any(entry.link is not None for entry in topology.scenario),
    )
    more: Sequence[Problem] = ()
    if found.simulated:
        made = replace(made, devices=tuple(_devices(topology, groups)))
    else:
        made, more = _on_machines(topology, made, host, catalog, groups, reserved)
    problems += more
    for part in PARTS:
        made, more = part.place(made, topology, host)
        problems += more
    if problems:  # all at once
        raise topology.source.error(problems)
    return replace(made, notes=tuple(plan_tables.plan_notes(topology, made, catalog, host)))


def _on_machines(
    topology: Topology,
    made: Plan,
    host: HostResources,
    catalog: Catalog,
    groups: Sequence[PlannedDevice],
    reserved: int,
) -> tuple[Plan, list[Problem]]:
    """The plan has no devices if the machines cannot run them. `reserved`: bytes of memory that are not
    for devices."""
    found, many, oversubscribe = made.traits, made.traits.many_hosts, made.is_oversubscribed
    machines = host.nodes if many else (host.as_node,)
    evaluating = topology.evaluate.cores or 0
    if problem := feasibility.no_cores_to_evaluate(topology, machines[0].cores):
        return made, [problem]
    nodes = tuple(divide_node(one, reserved, evaluating if one.here else 0) for one in machines)
    first, capacity = nodes[0], math.fsum(node.capacity for node in nodes)
    dilation = _dilation(topology, capacity, [_least_cpu(group, catalog) for group in groups])
    placed: dict[str, str] | UnplacedDevice = {}
    if many:
        placed, dilation = _place(topology, made, groups, nodes, catalog, dilation)
    shaper, problems = choose_shaper(topology, found, host.lack_of_netem)
    problems += feasibility.unsupported(topology, groups, made.runtime)
    if found.cgroups:
        problems += feasibility.too_little_cpu(topology, groups, dilation)
        problems += feasibility.too_little_memory(topology, groups)
    if isinstance(placed, UnplacedDevice):
        problems.append(feasibility.no_node_fits(topology, placed.request.device, placed.why))
        return made, problems
    by_id = {node.id: node for node in nodes}
    devices = tuple(
        _on_node(one, by_id[placed[one.name]], catalog) if one.name in placed else one
        for one in _devices(topology, groups, dilation, cpuset(first.devices))
    )
    if not oversubscribe and not many:
        problems += feasibility.too_much_cpu(topology, groups, machines[0].cores, capacity * dilation)
        problems += feasibility.too_much_memory(topology, groups, host.memory, reserved)
    for node in () if oversubscribe else nodes:
        asked = {one.name: one.cpu or 0.0 for one in devices if placed.get(one.name, "") == node.id}
        name = node.name if many else ""
        problems += feasibility.too_much_later(topology, node.capacity * dilation, asked, name)
    beside = sum(one.memory for one in devices if placed.get(one.name, "") == first.id)
    made = replace(
        made,
        devices=devices,
        dilation=dilation,
        infrastructure_cpus=cpuset(first.infrastructure),
        device_cpus=cpuset(first.devices),
        evaluation_cpus=cpuset(first.evaluation),
        device_capacity=capacity,
        shaper=shaper,
        nodes=nodes if many else (),
        placement=placed,
        aggregator_memory=costs.aggregator_limit(machines[0].memory, beside, reserved),
    )
    return made, problems


def _least_cpu(group: PlannedDevice, catalog: Catalog) -> float:
    """CPU share on the fastest machine."""
    return 0.0 if group.cpu is None else min(catalog.cpu.get(group.name, {HERE: group.cpu}).values())


def _place(
    topology: Topology,
    made: Plan,
    groups: Sequence[PlannedDevice],
    nodes: Sequence[PlannedNode],
    catalog: Catalog,
    dilation: float,
) -> tuple[dict[str, str] | UnplacedDevice, float]:
    """Return the placement and the dilation, which grows if it may, because whole devices leave gaps on
    each node."""
    while True:
        requests = _requests(topology, groups, dilation, catalog)
        placed = place(requests, nodes, oversubscribe=made.is_oversubscribed)
        if not isinstance(placed, UnplacedDevice) or not placed.by_cores or topology.dilation != "auto":
            return placed, dilation
        dilation = math.ceil(dilation * _STRETCH * 100) / 100


def _requests(
    topology: Topology, groups: Sequence[PlannedDevice], dilation: float, catalog: Catalog
) -> list[NodeRequest]:
    requests = []
    for group, planned in zip(topology.devices, groups, strict=True):
        if group.is_real:
            continue
        own = {node: one / dilation for node, one in catalog.cpu.get(group.name, {}).items()}
        requests += [
            NodeRequest(
                name,
                max(own.values(), default=(planned.cpu or 0.0) / dilation),
                planned.memory,
                group.hosts or (),
                tuple((group.placement or {}).items()),
                own or None,
            )
            for name in group.device_names
        ]
    return requests


def _on_node(device: PlannedDevice, node: PlannedNode, catalog: Catalog) -> PlannedDevice:
    by_node = catalog.cpu.get(device.name) or catalog.cpu.get(device.group, {})
    cpu = by_node.get(node.id, device.cpu)
    return replace(device, cpu=cpu, cores=cpuset(node.devices), core_speed=node.core or 1.0)


def _dilation(topology: Topology, capacity: float, cpu: Sequence[float]) -> float:
    """Return the topology's dilation; for `auto`, the lowest with which the devices fit on `capacity`
    cores.

    `cpu`: CPU share of a device of each group.
    """
    if topology.dilation != "auto":
        return topology.dilation
    cores = math.fsum(
        one for group, one in zip(topology.devices, cpu, strict=True) for _ in group.device_names
    )
    return max(1.0, math.ceil(cores / capacity * 100 - _ROUNDING) / 100)


def _groups(
    topology: Topology,
    runtime: Traits,
    host: HostResources,
    catalog: Catalog,
    reserved: int,
    segments: Mapping[str, Segment],
) -> tuple[PlannedDevice, ...]:
    """Return one device per group, before placement and dilation."""
    free = None if runtime.simulated else host.memory - reserved
    limits = _memory_limits(topology, catalog, free)
    here = host.nodes[0].id if runtime.many_hosts else HERE
    known = {} if runtime.many_hosts else catalog.measured.cpu
    planned = []
    for group, limit in zip(topology.devices, limits, strict=True):
        cpu = group.cpu
        if group.profile is not None and cpu is None:
            cpu = catalog.cpu.get(group.name, {}).get(here, known.get(group.name))
        planned.append(_device(group, cpu, limit, catalog, segments))
    return tuple(planned)


def _memory_limits(topology: Topology, catalog: Catalog, free: int | None) -> list[int]:
    """Return, for each group, the memory limit of one device in bytes.

    `free`: bytes for all devices together; None if there is no bound. If `free` is too small, limits
    that come from profiles are lowered to a common value, with which they fit into the bytes that the
    other devices leave. The common value is at least the default of a device without a profile.
    """
    own, given = [], 0
    for group in topology.devices:
        profile = catalog.profile(group.profile)
        size = None if profile is None or group.memory is not None else profile.memory
        own.append(size)
        if size is None:
            given += _limit_of(group) * len(group.device_names)
    pairs = list(zip(topology.devices, own, strict=True))
    sizes = [size for group, size in pairs if size is not None for _ in group.device_names]
    most = max(sizes, default=0)
    if free is not None:
        most = max(DEFAULT_MEMORY, costs.equal_limit(sizes, free - given))
    return [_limit_of(group) if size is None else min(size, most) for group, size in pairs]


def _server(topology: Topology) -> tuple[str, int] | None:
    """Address and port at which real devices reach the broker; None without real devices."""
    address, is_real = topology.server.address, any(group.is_real for group in topology.devices)
    return None if address is None or not is_real else (address, topology.server.port)


def _limit_of(group: DeviceGroup) -> int:
    """Memory limit in bytes of a device without a profile; 0 for a real device."""
    return 0 if group.is_real else group.memory or group.default_memory


def _measured_cpu(
    groups: Sequence[PlannedDevice], topology: Topology, runtime: Traits
) -> dict[str, float]:
    """Return group -> CPU share. Empty if the runtime uses several machines."""
    if runtime.many_hosts:
        return {}
    return {
        group.name: planned.cpu
        for group, planned in zip(topology.devices, groups, strict=True)
        if group.cpu is None and planned.cpu is not None
    }


def _transfers(settings: TransferSettings) -> PlannedTransfers:
    download, upload = settings.download, settings.upload
    return PlannedTransfers(
        download=None if download is None else download.plain(),
        upload=None if upload is None else upload.plain(),
        model_bytes=settings.model_bytes,
        update_bytes=settings.update_bytes,
    )


def _device(
    group: DeviceGroup,
    cpu: float | None,
    memory_limit: int,
    catalog: Catalog,
    segments: Mapping[str, Segment],
) -> PlannedDevice:
    profile = catalog.profile(group.profile)
    thermal = group.thermal or (None if profile is None else profile.thermal)
    link = catalog.link(group.link)
    trace = () if group.link is None else catalog.series(group.link.trace)
    shape = None
    if group.is_real:  # its limits take nothing of this host
        if group.shape:
            shape = RealLimits(cpu, None if link == AccessLink() else link)
        cpu = link = None
    planned = PlannedDevice(
        name=group.name,
        group=group.group_name,
        cpu=cpu,
        memory=memory_limit,
        local=group.local.build(),
        link=None if link is None else link_traces.link_at_start(link, trace),
        trace=trace,
        path=config.path_of(group.segment_name, segments),
        transfers=None if group.transfers is None else _transfers(group.transfers),
        think=None if group.think is None else group.think.plain(),
        timing=None if group.timing is None else group.timing.plain(),
        gflops=group.gflops,
        steps=tuple(group.update_steps),
        thermal=thermal,
        shape=shape,
        origin=group.origin or None,
        python=group.python,
        container=group.container,
    )
    for part in PARTS:
        planned = part.device(planned, group, catalog)
    return planned


def _devices(
    topology: Topology, groups: Sequence[PlannedDevice], dilation: float = 1.0, cores: str = ""
) -> Iterator[PlannedDevice]:
    for group, planned in zip(topology.devices, groups, strict=True):
        alike = {one.name: getattr(planned, one.name) for one in fields(planned)}
        alike |= {"dilation": dilation, "cores": cores}
        speed = group.speed
        fixed = speed.draw(topology.seed, "") if speed.distribution == "constant" else None
        for name in group.device_names:
            drawn = speed.draw(topology.seed, name) if fixed is None else fixed
            host = group.real_host(name) if group.is_real else None
            alike |= {"name": name, "speed": drawn, "host": host}
            yield PlannedDevice(**alike)  # `replace` takes twice as long
