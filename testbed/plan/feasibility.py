"""Checks whether a host can run a topology. Each problem names the place in the topology file and a
fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from agents.texts import quantity
from testbed.topology import Topology, link_traces, scenario
from testbed.topology.fields import LEAST_MEMORY
from testbed.topology.units import format_size, gib
from testbed.topology.yamlfile import Problem, Where
from testbed.traits import runtime_names, traits

if TYPE_CHECKING:
    from testbed.plan.planned_devices import PlannedDevice

    Groups = Sequence[PlannedDevice]
    """One device per group, before placement and dilation."""

_ROUNDING = 1e-9
"""Tolerance for rounding errors in a sum of shares: ten devices with a share of 0.1 fit on one core."""
_MIN_SHARE = 0.001
"""Smallest share of a core. The engine allows no quota below 1 ms, and the kernel no period above
1 s."""


def unsupported(topology: Topology, groups: Groups, runtime: str) -> Iterator[Problem]:
    """`runtime` must not be a simulated runtime."""
    if topology.server.link is not None:
        yield _not_emulated(topology, ("server", "link"), runtime)
    if traits(runtime).lossless_reason:
        yield from _lossy(topology, groups, runtime)
    for index, (group, planned) in enumerate(zip(topology.devices, groups, strict=True)):
        where: Where = ("devices", index)
        if group.transfers is not None:
            yield topology.source.problem(
                where,
                "the durations of transfers are given, which the "
                f"{runtime_names(lambda t: t.simulated)} runtime alone can keep: use that runtime, or "
                "emulate the devices of a run with testbed twin RUN",
            )
        elif planned.cpu is None and not group.is_real:
            yield topology.source.problem(
                where,
                f"has no cpu, which the {runtime} runtime needs: add one such as cpu: 0.25 (a share of "
                f"one host core), or use the {runtime_names(lambda t: t.simulated)} runtime",
            )
        if not group.has_plain_speed and group.timing is None:
            yield _not_emulated(topology, (*where, "speed"), runtime)
        if group.image is not None and not traits(runtime).images:
            yield topology.source.problem(
                (*where, "image"),
                f"the {runtime} runtime starts no containers; its devices use this host's packages: "
                "remove it, and install the image's packages on this host, or use the "
                f"{runtime_names(lambda t: t.images)} runtime",
                at_key=True,
            )


def _lossy(topology: Topology, groups: Groups, runtime: str) -> Iterator[Problem]:
    """`runtime`: a runtime that cannot emulate loss."""
    others = runtime_names(lambda t: not t.simulated and not t.lossless_reason)
    found: list[Where] = []
    for index, planned in enumerate(groups):
        if link_traces.has_loss(planned.trace):
            found.append(("devices", index, "link", "trace", "csv"))
        elif planned.link is not None and planned.link.loss:
            found.append(("devices", index, "link", "loss"))
    found += [("network", name, "loss") for name, one in topology.network.items() if one.loss]
    for index, entry in enumerate(topology.scenario):
        if entry.link is not None and entry.link.loss:
            found.append(("scenario", index, "link", "loss"))
    for where in found:
        fix = "write loss: 0%" if where[-1] == "loss" else "leave out its column loss"
        yield topology.source.problem(
            where,
            f"the {runtime} runtime, {traits(runtime).lossless_reason}, loses no packets: {fix}, or use "
            f"the {others} runtime",
            at_key=True,
        )


def _not_emulated(topology: Topology, where: Where, runtime: str) -> Problem:
    return topology.source.problem(
        where,
        f"the {runtime} runtime does not emulate this yet: remove it, or use the "
        f"{runtime_names(lambda t: t.simulated)} runtime",
        at_key=True,
    )


def too_little(cpu: float, dilation: float) -> str | None:
    """Return why a container cannot have `cpu` cores of device time; None if it can."""
    if (got := cpu / dilation) >= _MIN_SHARE - _ROUNDING:
        return None
    least = f"a container has at least {_MIN_SHARE:g} of a core"
    return least if dilation == 1 else f"dilation {dilation:g} makes it {got:.2g}, but {least}"


def too_little_cpu(topology: Topology, groups: Groups, dilation: float) -> Iterator[Problem]:
    """Look at each group and at each entry of the scenario."""
    shares: list[tuple[Where, float | None]] = [
        *((("devices", index, "cpu"), group.cpu) for index, group in enumerate(groups)),
        *(
            (("devices", index, "thermal"), group.cpu * group.thermal.to)
            for index, group in enumerate(groups)
            if group.cpu is not None and group.thermal is not None
        ),
        *((("scenario", index, "cpu"), entry.cpu) for index, entry in enumerate(topology.scenario)),
    ]
    for where, share in shares:
        if share is not None and (why := too_little(share, dilation)) is not None:
            less = "" if dilation == 1 else ", reduce the dilation (a larger host, or fewer devices)"
            yield topology.source.problem(
                where,
                f"found {share:g}: {why}. Raise it{less}, or use the "
                f"{runtime_names(lambda t: not t.cgroups)} runtime",
            )


def too_much(shares: Iterable[float], capacity: float) -> str | None:
    if (total := math.fsum(shares)) <= capacity + _ROUNDING:
        return None
    return f"the devices would request {total:g} cores, but can have only {capacity:g}"


def no_cores_to_evaluate(topology: Topology, cores: int) -> Problem | None:
    """Broker and aggregator need one core, and the devices need another."""
    wanted, most = topology.evaluate.cores or 0, max(0, cores - 2)
    if wanted <= most:
        return None
    fix = f"Write at most {most}, or remove it" if most else "Remove it"
    return topology.source.problem(
        ("evaluate", "cores"),
        f"found {wanted}, but {_host_has(cores)}: broker and aggregator need one, and the "
        f"devices another. {fix}, or use a larger host",
    )


def _host_has(cores: int) -> str:
    return f"this host has {quantity(cores, 'core')}"


def too_much_cpu(topology: Topology, groups: Groups, cores: int, capacity: float) -> Iterator[Problem]:
    """Yield a problem for each group with a device that requests more than `capacity`. If there is none,
    but all devices together request more, yield one problem.

    `cores`: number of the host's cores. `capacity`: cores that the devices can have, in device time.
    """
    have = f"{_host_has(cores)}; broker and aggregator keep {'one' if cores > 1 else 'half'}"
    if topology.evaluate.cores:
        have += f", and evaluations {topology.evaluate.cores} (evaluate.cores)"
    fix = (
        "use a larger host, stretch time (dilation: auto), or run slower than requested with "
        "--oversubscribe"
    )
    cpu = [group.cpu or 0.0 for group in groups]
    for index, one in enumerate(cpu):
        if one > capacity:
            yield topology.source.problem(
                ("devices", index, "cpu"),
                f"found {one:g}, expected at most {capacity:g}: {have}. Lower it, {fix}",
            )
    counts = [len(group.device_names) for group in topology.devices]
    total = math.fsum(one for one, count in zip(cpu, counts, strict=True) for _ in range(count))
    if max(cpu) <= capacity and too_much([total], capacity):
        parts = _parts(topology, [f"{one:g}" for one in cpu])
        yield topology.source.problem(
            ("devices",),
            f"ask for {total:g} cores ({parts}), expected at most {capacity:g}: "
            f"{have}. Lower cpu or count, {fix}",
            at_key=True,
        )


def too_much_later(
    topology: Topology, capacity: float, begin: Mapping[str, float], node: str = ""
) -> Iterator[Problem]:
    """Yield a problem for each entry of the scenario after which all devices together have more CPU than
    `capacity` cores.

    `begin`: device -> CPU share at the start. `node`: name of the node with these devices; empty if one
    machine has all devices.
    """
    by_group, where = scenario.devices_by_group(topology.devices), node and f" on {node}"
    shares = dict(begin)
    for index, entry in sorted(enumerate(topology.scenario), key=lambda each: each[1].at):
        if entry.cpu is None:
            continue
        changed = [name for name in scenario.expand(entry.targets, by_group) if name in shares]
        shares |= dict.fromkeys(changed, entry.cpu)
        if changed and (why := too_much(shares.values(), capacity)) is not None:
            yield topology.source.problem(
                ("scenario", index, "cpu"),
                f"{why}{where}. Lower it, stretch time (dilation), or run slower than requested with "
                "--oversubscribe",
            )


def too_much_memory(topology: Topology, groups: Groups, free: int, reserved: int) -> Iterator[Problem]:
    """`free`: free memory of the host in bytes. `reserved`: part of `free` for broker and aggregator, in
    bytes."""
    counts = [len(group.device_names) for group in topology.devices]
    total = sum(group.memory * count for group, count in zip(groups, counts, strict=True))
    if total + reserved > free:
        parts = _parts(topology, [format_size(group.memory) for group in groups])
        yield topology.source.problem(
            ("devices",),
            f"ask for {gib(total)} of memory ({parts}), expected at most "
            f"{gib(max(0, free - reserved))}: this host has {gib(free)} free; "
            f"broker and aggregator need {gib(reserved)}. Lower memory or count, use a "
            "larger host, or use --oversubscribe at the risk that devices are killed",
            at_key=True,
        )


def no_node_fits(topology: Topology, device: str, why: str) -> Problem:
    """`why`: reason, as the rest of a sentence that begins with the device's name."""
    index = next(n for n, group in enumerate(topology.devices) if device in group.device_names)
    return topology.source.problem(
        ("devices", index),
        f"{device} {why}. Lower cpu, memory or count, add nodes, stretch time (dilation: auto), or run "
        "slower than requested with --oversubscribe",
    )


def too_little_memory(topology: Topology, groups: Groups) -> Iterator[Problem]:
    """A memory limit in the topology is checked when the topology is loaded."""
    for index, (group, planned) in enumerate(zip(topology.devices, groups, strict=True)):
        if planned.memory < LEAST_MEMORY and not group.is_real:
            yield topology.source.problem(
                ("devices", index, "profile"),
                f"{group.profile} has {format_size(planned.memory)} of memory, too little for a client: "
                "PyTorch alone takes about 240 MB. Set the client's memory, at least memory: "
                f"{format_size(LEAST_MEMORY)}, or use the process runtime, which does not limit memory, "
                "or the virtual runtime",
            )


def _parts(topology: Topology, requests: Sequence[str]) -> str:
    """Format each group's request: `4 x 0.25 pi4, 2 x 0.1 nano`; `500 x drawn phones` if requests were
    drawn."""
    counts: dict[str, int] = {}
    found: dict[str, set[str]] = {}
    for group, request in zip(topology.devices, requests, strict=True):
        counts[group.group_name] = counts.get(group.group_name, 0) + len(group.device_names)
        found.setdefault(group.group_name, set()).add(request)
    return ", ".join(
        f"{count} x {found[name].pop() if len(found[name]) == 1 else 'drawn'} {name}"
        for name, count in counts.items()
    )
