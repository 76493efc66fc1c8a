"""What will be launched: the topology resolved for this host into concrete devices and quotas."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from agents.config import Duration, Link, Local
from testbed.errors import BadInputError
from testbed.topology import DeviceGroup, Topology
from testbed.units import format_duration, format_rate, format_size
from testbed.yamlfile import Problem

RUNTIMES = ("docker", "process")
_RESERVED_MEMORY = 512 * 2**20
"""Bytes for broker and aggregator: the aggregator holds torch and a few models."""
_SHARED_CAPACITY = 0.5
"""Cores for the devices where they share the only one with broker and aggregator."""
_ROUNDING = 1e-9
"""Of a sum of shares: ten devices at 0.1 fit on one core."""


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    name: str
    group: str
    cpu: float
    """Share of one host core."""
    memory: int
    """Bytes."""
    local: Local
    link: Link | None = None
    think: Duration | None = None

    @property
    def period(self) -> int:
        """CFS period in µs: 10 ms, longer where the quota would fall under the kernel's 1 ms."""
        return max(10_000, round(1_000 / self.cpu))

    @property
    def quota(self) -> int:
        """CFS quota in µs per period."""
        return round(self.cpu * self.period)

    @property
    def threads(self) -> int:
        """Torch threads: more than the quota's cores only wait for each other."""
        return max(1, -(-self.quota // self.period))

    @property
    def profile(self) -> str:
        """What to call this device's hardware in a table: `0.25 cpu, 512 MiB`."""
        return f"{self.cpu:g} cpu, {self.memory / 2**20:g} MiB"


@dataclass(frozen=True, slots=True)
class Plan:
    runtime: str
    """`docker` or `process`."""
    devices: tuple[PlannedDevice, ...]
    infrastructure_cpus: str
    """cpuset of broker and aggregator, as in `0` or `0-1`."""
    device_cpus: str
    """cpuset of the devices."""
    device_capacity: float
    """Cores that the devices can have in all."""


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine has for a run."""

    cores: tuple[int, ...]
    """Numbers of the CPUs that we may use."""
    memory: int
    """Available bytes."""


def this_host() -> Host:
    """Measured now: the CPUs that this process may use, and the memory that is free to take."""
    if sys.platform == "linux":
        cores = tuple(sorted(os.sched_getaffinity(0)))
    else:
        cores = tuple(range(os.cpu_count() or 1))
    return Host(cores, psutil.virtual_memory().available)


def plan(topology: Topology, runtime: str, host: Host, *, oversubscribe: bool = False) -> Plan:
    """What `runtime` (`docker` or `process`) will launch on `host`.

    Broker and aggregator have the first core to themselves, the devices the others. Raises
    BadInputError, with the numbers, where the devices ask for more than that, unless `oversubscribe`;
    and always where the runtime cannot do what the topology asks.
    """
    if runtime not in RUNTIMES:
        raise BadInputError(f"no runtime is called {runtime!r}, expected {' or '.join(RUNTIMES)}")
    alone = len(host.cores) > 1
    device_cores = host.cores[1:] if alone else host.cores
    capacity = float(len(device_cores)) if alone else _SHARED_CAPACITY
    problems = list(_impossible(topology, runtime))
    if not oversubscribe:
        problems += [*_too_much_cpu(topology, host, capacity), *_too_much_memory(topology, host)]
    if problems:
        raise topology.source.error(problems)
    return Plan(
        runtime=runtime,
        devices=tuple(device for group in topology.devices for device in _devices(group)),
        infrastructure_cpus=_cpuset(host.cores[:1]),
        device_cpus=_cpuset(device_cores),
        device_capacity=capacity,
    )


def describe(plan: Plan) -> list[dict[str, Any]]:
    """A row per device with what it is given: for `testbed plan`."""
    return [
        {
            "device": device.name,
            "cpu": device.cpu,
            "quota": f"{device.quota / 1000:g}/{device.period / 1000:g} ms",
            "memory": format_size(device.memory),
            "up": None if device.link is None else _rate(device.link.up),
            "down": None if device.link is None else _rate(device.link.down),
            "think": _think(device.think),
            "local": _local(device.local),
        }
        for device in plan.devices
    ]


def _devices(group: DeviceGroup) -> Iterator[PlannedDevice]:
    for name in group.device_names:
        yield PlannedDevice(
            name=name,
            group=group.name,
            cpu=group.cpu,
            memory=group.memory,
            local=group.local.plain(),
            link=None if group.link is None else group.link.plain(),
            think=None if group.think is None else group.think.plain(),
        )


def _impossible(topology: Topology, runtime: str) -> Iterator[Problem]:
    for index, group in enumerate(topology.devices):
        if group.link is not None and runtime == "process":
            yield topology.source.problem(
                ("devices", index, "link"),
                "the process runtime does not shape links: remove this, or use the docker runtime",
                at_key=True,
            )


def _too_much_cpu(topology: Topology, host: Host, capacity: float) -> Iterator[Problem]:
    have = (
        f"this host has {_count(len(host.cores), 'core')}, of which broker and aggregator keep "
        f"{'one' if len(host.cores) > 1 else 'half'}"
    )
    single = False
    for index, group in enumerate(topology.devices):
        if group.cpu > capacity:
            single = True
            yield topology.source.problem(
                ("devices", index, "cpu"),
                f"found {group.cpu:g}, expected at most {capacity:g}: {have}. Lower it, "
                "use a larger host, or run slower than asked with --oversubscribe",
            )
    asked = math.fsum(group.cpu * len(group.device_names) for group in topology.devices)
    if asked > capacity + _ROUNDING and not single:
        yield topology.source.problem(
            ("devices",),
            f"ask for {asked:g} cores ({_parts(topology, 'cpu')}), expected at most {capacity:g}: "
            f"{have}. Lower cpu or count, use a larger host, or run slower than asked with "
            "--oversubscribe",
            at_key=True,
        )


def _too_much_memory(topology: Topology, host: Host) -> Iterator[Problem]:
    asked = sum(group.memory * len(group.device_names) for group in topology.devices)
    if asked + _RESERVED_MEMORY > host.memory:
        yield topology.source.problem(
            ("devices",),
            f"ask for {_gib(asked)} of memory ({_parts(topology, 'memory')}), expected at most "
            f"{_gib(max(0, host.memory - _RESERVED_MEMORY))}: this host has {_gib(host.memory)} free; "
            f"broker and aggregator need {_gib(_RESERVED_MEMORY)}. Lower memory or count, use a "
            "larger host, or risk that devices are killed with --oversubscribe",
            at_key=True,
        )


def _parts(topology: Topology, what: str) -> str:
    """Who asks for how much: `4 x 0.25 pi4, 2 x 0.1 nano`."""
    return ", ".join(
        f"{len(group.device_names)} x "
        f"{format_size(group.memory) if what == 'memory' else f'{group.cpu:g}'} {group.name}"
        for group in topology.devices
    )


def _cpuset(cores: Sequence[int]) -> str:
    """The kernel's notation: `0`, `1-3`, `0,2-3`."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1][1:] = [core]
        else:
            ranges.append([core])
    return ",".join("-".join(map(str, span)) for span in ranges)


def _rate(bits: int | None) -> str | None:
    return None if bits is None else format_rate(bits)


def _think(think: Duration | None) -> str | None:
    if think is None:
        return None
    if think.distribution == "constant":
        return format_duration(think.params["value"])
    return think.distribution


def _local(local: Local) -> str:
    amount = _count(local.steps, "step") if local.steps else _count(local.epochs or 0, "epoch")
    return f"{amount} x {local.batch_size}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
