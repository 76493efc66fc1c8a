"""Plan of a run: the topology resolved for this host into concrete devices and quotas."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import psutil

from agents.clock import in_host_time
from agents.config import Access, Duration, Link, Local, Named
from testbed.host.die_with_parent import cpu_numbers
from testbed.host.gpus import NOT_LOOKED_FOR, Gpus
from testbed.host.nodes import Node
from testbed.plan import feasibility, gpus, memory
from testbed.plan.gpus import PlannedGpu
from testbed.plan.placement import SHARED_CAPACITY, PlannedNode, Unplaced, Wish, place
from testbed.plan.placement import planned as planned_node
from testbed.plan.shaper import Shaper, choose, lack_of_netem
from testbed.topology import Topology, traces
from testbed.topology.devices import DeviceGroup
from testbed.topology.units import format_duration, format_rate, format_size
from testbed.traits import Traits, traits

_MIN_SLICE_MICROSECONDS = 5_000
"""Of work at a time: each begins with cold caches, which take some of it."""
_MIN_RATE_BITS_PER_SECOND = 8
"""The kernel counts in bytes per second."""
_STRETCH = 1.02
"""By which time is stretched more, until the devices fit on the nodes."""
_ROUNDING = 1e-9
"""Error allowed when a dilation is rounded up to two decimals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    name: str
    group: str
    cpu: float | None
    """Share of one host core; given where the runtime is real."""
    memory: int
    """Bytes."""
    local: Local
    link: Link | None = None
    """Its own, as the run begins."""
    access: Access | None = None
    """Its access link, shared with others."""
    think: Duration | None = None
    timing: Duration | None = None
    """Of a training at the least, from when it could begin; still to be divided by `speed`."""
    gflops: float | None = None
    """1e9 operations per second; still to be multiplied by `speed`."""
    speed: float = 1.0
    """This device's own, as drawn."""
    compression: Named | None = None
    """Of its updates (`agents.compression`)."""
    byzantine: Named | None = None
    """The attack that its client makes (`agents.client.byzantine`)."""
    power: Mapping[str, float] | None = None
    """Watts, by state."""
    gpu: PlannedGpu | None = None
    """What it trains on in place of the CPU."""
    dilation: float = 1.0
    """Seconds of the host that make one of the device's: it gets as much less of everything."""
    core: float = 1.0
    """How fast a core of its machine is, in cores of this host."""

    @property
    def share(self) -> float:
        """Of a host core, for a device that is to be launched. Raises ValueError where it has no cpu."""
        if self.cpu is None:
            raise ValueError(f"{self.name} has no cpu: it exists in virtual time only")
        return self.cpu / self.dilation

    @property
    def host_link(self) -> Link | None:
        """The link as the host has to make it."""
        return None if self.link is None else Link(**dilated(asdict(self.link), self.dilation))

    @property
    def host_access(self) -> Access | None:
        """As the host has to make it."""
        return None if self.access is None else Access(**dilated(asdict(self.access), self.dilation))

    @property
    def host_end_to_end(self) -> Link | None:
        """The whole path from device to server, as the host has to make it, for a device alone on it."""
        return None if self.direct else (self.host_link or Link()).behind(self.host_access)

    @property
    def direct(self) -> bool:
        """Whether its path to the server is not shaped."""
        return self.link is None and self.access is None

    @property
    def shared(self) -> str:
        """Name of the part of that path that it shares with other devices; else its own name."""
        return self.name if self.access is None else self.access.name

    @property
    def period(self) -> int:
        """CFS period in µs: 10 ms, longer where a slice of it would be too short to work in; the kernel
        takes no more than 1 s. In stretched time there is more time between two slices, and caches are
        colder: as much work gets done in a second of CPU if slices are longer (`make dilation`)."""
        least = _MIN_SLICE_MICROSECONDS * math.sqrt(self.dilation)
        return min(max(10_000, round(least / self.share)), 1_000_000)

    @property
    def quota(self) -> int:
        """CFS quota in µs per period."""
        return round(self.share * self.period)

    @property
    def weight(self) -> int:
        """CPU weight against other devices that want a core at once: as the shares are, so that a
        period's quota is met also where another's slice is as long as the period."""
        return max(2, round(10_000 * self.share))

    @property
    def threads(self) -> int:
        """Torch threads: more than the quota's cores only wait for each other."""
        return max(1, -(-self.quota // self.period))

    @property
    def profile(self) -> str:
        """This device's hardware in a table: `0.25 cpu, 512 MiB` or `10 gflops`."""
        facts = (
            f"{self.cpu:g} cpu, {self.memory / 2**20:g} MiB" if self.cpu is not None else "",
            f"{self.gflops:g} gflops" if self.gflops is not None else "",
            f"timing {_duration(self.timing)}" if self.timing is not None else "",
        )
        return ", ".join(filter(None, facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be launched. In virtual time nothing is, and no cores are assigned."""

    runtime: str
    """Its name in `testbed.traits.RUNTIMES`."""
    devices: tuple[PlannedDevice, ...]
    infrastructure_cpus: str = ""
    """cpuset of broker and aggregator, as in `0` or `0-1`."""
    device_cpus: str = ""
    """cpuset of the devices."""
    evaluation_cpus: str = ""
    """cpuset of the aggregator's evaluations; empty: the aggregator's."""
    device_capacity: float = 0.0
    """Cores that the devices can have in all."""
    dilation: float = 1.0
    """Seconds of the host that make one of device time."""
    shaper: Shaper | None = None
    """The links' shaper; None where no device has a link."""
    oversubscribed: bool = False
    """Whether the devices may ask for more than `device_capacity`."""
    notes: tuple[str, ...] = ()
    """Sentences on what of the devices' profiles is emulated in another way, or not at all."""
    nodes: tuple[PlannedNode, ...] = ()
    """The machines, where there are several: this one first."""
    placement: Mapping[str, str] = field(default_factory=dict)
    """Id of each device's node, where there are several."""
    shares: tuple[str, ...] = ()
    """Sentences on how the CPU shares of profiles were found."""

    @property
    def cpus(self) -> set[int]:
        """Numbers of the CPUs of broker, aggregator and devices."""
        return cpu_numbers(self.infrastructure_cpus) | cpu_numbers(self.device_cpus)

    @property
    def aggregator_cpus(self) -> str:
        """cpuset of the aggregator, evaluations included."""
        return ",".join(filter(None, (self.infrastructure_cpus, self.evaluation_cpus)))

    def node_of(self, device: str) -> PlannedNode | None:
        """The machine that `device` is on, where there are several."""
        return next((node for node in self.nodes if node.id == self.placement[device]), None)

    def cpus_of(self, device: str) -> str:
        """cpuset of `device`, on its machine."""
        node = self.node_of(device)
        return self.device_cpus if node is None else cpuset(node.devices)

    @property
    def traits(self) -> Traits:
        """What the runtime can do."""
        return traits(self.runtime)

    def too_much(self, shares: Iterable[float]) -> str | None:
        """What is wrong with `shares` of the devices, in cores of device time; None where they fit."""
        if self.oversubscribed:
            return None
        return feasibility.too_much(shares, self.device_capacity * self.dilation)

    def too_little(self, share: float) -> str | None:
        """What is wrong with a device's `share` of a core, in device time; None where it can be had."""
        return feasibility.too_little(share, self.dilation) if self.traits.cgroups else None


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine has for a run."""

    cores: tuple[int, ...]
    """Numbers of the CPUs that we may use."""
    memory: int
    """Available bytes."""
    lack_of_netem: str | None = "netem was not tried"
    """Why the kernel's netem cannot be used; None where it can."""
    nodes: tuple[Node, ...] = ()
    """The machines that devices are placed on, where there are several: this one first."""
    gpus: Gpus = NOT_LOOKED_FOR
    """For containers."""
    lack_of_cuda: str | None = "CUDA was not tried"
    """Why the PyTorch of this host has no GPU; None where it has one."""


def this_host(*, netem: bool = False, gpus: bool = False, cuda: bool = False) -> Host:
    """This host, measured now: the CPUs that this process may use, the free memory and, with `netem`,
    whether the kernel has it; with `gpus` those that containers can have; with `cuda` whether its
    PyTorch has one."""
    linux = sys.platform == "linux"
    cores = sorted(os.sched_getaffinity(0)) if linux else range(os.cpu_count() or 1)
    host = Host(tuple(cores), psutil.virtual_memory().available)
    if netem:
        host = replace(host, lack_of_netem=lack_of_netem())
    if gpus:
        host = replace(host, gpus=_gpus_for_containers())
    return replace(host, lack_of_cuda=_lack_of_cuda()) if cuda else host


def _gpus_for_containers() -> Gpus:
    from testbed.host import docker_engine  # with the Docker SDK, which takes half a second
    from testbed.host.gpus import survey

    with docker_engine.if_present() as client:
        return survey({} if client is None else client.info())


def _lack_of_cuda() -> str | None:
    import torch  # which takes a second

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"the PyTorch of this host, {torch.__version__}, is built without CUDA: install one with it "
            "(PyTorch's install page names the index), on a host with a GPU"
        )
    return f"the PyTorch of this host, {torch.__version__}, finds no GPU: nvidia-smi may say why"


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
    if not oversubscribe:
        reserved = memory.reserved(model, len(topology.device_names))
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


def describe(plan: Plan) -> list[dict[str, Any]]:
    """A row per device with what it is given, for `testbed plan`: values that no device has get no
    column."""
    names = {node.id: node.name for node in plan.nodes}
    rows = [
        {**_row(device, plan.traits), "node": names.get(plan.placement.get(device.name, ""))}
        for device in plan.devices
    ]
    unused = {name for name in _OPTIONAL if all(row[name] is None for row in rows)}
    return [{name: value for name, value in row.items() if name not in unused} for row in rows]


def by_node(plan: Plan) -> list[dict[str, Any]]:
    """A row for each of several machines: what its devices ask for, and what it has for them; its `core`
    is in cores of this host, where that is known."""
    on: dict[str, list[PlannedDevice]] = {node.id: [] for node in plan.nodes}
    for device in plan.devices:
        on[plan.placement[device.name]].append(device)
    measured = any(node.core is not None for node in plan.nodes)
    return [
        {
            "node": node.name,
            "devices": len(on[node.id]),
            "cores": f"{math.fsum(one.share for one in on[node.id]):.3g} of {node.capacity:g}",
            **({"core": f"{node.core or 1.0:.2f}"} if measured else {}),
            "memory": f"{feasibility.gib(sum(one.memory for one in on[node.id]))} of "
            f"{feasibility.gib(node.memory)}",
            "device cpus": cpuset(node.devices),
            "others": f"cpu {cpuset(node.infrastructure)}: "
            + ("broker, aggregator, router" if node.here else "router"),
        }
        for node in plan.nodes
    ]


_OPTIONAL = (
    *("cpu", "quota", "memory", "gpu", "gflops", "timing", "speed", "rtt", "jitter", "loss", "access"),
    *("compression", "byzantine", "node"),
)


def _row(device: PlannedDevice, traits: Traits) -> dict[str, Any]:
    link = device.link or Link()
    quota = None if traits.simulated else f"{device.quota / 1000:g}/{device.period / 1000:g} ms"
    return {
        "device": device.name,
        "cpu": device.cpu,
        "quota": quota,
        "memory": format_size(device.memory) if traits.cgroups else None,
        "gpu": None if device.gpu is None else device.gpu.told,
        "gflops": device.gflops,
        "timing": _duration(device.timing),
        "speed": None if device.speed == 1 else round(device.speed, 3),
        "up": link.up and format_rate(link.up),
        "down": link.down and format_rate(link.down),
        "rtt": format_duration(link.rtt) if link.rtt else None,
        "jitter": format_duration(link.jitter) if link.jitter else None,
        "loss": f"{link.loss:.3g}" if link.loss else None,
        "access": None if device.access is None else device.access.name,
        "think": _duration(device.think),
        "local": _local(device.local),
        "compression": None if device.compression is None else device.compression.name,
        "byzantine": None if device.byzantine is None else device.byzantine.name,
    }


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


def dilated(changes: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    """Fields of a link in device time, as the host has to make them."""
    made = in_host_time(changes, dilation)
    for name in ("up", "down"):
        if made.get(name) is not None:
            made[name] = max(_MIN_RATE_BITS_PER_SECOND, round(made[name]))
    return made


def end_to_end(group: DeviceGroup) -> Link:
    """The path from a device of `group` to the server as the run begins, for a device alone on it, in
    device time. Raises ValueError, OSError for a trace that cannot be read."""
    link = Link() if group.link is None else traces.link_at_start(group.link)
    return link.behind(None if group.access is None else group.access.build())


def _devices(topology: Topology, dilation: float = 1.0) -> Iterator[PlannedDevice]:
    for group in topology.devices:
        planned = PlannedDevice(
            name=group.name,
            group=group.name,
            cpu=group.cpu,
            memory=group.memory_limit,
            local=group.local.build(),
            link=None if group.link is None else traces.link_at_start(group.link),
            access=None if group.access is None else group.access.build(),
            think=None if group.think is None else group.think.plain(),
            timing=None if group.timing is None else group.timing.plain(),
            gflops=group.gflops,
            compression=None if group.link is None else group.link.compressed_by,
            byzantine=None if group.byzantine is None else group.byzantine.named,
            power=None if group.power is None else group.power.plain(),
            dilation=dilation,
        )
        for name in group.device_names:
            yield replace(planned, name=name, speed=group.speed.draw(topology.seed, name))


def cpuset(cores: Sequence[int]) -> str:
    """The kernel's notation: `0`, `1-3`, `0,2-3`."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, span)) for span in ranges)


def _duration(duration: Duration | None) -> str | None:
    """`200ms`, or the name of the distribution."""
    if duration is None:
        return None
    if duration.distribution == "constant":
        return format_duration(duration.params["value"])
    return duration.distribution


def _local(local: Local) -> str:
    number, unit = (local.steps, "step") if local.steps else (local.epochs, "epoch")
    other = "" if local.optimizer == "sgd" else f", {local.optimizer}"
    return f"{number} {unit}{'' if number == 1 else 's'} x {local.batch_size}{other}"
