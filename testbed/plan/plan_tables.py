"""Tables and notes of a plan, for `testbed plan`, and the figures of a drawn fleet."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.config import AccessLink, LocalTraining
from agents.rules.interface import ClientSide
from agents.texts import quantity
from testbed.host.cpus import cpuset
from testbed.plan import costs
from testbed.plan.catalog import Catalog
from testbed.plan.features import PARTS, FeatureColumns
from testbed.plan.machines import HostResources
from testbed.plan.part import FleetNumber
from testbed.plan.planned_devices import Plan, PlannedDevice, duration_text
from testbed.topology import Topology
from testbed.topology.devices import DeviceGroup
from testbed.topology.links import Availability
from testbed.topology.profiles import DeviceProfile
from testbed.topology.units import format_duration, format_rate, format_size, gib
from testbed.traits import Traits

_MIB = 2**20
_COMPILES = re.compile(rb"\btorch\.compile\b|\bfrom torch import .*\bcompile\b")
_AMPLE = 384 * _MIB
"""Bytes of memory that suffice for a client. After 60 steps of 32 samples, the measured resident memory
was 240 MiB with digits-logreg, and 350 MiB with cifar10-cnn and 8,000 images. The device's init had
40 MiB more. Part of this memory is code, which the kernel can drop."""


def plan_notes(topology: Topology, plan: Plan, catalog: Catalog, host: HostResources) -> Iterator[str]:
    """Notes are about properties of profiles that are emulated differently or not at all, tight memory
    limits, and evaluations after the run."""
    groups = list(_distinct_groups(topology, plan))
    if plan.traits.cgroups:
        model = catalog.model
        side: ClientSide = topology.rule.build().client_side
        message, steps = costs.message_memory(model, side), topology.update_steps
        reserved = costs.server_memory(message, len(plan.devices))
        for group, device in groups:
            yield from _memory_notes(group, device, catalog.profile(group.profile), host, reserved)
        for group, device in groups:
            needed = costs.client_memory(model, device.local, side, [*device.steps, *steps])
            if _AMPLE <= device.memory < needed:
                yield (
                    f"Warning: {group.name} has {format_size(device.memory)} of memory, but a client of "
                    f"{topology.task.name} needs about {format_size(_round_up(needed))}, without its "
                    "data and what a step computes: it would be killed. Raise memory."
                )
    code = topology.user_code
    if code is not None and any(_COMPILES.search(text) for text in code.files.values()):
        yield (
            "torch.compile has no effect here: models are trained and evaluated without compilation, "
            "with the same results up to rounding."
        )
    for part in PARTS:
        yield from part.notes(topology, plan)
    if topology.evaluate.when == "after" and not plan.traits.simulated:
        yield (
            "Models are evaluated after the run (evaluate.when: after): until then no accuracy is "
            "known, and each model to be evaluated is kept on the disk."
        )
    for group, device in groups:
        if (thermal := device.thermal) is not None:
            yield (
                f"{group.name}: {format_duration(thermal.after)} after the start of the run, its cpu "
                f"drops to {thermal.to:g} of its value (thermal), even if it has not trained until "
                "then."
            )
    if plan.traits.simulated and any(group.image is not None for group in topology.devices):
        yield "In virtual time image changes nothing: trainings are computed with this host's packages."
    profiled = any(group.profile is not None for group in topology.devices)
    if plan.traits.simulated and profiled:
        yield "In virtual time the cores and the memory of a profile change nothing."
    elif lines := [
        line for one in groups for line in _core_notes(*one, catalog.profile(one[0].profile))
    ]:
        yield from lines
        yield (
            "Cores are not emulated one by one: work that cannot be shared among cores is faster here "
            "than on the device, by a factor of up to its number of cores."
        )
    if profiled:
        heat = "" if any(device.thermal is not None for _, device in groups) else ", heat"
        yield f"Other properties of a device (GPU, caches, memory bandwidth{heat}) are not emulated."


def _distinct_groups(topology: Topology, plan: Plan) -> Iterator[tuple[DeviceGroup, PlannedDevice]]:
    """Yield one device per combination of profile, memory and thermal settings if the group was
    drawn."""
    planned = {device.group: device for device in plan.devices}
    planned |= {device.name: device for device in plan.devices}
    seen = set()
    for group in topology.devices:
        device = planned[group.name]
        kind = (group.group_name, group.profile, device.memory, device.thermal)
        if not group.origin or kind not in seen:
            seen.add(kind)
            yield group, device


def _memory_notes(
    group: DeviceGroup,
    device: PlannedDevice,
    profile: DeviceProfile | None,
    host: HostResources,
    reserved: int,
) -> Iterator[str]:
    limit = format_size(device.memory)
    if group.memory is None and group.profile is not None:
        if profile is None or profile.memory is None:
            why = "is unknown" if profile is None else "has none"
            yield f"{group.name}: {limit} of memory, the default: the profile {group.profile} {why}."
        elif device.memory < profile.memory:
            yield (
                f"{group.name}: {limit} of memory, not {group.profile}'s {format_size(profile.memory)}: "
                f"this host has {gib(host.memory)} free, broker and aggregator need "
                f"{gib(reserved)} of it, and devices with profiles share the rest equally."
            )
    if device.memory < _AMPLE:
        yield (
            f"{group.name}: {limit} of memory is tight. A device's client and init took 280 MiB with "
            "digits-logreg, 390 MiB with cifar10-cnn and 8,000 images; a client that exceeds its limit "
            "is killed."
        )


def _round_up(size: int) -> int:
    return -(-size // _MIB) * _MIB


def _core_notes(
    group: DeviceGroup, device: PlannedDevice, profile: DeviceProfile | None
) -> Iterator[str]:
    if profile is not None and (profile.cores or 1) > 1:
        threads = quantity(device.threads, "thread")
        yield (
            f"{group.name}: {device.cpu:g} cpu in {threads} for the {profile.cores} cores of "
            f"{group.profile}."
        )


_OPTIONAL = (
    *("cpu", "quota", "memory", "gpu", "gflops", "timing", "speed", "rtt", "jitter", "loss", "access"),
    *("compression", "byzantine", "origin", "node", "host"),
)


@dataclass(frozen=True, kw_only=True)
class _DeviceColumns:
    device: str
    cpu: float | None = None
    """Share of one core of the host."""
    quota: str | None = None
    """CPU time per period, in ms."""
    memory: str | None = None
    """Memory limit."""
    gpu: str | None = None
    """GPU, or share of a GPU."""
    gflops: float | None = None
    """Speed of the device in Gflop/s, before the factor `speed`."""
    timing: str | None = None
    """Minimum duration of a training, before the factor `speed`."""
    speed: float | None = None
    """Speed factor that was drawn for the device."""
    up: str | None
    """Uplink rate."""
    down: str | None
    """Downlink rate."""
    rtt: str | None = None
    """Round-trip time."""
    jitter: str | None = None
    loss: str | None = None
    """Share of lost packets."""
    access: str | None = None
    """Segment that the device is attached to, which it may share with other devices."""
    think: str | None
    """Pause between trainings."""
    local: str
    """Local training: steps or epochs, batch size, and the optimizer unless it is SGD."""
    compression: str | None = None
    byzantine: str | None = None
    """Attack that the device carries out."""
    origin: str | None = None
    """Source of the keys of a drawn device, such as `survey.csv:7`."""
    host: str | None = None
    """Address of a real device; None if the device is emulated."""
    node: str | None = None
    """Name of the device's node, if there are several nodes."""
    samples: int | None
    """Number of training samples; None until the data is prepared."""
    transfer_s: float
    """Expected time to transfer model and update, in seconds of device time; infinite if unknown."""
    round_s: float
    """Expected time of a round (transfers and training), in seconds of device time; infinite if
    unknown."""
    lacks: Sequence[str]
    """Information that is missing for an estimate of the round's time."""


@dataclass(frozen=True, kw_only=True)
class DeviceRow(FeatureColumns, _DeviceColumns):
    """A device as it would be launched, and its expected round. Texts are written as in a topology."""


def device_table(plan: Plan) -> list[dict[str, Any]]:
    """Columns in which no device has a value are left out."""
    names = {node.id: node.name for node in plan.nodes}
    rows = [
        {**_row(device.as_shaped, plan.traits), "node": names.get(plan.placement.get(device.name, ""))}
        for device in plan.devices
    ]
    unused = {name for name in _OPTIONAL if all(row[name] is None for row in rows)}
    return [{name: value for name, value in row.items() if name not in unused} for row in rows]


def node_table(plan: Plan) -> list[dict[str, Any]]:
    """Compare what the devices request with what the node has. The column `core` is the speed of the
    node's cores relative to this host's cores, if it was measured."""
    on: dict[str, list[PlannedDevice]] = {node.id: [] for node in plan.nodes}
    for device in plan.emulated_devices:
        on[plan.placement[device.name]].append(device)
    measured = any(node.core is not None for node in plan.nodes)
    return [
        {
            "node": node.name,
            "devices": len(on[node.id]),
            "cores": f"{math.fsum(one.host_cpu for one in on[node.id]):.3g} of {node.capacity:g}",
            **({"core": f"{node.core or 1.0:.2f}"} if measured else {}),
            "memory": f"{gib(sum(one.memory for one in on[node.id]))} of {gib(node.memory)}",
            "device cpus": cpuset(node.devices),
            "others": f"cpu {cpuset(node.infrastructure)}: "
            + ("broker, aggregator, router" if node.here else "router"),
        }
        for node in plan.nodes
    ]


def _row(device: PlannedDevice, traits: Traits) -> dict[str, Any]:
    link = device.link or AccessLink()
    real = device.host is not None
    is_limited = device.cpu is not None and not traits.simulated
    quota = f"{device.quota / 1000:g}/{device.period / 1000:g} ms" if is_limited else None
    return {
        "device": device.name,
        "cpu": device.cpu,
        "quota": quota,
        "memory": format_size(device.memory) if traits.cgroups and not real else None,
        "gpu": None if device.gpu is None else device.gpu.summary,
        "gflops": device.gflops,
        "timing": duration_text(device.timing),
        "speed": None if device.speed == 1 else round(device.speed, 3),
        "up": link.up and format_rate(link.up),
        "down": link.down and format_rate(link.down),
        "rtt": format_duration(link.rtt) if link.rtt else None,
        "jitter": format_duration(link.jitter) if link.jitter else None,
        "loss": f"{link.loss:.3g}" if link.loss else None,
        "access": device.segment,
        "think": duration_text(device.think),
        "local": _local(device.local),
        "compression": device.step_kind("compression"),
        "byzantine": device.step_kind("byzantine"),
        "origin": device.origin,
        "host": device.host,
    }


def _local(local: LocalTraining) -> str:
    number, unit = (local.steps, "step") if local.steps else (local.epochs, "epoch")
    last = "" if local.last_batch == "keep" else f", {local.last_batch} last"
    other = "" if local.optimizer == "sgd" else f", {local.optimizer}"
    return f"{number} {unit}{'' if number == 1 else 's'} x {local.batch_size}{last}{other}"


_BINS = 24
_LEAST_RATIO = 20.0
"""Ratio of the largest to the smallest value from which a histogram has a logarithmic scale."""
_BARS = " ▁▂▃▄▅▆▇█"
_MAX_NAMES = 12
"""Maximum number of names of a key that are listed; the rarer ones are counted together."""


@dataclass(frozen=True, slots=True)
class KeyDistribution:
    """Values of one key, such as `cpu` or `link.up`, of a group's drawn devices."""

    group: str
    key: str
    values: tuple[float, ...]
    """Sorted, in the unit that `text` expects."""
    text: Callable[[float], str]

    @property
    def is_logarithmic(self) -> bool:
        return self.values[0] > 0 and self.values[-1] > _LEAST_RATIO * self.values[0]

    @property
    def bars(self) -> tuple[int, ...]:
        """Number of devices per bar, from the smallest values to the largest."""
        values = np.asarray(self.values)
        if self.is_logarithmic:
            values = np.log(values)
        counts, _ = np.histogram(values, bins=_BINS)
        return tuple(counts.tolist())

    def quantile(self, share: float) -> str:
        """Format the least value that at least `share` of the devices do not exceed."""
        return self.text(self.values[max(0, math.ceil(share * len(self.values)) - 1)])


def key_distributions(topology: Topology, plan: Plan) -> list[KeyDistribution]:
    """Look at each number that differs among the drawn devices of a group."""
    found = []
    for group, members in _drawn(topology, plan):
        for key, (value, text) in _NUMBERS.items():
            values = sorted(one for pair in members if (one := value(*pair)) is not None)
            if values and values[0] < values[-1]:
                found.append(KeyDistribution(group, key, tuple(values), text))
    return found


def quantile_table(distributions: Sequence[KeyDistribution]) -> list[dict[str, Any]]:
    """Return one row per distribution, with a histogram of block characters."""
    return [
        {
            "group": one.group,
            "key": one.key,
            "devices": len(one.values),
            "least": one.quantile(0),
            "10 %": one.quantile(0.1),
            "median": one.quantile(0.5),
            "90 %": one.quantile(0.9),
            "most": one.quantile(1),
            "histogram": _as_blocks(one.bars) + (" (log)" if one.is_logarithmic else ""),
        }
        for one in distributions
    ]


def name_table(topology: Topology, plan: Plan) -> list[dict[str, Any]]:
    """Return one row per profile and per link class of a group, with the number of devices. Rare names
    share a row."""
    rows = []
    for group, members in _drawn(topology, plan):
        for key, name in _NAMES.items():
            counts = Counter(one for written, _ in members if (one := name(written)) is not None)
            named = counts.most_common()
            if len(named) > _MAX_NAMES:
                rest = named[_MAX_NAMES - 1 :]
                others = (f"{len(rest)} others", sum(count for _, count in rest))
                named = [*named[: _MAX_NAMES - 1], others]
            rows += [
                {
                    "group": group,
                    "key": key,
                    "value": value,
                    "devices": count,
                    "share": f"{count / len(members):.1%}",
                    "histogram": "█" * max(1, round(_BINS * count / named[0][1])),
                }
                for value, count in named
            ]
    return rows


def _drawn(
    topology: Topology, plan: Plan
) -> Iterator[tuple[str, list[tuple[DeviceGroup, PlannedDevice]]]]:
    planned = {device.name: device for device in plan.devices}
    drawn = (group for group in topology.devices if group.origin)
    for name, members in itertools.groupby(drawn, lambda group: group.group_name):
        yield name, [(group, planned[group.name]) for group in members]


def _as_blocks(counts: Sequence[int]) -> str:
    most = max(counts)
    return "".join(_BARS[math.ceil((len(_BARS) - 1) * count / most)] for count in counts)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _duration(value: float) -> str:
    return f"{1000 * value:.3g}ms" if value < 1 else f"{float(f'{value:.3g}'):g}s"


def _rate(value: float) -> str:
    digits = 10 ** max(0, math.floor(math.log10(value)) - 2)
    return format_rate(round(value / digits) * digits)


def _link(device: PlannedDevice) -> AccessLink:
    return device.link or AccessLink()


def _timing(device: PlannedDevice) -> float | None:
    timing = device.timing
    if timing is None or timing.distribution != "constant":
        return None
    return float(timing.params["value"]) / device.speed


def _connected(availability: Availability | None) -> float:
    """Share of the time. For a trace without `loop`, the time ends with the trace."""
    if availability is None:
        return 1.0
    if availability.trace is None:
        means = {
            state: 0.0 if one is None else one.build().expectation
            for state, one in (("on", availability.on), ("off", availability.off))
        }
        return 1.0 if math.isinf(means["on"]) else means["on"] / (means["on"] + means["off"])
    times = [at for at, _ in availability.trace]
    end = availability.loop or times[-1]
    if end == 0:
        return float(availability.trace[0][1] == "on")
    spans = zip(availability.trace, [*times[1:], end], strict=True)
    return math.fsum(until - at for (at, state), until in spans if state == "on") / end


_NUMBERS: dict[str, FleetNumber] = {
    "cpu": (lambda _, device: device.cpu, _number),
    "gflops": (lambda _, device: device.gflops, _number),
    "timing": (lambda _, device: _timing(device), _duration),
    "speed": (lambda _, device: device.speed, _number),
    "memory": (lambda _, device: float(device.memory), lambda value: format_size(round(value))),
    "link.up": (lambda _, device: _link(device).up, _rate),
    "link.down": (lambda _, device: _link(device).down, _rate),
    "link.rtt": (lambda _, device: _link(device).rtt, _duration),
    "link.jitter": (lambda _, device: _link(device).jitter, _duration),
    "link.loss": (lambda _, device: _link(device).loss, _number),
    **{key: number for part in PARTS for key, number in part.numbers.items()},
    "connected": (lambda group, _: _connected(group.availability), lambda value: f"{value:.0%}"),
}
_NAMES: dict[str, Callable[[DeviceGroup], str | None]] = {
    "profile": lambda group: group.profile,
    "link.class": lambda group: None if group.link is None else group.link.kind,
}
