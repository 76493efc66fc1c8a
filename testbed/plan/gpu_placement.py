"""Assignment of devices to the host's GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agents.texts import quantity
from testbed.host.gpus import MPS_CLIENTS, Gpus, HostGpu
from testbed.plan.feasibility import gib
from testbed.topology import Topology
from testbed.topology.units import format_size
from testbed.topology.yamlfile import Problem

_ROUNDING = 1e-9
"""Tolerance for rounding errors in a sum of shares."""


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    uuid: str
    share: float
    """Maximum share of the GPU's multiprocessors."""
    memory: int | None
    """Maximum in bytes."""
    limited: bool
    """Whether MPS limits the device's part."""

    @property
    def summary(self) -> str:
        """Share and memory limit as text, such as `0.25, 2GiB`."""
        limit = "" if self.memory is None else f", {format_size(self.memory)}"
        return f"{self.share:.3g}{limit}"


@dataclass(slots=True)
class _Room:
    gpu: HostGpu
    share: float = 1.0
    """Share of the GPU's multiprocessors."""
    memory: int = 0
    """Bytes."""
    clients: int = MPS_CLIENTS
    """Number of MPS clients that may be added."""

    def lacks(self, share: float, memory: int, *, limited: bool) -> bool:
        return (
            share > self.share + _ROUNDING
            or memory > self.memory
            or (limited and (self.clients == 0 or not self.gpu.shares))
        )

    def reserve(self, share: float, memory: int, *, limited: bool) -> None:
        self.share -= share
        self.memory -= memory
        self.clients -= limited


def gpu_problems(topology: Topology, gpus: Gpus, dilation: float) -> Iterator[Problem]:
    """Reasons are a dilation, and features that the host lacks."""
    if dilation != 1 and any(group.gpu is not None for group in topology.devices):
        yield topology.source.problem(
            ("dilation",),
            f"is {dilation:g}, but a GPU does not become slower in stretched time: use fewer devices or "
            "a larger host, so that 1 is enough; or remove gpu",
            at_key=True,
        )
    for index, group in enumerate(topology.devices):
        if group.gpu is None:
            continue
        lack = gpus.lack or (gpus.lack_of_mps if group.gpu.is_limited else None)
        if lack is not None:
            yield topology.source.problem(
                ("devices", index, "gpu"),
                f"{lack}. Or remove gpu: the device then trains on its cpu",
                at_key=True,
            )
        elif group.gpu.is_limited and not any(gpu.shares for gpu in gpus.found):
            names = ", ".join(gpu.name for gpu in gpus.found)
            yield topology.source.problem(
                ("devices", index, "gpu"),
                "MPS can limit clients on GPUs from Volta on (compute capability 7.0), but this host "
                f"has {names}: write gpu: true, for a whole GPU",
                at_key=True,
            )
        elif (group.gpu.memory or 0) > (most := max(gpu.memory for gpu in gpus.found)):
            yield topology.source.problem(
                ("devices", index, "gpu", "memory"),
                f"found {format_size(group.gpu.memory or 0)}, expected at most {gib(most)}, the memory "
                "of this host's largest GPU",
            )


def place_on_gpus(
    topology: Topology, gpus: Gpus, *, oversubscribe: bool
) -> tuple[Mapping[str, PlannedGpu], Problem | None]:
    """Return device -> GPU, and a problem if the devices do not fit.

    Devices with the largest shares are placed first. Each device gets the first GPU that has room for
    the device. With `oversubscribe`, a device that fits on no GPU gets the GPU with the largest
    unassigned share.
    """
    wanted = [
        (group.gpu, name) for group in topology.devices if group.gpu for name in group.device_names
    ]
    rooms = [_Room(gpu, memory=gpu.memory) for gpu in gpus.found]
    found: dict[str, PlannedGpu] = {}
    for gpu, name in sorted(wanted, key=lambda each: (-each[0].share, -(each[0].memory or 0))):
        asked = gpu.share, gpu.memory or 0
        fitting = [room for room in rooms if not room.lacks(*asked, limited=gpu.is_limited)]
        if not fitting and not oversubscribe:
            return {}, _too_much(topology, name, gpus)
        usable = [room for room in rooms if room.gpu.shares or not gpu.is_limited]
        room = fitting[0] if fitting else max(usable, key=lambda room: room.share)
        room.reserve(*asked, limited=gpu.is_limited)
        found[name] = PlannedGpu(room.gpu.uuid, gpu.share, gpu.memory, gpu.is_limited)
    return found, None


def _too_much(topology: Topology, first: str, gpus: Gpus) -> Problem:
    asking = [(group.gpu, group.name, len(group.device_names)) for group in topology.devices]
    parts = ", ".join(
        f"{count} x {gpu.share:.3g}{f' and {format_size(gpu.memory)}' if gpu.memory else ''} {name}"
        for gpu, name, count in asking
        if gpu is not None
    )
    total = sum(gpu.share * count for gpu, _, count in asking if gpu is not None)
    have = ", ".join(f"{gpu.name} with {gib(gpu.memory)}" for gpu in gpus.found)
    count = quantity(len(gpus.found), "GPU")
    return topology.source.problem(
        ("devices",),
        f"ask for {total:g} GPUs ({parts}), but this host has {count} ({have}; MPS serves {MPS_CLIENTS} "
        f"devices per GPU): there is no room for {first}. Lower share, memory or count, use a host with "
        "more GPUs, or run slower than requested with --oversubscribe",
        at_key=True,
    )
