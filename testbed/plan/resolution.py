"""Resolution of what a topology leaves to profiles: link classes, CPU shares, power, heat and memory.

And notes on what of the profiles is not emulated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agents.pipeline.secure.field import FIELD
from agents.rules.interface import ClientSide
from agents.tasks.interface import Task
from agents.texts import counted
from testbed.errors import BadInputError
from testbed.plan import memory, model_check
from testbed.plan.feasibility import gib
from testbed.plan.host import Host
from testbed.plan.planned import Plan, PlannedDevice
from testbed.plan.work import of_step
from testbed.speed.calibration import Calibration, seconds, share
from testbed.speed.kinds import KINDS, Work
from testbed.topology import Topology, link_traces, profiles
from testbed.topology.devices import DEFAULT_MEMORY, DeviceGroup, Link
from testbed.topology.profiles import DeviceProfile, Profiles
from testbed.topology.units import format_duration, format_size
from testbed.topology.yamlfile import Problem, Where

_MIB = 2**20
_WORDS = {
    "convolution": "convolutions",
    "depthwise": "depthwise convolutions",
    "matrix": "matrix products",
    "memory": "memory traffic",
}
"""The kinds of work, for people."""
_SMALL_S = 1e-3
"""Of work in a step here: of less, the calls of operations take longer (docs/fidelity.md)."""
_AMPLE = 384 * _MIB
"""Bytes. Resident after 60 steps of 32 samples: 240 MiB with digits-logreg, 350 MiB with cifar10-cnn and
8,000 images, and 40 MiB in the device's init. Some of it is code, which the kernel can drop."""


def resolved(topology: Topology) -> Topology:
    """The topology with link classes and the profiles' power and heat filled in, and absolute paths of
    traces, data and initial model.

    Raises BadInputError for a name that no profile has, and for traces that cannot be read.
    """
    topology = _with_data_path(topology)
    topology = _with_dockerfiles(topology)
    if (initial := topology.task.initial) is not None:
        path = str(Path(topology.source.name).parent.absolute() / initial)
        topology = topology.with_task(topology.task.model_copy(update={"initial": path}))
    if not any(_has_names(group) for group in topology.devices):
        return topology
    known = profiles.load(Path(topology.source.name).parent)
    if problems := list(_unknown(topology, known)):
        raise topology.source.error(problems)
    groups = [_with_profile(_with_link(group, known), known) for group in topology.devices]
    traced = [_with_trace(topology, index, group) for index, group in enumerate(groups)]
    hints = [hint for _, found in traced for hint in found]
    return topology.with_devices(tuple(group for group, _ in traced)).with_hints(hints)


def needs_calibration(topology: Topology) -> bool:
    """Whether some device's share follows from its profile and the speed of the machines."""
    return any(_by_profile(group) for group in topology.devices)


def _by_profile(group: DeviceGroup) -> bool:
    """Whether its share does; one that was found for several machines may be another here."""
    return group.profile is not None and (group.cpu is None or group.cpus is not None)


def on_host(topology: Topology, host: Calibration) -> tuple[Topology, tuple[str, ...]]:
    """The topology with the CPU shares that the profiles' speeds make on `host`, and a sentence on how
    each was found. Raises BadInputError."""
    known = profiles.load(Path(topology.source.name).parent)
    task: Task = topology.task.build()
    problems, sentences, groups = [], [], list(topology.devices)
    for index, group in enumerate(topology.devices):
        if group.profile is not None and _by_profile(group):
            profile = known.device(group.profile)
            work = None
            if profile.training is not None:
                work = of_step(task, group.local.build().batch_size, topology.task.frozen)
            try:
                cpu = round(share(group.profile, profile, host, work), 4)
            except BadInputError as error:
                where: Where = ("devices", index, "profile")
                problems.append(topology.source.problem(where, str(error)))
                continue
            groups[index] = group.model_copy(update={"cpu": cpu, "cpus": None})
            why = _why(group.profile, profile, host, work, topology.task.name)
            sentences.append(f"{group.name}: {cpu:g} cpu {why}")
    if problems:
        raise topology.source.error(problems)
    return topology.with_devices(tuple(groups)), tuple(sentences)


def on_nodes(
    topology: Topology, speeds: Mapping[str, Calibration], here: str
) -> tuple[Topology, tuple[str, ...], dict[str, dict[str, float]]]:
    """`on_host` for the node `here`, and what each group whose share follows from its profile has of a
    core of each node, by group and node, from the `speeds` of these."""
    groups = [group.name for group in topology.devices if _by_profile(group)]
    found: dict[str, dict[str, float]] = {group: {} for group in groups}
    for node, speed in speeds.items():
        there, _ = on_host(topology, speed)
        for one in there.devices:
            if one.name in found and one.cpu is not None:
                found[one.name][node] = one.cpu
    topology, sentences = on_host(topology, speeds[here])
    told = dict(zip(groups, sentences, strict=True))
    for group, shares in found.items():
        others = [share for node, share in shares.items() if node != here]
        if others:
            least, most = min(others), max(others)
            span = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            told[group] += f" On other nodes: {span} cpu."
    return topology, tuple(told.values()), found


def with_shares(topology: Topology, plan: Plan, groups: Collection[str]) -> Topology:
    """The topology with the share of each device of `groups`, where these depend on its node."""
    shares = {device.name: device.cpu for device in plan.devices}
    return topology.with_devices(
        tuple(
            group.model_copy(update={"cpus": {name: shares[name] for name in group.device_names}})
            if group.name in groups
            else group
            for group in topology.devices
        )
    )


def _why(name: str, profile: DeviceProfile, host: Calibration, work: Work | None, task: str) -> str:
    if profile.training is None:
        return (
            f"for {name} by HPL alone (double-precision matrix products): no training times of it are "
            "known, and training may be several times as slow or as fast."
        )
    if work is None:
        return f"for {name} by HPL alone: what a step of {task} consists of is not known."
    spent = seconds(work, host.training)
    parts = sorted(((spent[kind], kind) for kind in KINDS), reverse=True)
    mix = ", ".join(
        f"{_WORDS[kind]} {part / sum(spent.values()):.0%}" for part, kind in parts if part > 0
    )
    error = profile.training.error
    tested = "" if error is None else f" (times that these predict were off by {error:.0%})"
    small = " It is small: calls of operations, of which training times tell nothing, take most of it."
    return (
        f"is as fast as {name} in training {task}, by its speeds in training{tested}. A step's time "
        f"on this host: {mix}.{small if sum(spent.values()) < _SMALL_S else ''}"
    )


def with_memory(topology: Topology, known: Profiles, free: int | None, model: int = 0) -> Topology:
    """The topology with the profiles' memory for the devices whose memory it does not give.

    Of a host with `free` bytes they get no more than is left for them, shared equally where that is less
    than they have, but no less for it than a device without profile; None: as much as they have. A
    `model` of so many bytes has broker and aggregator need more of them.
    """
    found = [(group, _memory_of_profile(group, known)) for group in topology.devices]
    sizes = [size for group, size in found if size is not None for _ in group.device_names]
    most = max(sizes, default=0)
    if free is not None:
        reserved = memory.reserved(model, len(topology.device_names))
        given = sum(group.memory_limit * len(group.device_names) for group, size in found if not size)
        most = max(DEFAULT_MEMORY, _equal_limit(sizes, free - reserved - given))
    return topology.with_devices(
        tuple(
            group if size is None else group.model_copy(update={"memory": min(size, most)})
            for group, size in found
        )
    )


def notes(topology: Topology, plan: Plan, known: Profiles, host: Host) -> Iterator[str]:
    """Sentences on what of the profiles in `topology` is emulated in another way, or not at all, on
    tight limits of memory, and on evaluations after the run. `plan` is that of the topology
    `with_memory`."""
    planned = {device.group: device for device in plan.devices}
    groups = [(group, planned[group.name]) for group in topology.devices]
    if plan.traits.cgroups:
        model = 4 * model_check.check(topology)
        side: ClientSide = topology.rule.build().client_side
        reserved, steps = memory.reserved(model, len(plan.devices)), topology.update_steps
        for group, device in groups:
            yield from _memory_notes(group, device, known, host, reserved)
        for group, device in groups:
            needed = memory.client(model, device.local, side, [*device.steps, *steps])
            if _AMPLE <= device.memory < needed:
                yield (
                    f"Warning: {group.name} has {format_size(device.memory)} of memory, and a client of "
                    f"{topology.task.name} needs about {format_size(_rounded(needed))} beside its data "
                    "and what a step computes: it would be killed. Raise memory."
                )
    if topology.evaluate.when == "after" and not plan.traits.simulated:
        yield (
            "Models are evaluated once the run is over (evaluate.when: after): until then none has an "
            "accuracy, and each that is to be evaluated is kept on the disk."
        )
    if (secure := topology.secure) is not None:
        largest = secure.updates * secure.largest_weight << secure.bits
        yield (
            f"Secure aggregation: sums of {secure.updates} updates stay in the field, "
            f"{secure.updates} × {secure.largest_weight} × 2^{secure.bits} = {largest:,} of at most "
            f"{FIELD.p:,}. Any {secure.needed} of {len(secure.clients)} clients open one; the server "
            f"and {secure.colluding} of them together learn no single update."
        )
    for group in topology.devices:
        if (thermal := group.thermal) is not None:
            yield (
                f"{group.name}: {format_duration(thermal.after)} after the start of the run "
                f"{thermal.to:g} of its cpu remains (thermal), whether it has trained until then or not."
            )
    if plan.traits.simulated and any(group.gpu is not None for group in topology.devices):
        yield (
            "In virtual time gpu changes nothing: how long a device takes is said by timing, gflops or "
            "cpu; and runtime: {device: cuda} computes the trainings on this host's GPU."
        )
    if plan.traits.simulated and any(group.image is not None for group in topology.devices):
        yield "In virtual time image changes nothing: trainings are computed with this host's packages."
    profiled = any(group.profile is not None for group in topology.devices)
    if plan.traits.simulated and profiled:
        yield "In virtual time the cores and the memory of a profile change nothing."
    elif lines := [line for group, device in groups for line in _core_notes(group, device, known)]:
        yield from lines
        yield (
            "Cores are not emulated one by one: beside work that all of them share, what only one could "
            "do is faster here than on the device, by up to as many times as it has cores."
        )
    if profiled:
        heat = "" if any(group.thermal is not None for group in topology.devices) else ", heat"
        yield f"What else a device has (GPU, caches, memory bandwidth{heat}) is not emulated."


def _has_names(group: DeviceGroup) -> bool:
    """Whether it names a profile, a link class or a trace."""
    link = group.link
    return group.profile is not None or (link is not None and (link.kind or link.trace) is not None)


def _unknown(topology: Topology, known: Profiles) -> Iterator[Problem]:
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index)
        if group.profile is not None and group.cpu is None and group.profile not in known.devices:
            guess = profiles.guess(group.profile, known.devices)
            yield topology.source.problem((*where, "profile"), f"no profile is called this; {guess}")
        kind = None if group.link is None else group.link.kind
        if kind is not None and kind not in known.links:
            guess = profiles.guess(kind, known.links)
            yield topology.source.problem(
                (*where, "link", "class"), f"no link class is called this; {guess}"
            )


def _with_data_path(topology: Topology) -> Topology:
    """With an absolute path of its data, so that the run directory's topology finds them too."""
    data = topology.task.data
    if data is None or data.path is None:
        return topology
    path = Path(topology.source.name).parent.absolute() / data.path
    return topology.with_data(data.model_copy(update={"path": str(path)}))


def _with_dockerfiles(topology: Topology) -> Topology:
    """With absolute paths, so that the run directory's topology finds them too."""
    folder = Path(topology.source.name).parent.absolute()
    problems, groups = [], []
    for index, group in enumerate(topology.devices):
        if (path := group.dockerfile) is not None:
            if not (folder / path).is_file():
                where: Where = ("devices", index, "image")
                problems.append(topology.source.problem(where, f"there is no file {folder / path}"))
            group = group.model_copy(update={"image": str(folder / path)})
        groups.append(group)
    if problems:
        raise topology.source.error(problems)
    return topology.with_devices(tuple(groups))


def _with_trace(
    topology: Topology, index: int, group: DeviceGroup
) -> tuple[DeviceGroup, tuple[str, ...]]:
    """Its files by their absolute paths, so that the run directory's topology finds them too; hints on
    what is in them."""
    if group.link is None or group.link.trace is None:
        return group, ()
    folder = Path(topology.source.name).parent.absolute()
    try:
        read = link_traces.read(group.link.trace, folder)
    except (ValueError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        where: Where = ("devices", index, "link", "trace")
        raise topology.source.error([topology.source.problem(where, reason)]) from error
    paths = {key: getattr(group.link.trace, key) for key in ("up", "down", "csv")}
    found = {key: str(folder / path) for key, path in paths.items() if path is not None}
    link = group.link.model_copy(update={"trace": group.link.trace.model_copy(update=found)})
    name = group.link.trace.csv
    hints = tuple(f"{name}: {hint}" for trace in read for hint in trace.hints)
    return group.model_copy(update={"link": link}), hints


def _with_link(group: DeviceGroup, known: Profiles) -> DeviceGroup:
    """What the topology gives itself wins."""
    link = group.link
    if link is None or link.kind is None:
        return group
    own = {name: value for name, value in link if name != "kind" and value is not None}
    link_class = known.link(link.kind)
    values: dict[str, Any] = {name: getattr(link_class, name, None) for name in Link.model_fields}
    return group.model_copy(update={"link": Link.model_construct(**values | own)})


def _with_profile(group: DeviceGroup, known: Profiles) -> DeviceGroup:
    """With the profile's power and heat, where the topology gives none."""
    profile = _profile(group, known)
    if profile is None:
        return group
    found = {"power": group.power or profile.power, "thermal": group.thermal or profile.thermal}
    return group.model_copy(update=found)


def _profile(group: DeviceGroup, known: Profiles) -> DeviceProfile | None:
    return known.devices.get(group.profile or "")


def _memory_of_profile(group: DeviceGroup, known: Profiles) -> int | None:
    """Bytes that the profile has, where that is known and the topology gives none."""
    profile = _profile(group, known)
    return None if profile is None or group.memory is not None else profile.memory


def _equal_limit(sizes: Sequence[int], budget: int) -> int:
    """The highest limit, in whole MiB, with which all `sizes`, cut to it, fit into `budget`."""
    left = budget
    for number, size in enumerate(sorted(sizes)):
        part = left // (len(sizes) - number)
        if size > part:
            return part // _MIB * _MIB
        left -= size
    return max(sizes, default=0)


def _memory_notes(
    group: DeviceGroup, device: PlannedDevice, known: Profiles, host: Host, reserved: int
) -> Iterator[str]:
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
                f"{gib(reserved)}, and devices with profiles share the rest equally."
            )
    if device.memory < _AMPLE:
        yield (
            f"{group.name}: {limit} of memory is tight. A device's client and init took 280 MiB with "
            "digits-logreg, 390 MiB with cifar10-cnn and 8,000 images; a client that needs more than it "
            "may have is killed."
        )


def _rounded(size: int) -> int:
    """In whole MiB."""
    return -(-size // _MIB) * _MIB


def _core_notes(group: DeviceGroup, device: PlannedDevice, known: Profiles) -> Iterator[str]:
    profile = _profile(group, known)
    if profile is not None and (profile.cores or 1) > 1:
        threads = counted(device.threads, "thread")
        yield (
            f"{group.name}: {device.cpu:g} cpu in {threads} for the {profile.cores} cores of "
            f"{group.profile}."
        )
