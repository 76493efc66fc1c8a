"""Notes of a plan: properties of devices that are emulated differently, or not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

from agents.pipeline.secure.field import FIELD
from agents.rules.interface import ClientSide
from agents.selection.uniform import UniformSelection
from agents.texts import quantity
from testbed.plan import memory
from testbed.plan.catalog import Catalog
from testbed.plan.feasibility import gib
from testbed.plan.host import HostResources
from testbed.plan.planned_devices import Plan, PlannedDevice
from testbed.topology import Topology, network
from testbed.topology.devices import DeviceGroup
from testbed.topology.profiles import DeviceProfile
from testbed.topology.units import format_duration, format_size

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
        message, steps = memory.message(model, side), topology.update_steps
        reserved = memory.server_memory(message, len(plan.devices))
        for group, device in groups:
            yield from _memory_notes(group, device, catalog.profile(group.profile), host, reserved)
        for group, device in groups:
            needed = memory.client(model, device.local, side, [*device.steps, *steps])
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
    yield from _selection_notes(topology)
    used = frozenset(segment.name for _, device in groups for segment in device.path)
    yield from network.notes(plan.segments, used)
    if plan.server is not None:
        address, port = plan.server
        yield (
            f"Real devices reach the broker at {address}, port {port}, with TLS and a login each: a "
            f"firewall of this host must let them, such as sudo ufw allow proto tcp to {address} port "
            f"{port}. Nothing of them is limited or shaped, unless their group has shape: true: step "
            "time, rates, round trip, clock and load are measured."
        )
    if topology.evaluate.when == "after" and not plan.traits.simulated:
        yield (
            "Models are evaluated after the run (evaluate.when: after): until then no accuracy is "
            "known, and each model to be evaluated is kept on the disk."
        )
    if (secure := topology.secure) is not None:
        largest = secure.updates * secure.largest_weight << secure.bits
        yield (
            f"Secure aggregation: sums of {secure.updates} updates stay in the field, "
            f"{secure.updates} × {secure.largest_weight} × 2^{secure.bits} = {largest:,} of at most "
            f"{FIELD.p:,}. Any {secure.needed} of {len(secure.clients)} clients can open a sum; the "
            f"server and {secure.colluding} clients together learn no single update."
        )
    for group, device in groups:
        if (thermal := device.thermal) is not None:
            yield (
                f"{group.name}: {format_duration(thermal.after)} after the start of the run, its cpu "
                f"drops to {thermal.to:g} of its value (thermal), even if it has not trained until "
                "then."
            )
    if plan.traits.simulated and any(group.gpu is not None for group in topology.devices):
        yield (
            "In virtual time gpu changes nothing: timing, gflops or cpu say how long a device takes, "
            "and runtime: {device: cuda} computes the trainings on this host's GPU."
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
        if not group.is_drawn or kind not in seen:
            seen.add(kind)
            yield group, device


def _selection_notes(topology: Topology) -> Iterator[str]:
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
