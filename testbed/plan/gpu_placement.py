"""Which of the host's GPUs each device trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agents.texts import quantity
from testbed.host.gpus import MPS_CLIENTS, Gpu, Gpus
from testbed.plan.feasibility import gib
from testbed.topology import Topology
from testbed.topology.units import format_size
from testbed.topology.yamlfile import Problem

_ROUNDING = 1e-9
"""Error allowed in a sum of shares."""


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """What a device has of a GPU."""

    uuid: str
    share: float
    """Of its multiprocessors, at most."""
    memory: int | None
    """Bytes at most; None: not limited."""
    limited: bool
    """Whether it is shared by limits, which MPS keeps."""

    @property
    def told(self) -> str:
        """`0.25, 2GiB`."""
        limit = "" if self.memory is None else f", {format_size(self.memory)}"
        return f"{self.share:.3g}{limit}"


@dataclass(slots=True)
class _Room:
    """What is left of a GPU."""

    gpu: Gpu
    share: float = 1.0
    memory: int = 0
    clients: int = MPS_CLIENTS

    def lacks(self, share: float, memory: int, *, limited: bool) -> bool:
        return (
            share > self.share + _ROUNDING
            or memory > self.memory
            or (limited and (self.clients == 0 or not self.gpu.shares))
        )

    def take(self, share: float, memory: int, *, limited: bool) -> None:
        self.share -= share
        self.memory -= memory
        self.clients -= limited


def problems(topology: Topology, gpus: Gpus, dilation: float) -> Iterator[Problem]:
    """What of the host, or of stretched time, keeps devices from having the GPU that they ask for."""
    if dilation != 1 and any(group.gpu is not None for group in topology.devices):
        yield topology.source.problem(
            ("dilation",),
            f"is {dilation:g}, and a GPU is as fast as ever in stretched time: take fewer devices, or a "
            "larger host, until 1 will do; or remove gpu",
            at_key=True,
        )
    for index, group in enumerate(topology.devices):
        if group.gpu is None:
            continue
        lack = gpus.lack or (gpus.lack_of_mps if group.gpu.limited else None)
        if lack is not None:
            yield topology.source.problem(
                ("devices", index, "gpu"),
                f"{lack}. Or remove gpu, and the device trains on its cpu",
                at_key=True,
            )
        elif group.gpu.limited and not any(gpu.shares for gpu in gpus.found):
            names = ", ".join(gpu.name for gpu in gpus.found)
            yield topology.source.problem(
                ("devices", index, "gpu"),
                f"MPS limits clients on GPUs from Volta on (compute capability 7.0), and this host has "
                f"{names}: write gpu: true, for a whole one",
                at_key=True,
            )
        elif (group.gpu.memory or 0) > (most := max(gpu.memory for gpu in gpus.found)):
            yield topology.source.problem(
                ("devices", index, "gpu", "memory"),
                f"found {format_size(group.gpu.memory or 0)}, expected at most {gib(most)}: no "
                "GPU of this host has more",
            )


def placed(
    topology: Topology, gpus: Gpus, *, oversubscribe: bool
) -> tuple[Mapping[str, PlannedGpu], Problem | None]:
    """The GPU of each device that asks for one; what is wrong where they do not fit.

    The largest shares are placed first, each on the first GPU with room for it; those without room,
    with `oversubscribe`, where the most is left.
    """
    wanted = [
        (group.gpu, name) for group in topology.devices if group.gpu for name in group.device_names
    ]
    rooms = [_Room(gpu, memory=gpu.memory) for gpu in gpus.found]
    found: dict[str, PlannedGpu] = {}
    for gpu, name in sorted(wanted, key=lambda each: (-each[0].share, -(each[0].memory or 0))):
        asked = gpu.share, gpu.memory or 0
        fitting = [room for room in rooms if not room.lacks(*asked, limited=gpu.limited)]
        if not fitting and not oversubscribe:
            return {}, _too_much(topology, name, gpus)
        usable = [room for room in rooms if room.gpu.shares or not gpu.limited]
        room = fitting[0] if fitting else max(usable, key=lambda room: room.share)
        room.take(*asked, limited=gpu.limited)
        found[name] = PlannedGpu(room.gpu.uuid, gpu.share, gpu.memory, gpu.limited)
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
        f"ask for {total:g} GPUs ({parts}), and this host has {count} ({have}; MPS serves {MPS_CLIENTS} "
        f"devices on one): there is no room for {first}. Lower share, memory or count, use a host with "
        "more GPUs, or run slower than asked with --oversubscribe",
        at_key=True,
    )
