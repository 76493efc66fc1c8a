"""What a plan is: devices with quotas and limits, on the cores of one host or of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agents.config import AccessLink, DrawnDuration, LocalTraining, Named, SharedLink
from agents.timing.clock import in_host_time
from testbed.host.cpusets import cpu_numbers
from testbed.plan import feasibility
from testbed.plan.gpu_placement import PlannedGpu
from testbed.plan.measured import Measured
from testbed.plan.placement import PlannedNode
from testbed.plan.shaper import Shaper
from testbed.topology import Virtual
from testbed.topology.fields import Thermal
from testbed.topology.link_traces import Trace
from testbed.topology.profiles import Profiles
from testbed.topology.units import format_duration
from testbed.traits import Traits, traits

SHARES_OF_A_PROCESS, _SHARES_OF_A_CORE, _MAX_SHARES = 1024, 10_000, 262_144
"""CPU weight, as engines take it: of a single process, of a device with a whole core among others of its
run, and the kernel's most."""
DEVICES_WEIGHT = 50.0
"""CPU weight of all devices of a run, per core, in those of a single process of the host."""
_MIN_SLICE_MICROSECONDS = 5_000
"""Of work at a time: each begins with cold caches, which take some of it."""
_MIN_RATE_BITS_PER_SECOND = 8
"""The kernel counts in bytes per second."""


def weight_alone(weight: int) -> int:
    """CPU weight of a device that is in no control group of its run, from its `weight` among the others:
    a part of what the group would have."""
    return min(_MAX_SHARES, round(weight * DEVICES_WEIGHT * SHARES_OF_A_PROCESS / _SHARES_OF_A_CORE))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    name: str
    group: str
    cpu: float | None
    """Share of one core in device time; given where the runtime is real."""
    memory: int
    """Bytes."""
    local: LocalTraining
    cores: str = ""
    """cpuset, as in `1-3`; empty in virtual time."""
    core_speed: float = 1.0
    """Speed of a core of its machine, in cores of this host."""
    link: AccessLink | None = None
    """Its own, as the run begins."""
    trace: tuple[Trace, ...] = ()
    """What that link does in the course of the run."""
    access: SharedLink | None = None
    """Its access link, shared with others."""
    think: DrawnDuration | None = None
    timing: DrawnDuration | None = None
    """Of a training at the least, from when it could begin; still to be divided by `speed`."""
    gflops: float | None = None
    """1e9 operations per second; still to be multiplied by `speed`."""
    speed: float = 1.0
    """This device's own, as drawn."""
    steps: tuple[Named, ...] = ()
    """What it does to its updates (`agents.pipeline`), beside what all devices do."""
    power: Mapping[str, float] | None = None
    """Watts, by state."""
    thermal: Thermal | None = None
    """Loss of CPU share by heat."""
    gpu: PlannedGpu | None = None
    """What it trains on in place of the CPU."""
    dilation: float = 1.0
    """Seconds of the host that make one of the device's: it gets as much less of everything."""

    def step_kind(self, step: str) -> str | None:
        """The kind of `step` among what it does to its updates; None: it does not do that."""
        return next((one.params["kind"] for one in self.steps if one.name == step), None)

    @property
    def host_cpu(self) -> float:
        """Share of a core in the host's time. Raises ValueError where it has no cpu."""
        if self.cpu is None:
            raise ValueError(f"{self.name} has no cpu: it exists in virtual time only")
        return self.cpu / self.dilation

    @property
    def host_link(self) -> AccessLink | None:
        """The link as the host has to make it."""
        return None if self.link is None else AccessLink(**dilated(asdict(self.link), self.dilation))

    @property
    def host_access(self) -> SharedLink | None:
        """As the host has to make it."""
        return None if self.access is None else SharedLink(**dilated(asdict(self.access), self.dilation))

    @property
    def end_to_end(self) -> AccessLink | None:
        """The whole path from device to server as the run begins, for a device alone on it; None: it is
        not shaped."""
        return None if self.direct else (self.link or AccessLink()).limited_by(self.access)

    @property
    def host_end_to_end(self) -> AccessLink | None:
        """The same as the host has to make it."""
        return None if self.direct else (self.host_link or AccessLink()).limited_by(self.host_access)

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
        return min(max(10_000, round(least / self.host_cpu)), 1_000_000)

    @property
    def quota(self) -> int:
        """CFS quota in µs per period."""
        return round(self.host_cpu * self.period)

    @property
    def weight(self) -> int:
        """CPU weight against other devices that want a core at once: as the shares are, so that a
        period's quota is met also where another's slice is as long as the period."""
        return min(max(2, round(_SHARES_OF_A_CORE * self.host_cpu)), _MAX_SHARES)

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
            f"timing {told_duration(self.timing)}" if self.timing is not None else "",
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
    hints: tuple[str, ...] = ()
    """Sentences on words of the version before this one in the files of traces."""
    notes: tuple[str, ...] = ()
    """Sentences on what of the devices' profiles is emulated in another way, or not at all."""
    nodes: tuple[PlannedNode, ...] = ()
    """The machines, where there are several: this one first."""
    placement: Mapping[str, str] = field(default_factory=dict)
    """Id of each device's node, where there are several."""
    aggregator_memory: int | None = None
    """Bytes that the aggregator's container may take (`memory.left`); None: in virtual time."""
    cpu_notes: tuple[str, ...] = ()
    """Sentences on how the CPU shares of profiles were found."""
    profiles: Profiles = field(default_factory=Profiles)
    """The device profiles and link classes that were used."""
    measured: Measured = field(default_factory=Measured)
    """What was measured for the plan: on this host, or when the run that it repeats was made."""
    virtual: Virtual = field(default_factory=Virtual)
    """What virtual time takes as given: the topology's, else as measured; None: to be measured."""
    routed: bool = False
    """Whether devices reach the broker through a router: any of them has a link, or will, or they are on
    several machines, each with a router of its own."""
    absent: frozenset[str] = frozenset()
    """Devices that join later."""

    @property
    def cpus(self) -> set[int]:
        """Numbers of the CPUs of broker, aggregator and devices."""
        return cpu_numbers(self.infrastructure_cpus) | cpu_numbers(self.device_cpus)

    @property
    def aggregator_cpus(self) -> str:
        """cpuset of the aggregator, evaluations included."""
        return ",".join(filter(None, (self.infrastructure_cpus, self.evaluation_cpus)))

    @property
    def compromises(self) -> tuple[str, ...]:
        """Sentences on what a host with more cores would do without."""
        shares = self.device_cpus != "" and self.device_cpus == self.infrastructure_cpus
        return (
            *(("Broker and aggregator share the only core with the devices",) if shares else ()),
            *((f"One second of device time takes {self.dilation:g} s",) if self.dilation != 1 else ()),
        )

    def node_of(self, device: str) -> PlannedNode | None:
        """The machine that `device` is on, where there are several."""
        return next((node for node in self.nodes if node.id == self.placement[device]), None)

    @property
    def measures_steps(self) -> bool:
        """Whether virtual time has to measure what a step takes here: it stands for containers then."""
        shares = any(device.cpu is not None and device.gflops is None for device in self.devices)
        return shares and self.virtual.step_time is None

    @property
    def packets(self) -> bool:
        """Whether transfers in virtual time are in packets, as on emulated links."""
        return self.measures_steps if self.virtual.packets is None else self.virtual.packets

    def with_measured(self, virtual: Virtual) -> Plan:
        """With costs that were measured."""
        return replace(self, virtual=virtual, measured=Measured(cpu=self.measured.cpu, virtual=virtual))

    @property
    def netem(self) -> bool:
        """Whether devices make delay, jitter and loss themselves."""
        return self.shaper is not None and self.shaper.netem

    @property
    def probed(self) -> frozenset[str]:
        """Devices that measure their link before the run clock starts."""
        if not self.traits.devices_probe:
            return frozenset()
        return frozenset(device.name for device in self.devices if not device.direct)

    @property
    def shared_gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that devices share by MPS's limits."""
        gpus = [device.gpu for device in self.devices if device.gpu is not None]
        return tuple(dict.fromkeys(gpu.uuid for gpu in gpus if gpu.limited))

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


def dilated(changes: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    """Fields of a link in device time, as the host has to make them."""
    made = in_host_time(changes, dilation)
    for name in ("up", "down"):
        if made.get(name) is not None:
            made[name] = max(_MIN_RATE_BITS_PER_SECOND, round(made[name]))
    return made


def told_duration(duration: DrawnDuration | None) -> str | None:
    """`200ms`, or the name of the distribution."""
    if duration is None:
        return None
    if duration.distribution == "constant":
        return format_duration(duration.params["value"])
    return duration.distribution
