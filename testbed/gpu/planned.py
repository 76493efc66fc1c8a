"""GPUs in a plan: which device gets which part of which GPU. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from agents.config import ClientConfig
from agents.texts import quantity
from testbed.host.gpus import MPS_CLIENTS, Gpus, HostGpu
from testbed.topology import Topology
from testbed.topology.units import format_size, gib
from testbed.topology.yamlfile import Problem, Where
from testbed.traits import runtime_names, traits

if TYPE_CHECKING:  # the plan imports this module
    from testbed.plan.machines import HostResources
    from testbed.plan.planned_devices import Plan, PlannedDevice

_ROUNDING = 1e-9
"""Tolerance for rounding errors in a sum of shares."""
_MPS, _MPS_CLIENT = 2**32, 2**29
"""Memory limit of the container of NVIDIA's MPS, in bytes; and in addition per device. Not measured."""


def mps_limit(devices: int) -> int:
    return _MPS + _MPS_CLIENT * devices


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


def place(made: Plan, topology: Topology, host: HostResources) -> tuple[Plan, Sequence[Problem]]:
    """Give devices of one machine their GPUs."""
    if not made.traits.gpus:
        return made, ()
    if problems := [*_lacks(topology, host.gpus, made.dilation)]:
        return made, problems
    placed, no_room = place_on_gpus(topology, host.gpus, oversubscribe=made.is_oversubscribed)
    devices = tuple(replace(one, gpu=placed.get(one.name)) for one in made.devices)
    return replace(made, devices=devices), () if no_room is None else (no_room,)


def _lacks(topology: Topology, gpus: Gpus, dilation: float) -> Iterator[Problem]:
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


def refusals(topology: Topology, runtime: str, host: HostResources) -> Iterator[Problem]:
    found, here = traits(runtime), topology.runtime.device == "cuda"
    if here and found.images:
        fix = ", and write gpu: true for the devices that need a GPU" if found.gpus else ""
        yield topology.source.problem(
            ("runtime", "device"),
            f"in the {runtime} runtime each device trains on its own hardware: remove this{fix}",
            at_key=True,
        )
    elif here and host.lack_of_cuda is not None:
        yield topology.source.problem(
            ("runtime", "device"), f"{host.lack_of_cuda}. Or write device: cpu", at_key=True
        )
    general = topology.task.local.build().precision == "float16"
    for index, group in enumerate(topology.devices):
        if group.gpu is not None and not found.gpus and not found.simulated:
            instead = "" if found.images else ", and write runtime: {device: cuda} for this host's"
            yield topology.source.problem(
                ("devices", index, "gpu"),
                f"the {runtime} runtime gives devices no GPU of their own: remove it{instead}, or use "
                f"the {runtime_names(lambda t: t.gpus)} runtime",
                at_key=True,
            )
        with_gpu = group.gpu is not None if found.images else here
        if group.local.build().precision == "float16" and not with_gpu:
            where: Where = ("task",) if general else ("devices", index)
            fix = "give it gpu" if found.images else "write runtime: {device: cuda}"
            yield topology.source.problem(
                (*where, "local", "precision"),
                f"{group.name} trains on the CPU, but float16 is for GPUs: write bfloat16 or float32, "
                f"or {fix}",
            )


def notes(topology: Topology, plan: Plan) -> Iterator[str]:
    if plan.traits.simulated and any(group.gpu is not None for group in topology.devices):
        yield (
            "In virtual time gpu changes nothing: timing, gflops or cpu say how long a device takes, "
            "and runtime: {device: cuda} computes the trainings on this host's GPU."
        )


def with_limits(config: ClientConfig, device: PlannedDevice) -> ClientConfig:
    gpu = device.gpu
    return config if gpu is None else replace(config, device="cuda", gpu_memory=gpu.memory)


def entry(device: PlannedDevice) -> dict[str, Any] | None:
    return None if device.gpu is None else asdict(device.gpu)
