"""Device profiles beside their speed: the limit of memory, and notes on what is not emulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from testbed.plan import Host, Plan, PlannedDevice
from testbed.plan.feasibility import RESERVED_MEMORY, gib
from testbed.topology import Topology
from testbed.topology.devices import DEFAULT_MEMORY, DeviceGroup
from testbed.topology.profiles import Profiles
from testbed.topology.units import format_size

_MIB = 2**20
_AMPLE = 384 * _MIB
"""Bytes. Resident after 60 steps of 32 samples: 240 MiB with digits-logreg, 350 MiB with cifar10-cnn and
8,000 images, and 40 MiB in the device's init. Some of it is code, which the kernel can drop."""


def with_memory(topology: Topology, known: Profiles, free: int | None) -> Topology:
    """The topology with the profiles' memory for the devices whose memory it does not give.

    Of a host with `free` bytes they get no more than is left for them, in equal parts where that is less
    than they have, but no less for it than a device without profile; None: as much as they have.
    """
    found = [(group, _of_profile(group, known)) for group in topology.devices]
    sizes = [size for group, size in found if size is not None for _ in group.device_names]
    most = max(sizes, default=0)
    if free is not None:
        given = sum(group.memory_limit * len(group.device_names) for group, size in found if not size)
        most = max(DEFAULT_MEMORY, _level(sizes, free - RESERVED_MEMORY - given))
    return topology.with_devices(
        tuple(
            group if size is None else group.model_copy(update={"memory": min(size, most)})
            for group, size in found
        )
    )


def notes(topology: Topology, plan: Plan, known: Profiles, host: Host) -> Iterator[str]:
    """Sentences on what of the profiles in `topology` is emulated in another way, or not at all, in the
    plan of it `with_memory`; and on tight limits of memory."""
    planned = {device.group: device for device in plan.devices}
    groups = [(group, planned[group.name]) for group in topology.devices]
    if plan.traits.cgroups:
        for group, device in groups:
            yield from _memory(group, device, known, host)
    profiled = any(group.profile is not None for group in topology.devices)
    if plan.traits.simulated and profiled:
        yield "In virtual time the cores and the memory of a profile change nothing."
    elif core_notes := [line for group, device in groups for line in _cores(group, device, known)]:
        yield from core_notes
        yield (
            "Cores are not emulated one by one: beside work that all of them share, what only one could "
            "do is faster here than on the device, by up to as many times as it has cores."
        )
    if profiled:
        yield "What else a device has (GPU, caches, memory bandwidth, heat) is not emulated."


def _of_profile(group: DeviceGroup, known: Profiles) -> int | None:
    """Bytes that the profile has, where that is known and the topology gives none."""
    profile = known.devices.get(group.profile or "")
    return None if profile is None or group.memory is not None else profile.memory


def _level(sizes: Sequence[int], budget: int) -> int:
    """The highest limit, in whole MiB, with which all `sizes`, cut to it, fit into `budget`."""
    left = budget
    for number, size in enumerate(sorted(sizes)):
        part = left // (len(sizes) - number)
        if size > part:
            return part // _MIB * _MIB
        left -= size
    return max(sizes, default=0)


def _memory(group: DeviceGroup, device: PlannedDevice, known: Profiles, host: Host) -> Iterator[str]:
    limit = format_size(device.memory)
    if group.memory is None and group.profile is not None:
        profile = known.devices.get(group.profile)
        if profile is None or profile.memory is None:
            why = "is not known here" if profile is None else "says none"
            yield f"{group.name}: {limit} of memory, the default: the profile {group.profile} {why}."
        elif device.memory < profile.memory:
            yield (
                f"{group.name}: {limit} of memory, not {group.profile}'s {format_size(profile.memory)}: "
                f"this host has {gib(host.memory)} free, of which broker and aggregator need "
                f"{gib(RESERVED_MEMORY)}, and devices with profiles share the rest in equal parts."
            )
    if device.memory < _AMPLE:
        yield (
            f"{group.name}: {limit} of memory is tight. A device's client and init took 280 MiB with "
            "digits-logreg, 390 MiB with cifar10-cnn and 8,000 images; a client that needs more than it "
            "may have is killed."
        )


def _cores(group: DeviceGroup, device: PlannedDevice, known: Profiles) -> Iterator[str]:
    profile = known.devices.get(group.profile or "")
    if profile is not None and (profile.cores or 1) > 1:
        threads = "1 thread" if device.threads == 1 else f"{device.threads} threads"
        yield (
            f"{group.name}: {device.cpu:g} cpu in {threads} for the {profile.cores} cores of "
            f"{group.profile}."
        )
