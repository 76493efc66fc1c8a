"""The plan: devices with quotas and limits, on the cores of one host or of several, and the actions on
them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agents.config import OUTAGE_RATE, AccessLink, DrawnDuration, LocalTraining, Named, Segment
from agents.energy import EnergyConfig
from agents.timing.clock import in_host_time
from testbed.host.cpus import cpu_numbers
from testbed.plan import feasibility
from testbed.plan.machines import Measurements, PlannedNode, Shaper
from testbed.topology import Topology, Virtual, link_traces, scenario
from testbed.topology.fields import Thermal
from testbed.topology.link_traces import LinkSeries
from testbed.topology.profiles import Profiles
from testbed.topology.scenario import Heat, Step, timeline
from testbed.topology.units import format_duration
from testbed.traits import Traits, traits

if TYPE_CHECKING:
    from testbed.gpu.planned import PlannedGpu

SHARES_OF_A_PROCESS, _SHARES_OF_A_CORE, _MAX_SHARES = 1024, 10_000, 262_144
"""CPU weights on the scale of container engines: weight of a single process, weight of a device with a
whole core among the devices of its run, and the kernel's maximum."""
DEVICES_WEIGHT = 50.0
"""CPU weight that all devices of a run have together on a core, relative to the weight of a single
process of the host."""
_MIN_SLICE_MICROSECONDS = 5_000
"""Shortest slice of work in µs. Each slice begins with cold caches, and filling the caches takes a part
of the slice."""
_MIN_RATE_BITS_PER_SECOND = 8
"""Lowest rate in bit/s: the kernel counts in bytes per second."""


def weight_alone(weight: int) -> int:
    """Return the device's part of the weight that its run's control group would have. `weight`: the
    device's weight among the devices of the run."""
    return min(_MAX_SHARES, round(weight * DEVICES_WEIGHT * SHARES_OF_A_PROCESS / _SHARES_OF_A_CORE))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfers:
    download: DrawnDuration | None = None
    """Time from the sending of a model to its arrival; None if it takes no time. `upload`: of an
    update."""
    upload: DrawnDuration | None = None
    model_bytes: int | None = None
    """Size of the model in bytes that `download` refers to; None if the size has no influence.
    `update_bytes`: that of `upload`."""
    update_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RealLimits:
    cpu: float | None = None
    """In cores of the device; None if its CPU is not limited."""
    link: AccessLink | None = None
    """None if the device keeps its own."""

    @property
    def needs_netem(self) -> bool:
        """Whether the link has delay, jitter or loss, which take the device's own netem."""
        link = self.link
        return link is not None and bool(link.rtt or link.jitter or link.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """Every value that the host needs to emulate one device."""

    name: str
    group: str
    cpu: float | None
    """CPU share in device time, in cores; None only in virtual time, and for a real device."""
    memory: int
    """Limit in bytes; 0 for a real device, which has none."""
    local: LocalTraining
    cores: str = ""
    """cpuset, such as `1-3`; empty in virtual time."""
    core_speed: float = 1.0
    """Relative to a core of this host."""
    link: AccessLink | None = None
    """At the start of the run; None if the device has no link of its own."""
    trace: tuple[LinkSeries, ...] = ()
    """Changes of `link` during the run."""
    path: tuple[Segment, ...] = ()
    """Shared segments, from the device's own one to the root."""
    transfers: PlannedTransfers | None = None
    """In place of a link; None if a link or nothing gives them."""
    think: DrawnDuration | None = None
    """Pause after each update."""
    timing: DrawnDuration | None = None
    """Minimum duration of a training, measured from the moment when the training could begin. It has to
    be divided by `speed`."""
    gflops: float | None = None
    """Speed in 1e9 operations per second. It has to be multiplied by `speed`."""
    speed: float = 1.0
    """Factor that was drawn for this device."""
    steps: tuple[Named, ...] = ()
    """The device's own pipeline steps, in addition to the steps that all devices have."""
    power: Mapping[str, float] | None = None
    """State of the device -> power draw in watts."""
    energy: EnergyConfig | None = None
    """None if the device's energy is not counted."""
    thermal: Thermal | None = None
    """None if heat has no effect."""
    gpu: PlannedGpu | None = None
    """None if the device trains on the CPU."""
    origin: str | None = None
    """Source of the keys of a drawn device, such as `survey.csv:7`."""
    host: str | None = None
    """SSH destination of a real device; None for an emulated device."""
    python: str | None = None
    """Python interpreter on the real device; None for a virtual environment that is made there."""
    container: str | None = None
    """Container engine in which the client of a real device runs; None for a process of the SSH
    user."""
    shape: RealLimits | None = None
    dilation: float = 1.0
    """Host seconds per second of device time. All rates of the device are divided by the dilation."""

    def step_kind(self, step: str) -> str | None:
        """Return the parameter `kind` of the device's own pipeline step `step`."""
        return next((one.params["kind"] for one in self.steps if one.name == step), None)

    @property
    def as_shaped(self) -> PlannedDevice:
        """The device with the limits of `shape` as `cpu` and `link`, which are None for a real device
        because they take nothing of the emulating hosts."""
        shape = self.shape
        return self if shape is None else replace(self, cpu=shape.cpu, link=shape.link)

    @property
    def host_cpu(self) -> float:
        """Cores. Raises ValueError if the device has no CPU share."""
        if self.cpu is None:
            raise ValueError(f"{self.name} has no cpu: it exists in virtual time only")
        return self.cpu / self.dilation

    @property
    def host_link(self) -> AccessLink | None:
        return (
            None if self.link is None else AccessLink(**to_host_time(asdict(self.link), self.dilation))
        )

    @property
    def segment(self) -> str | None:
        """Segment that the device is attached to."""
        return self.path[0].name if self.path else None

    @property
    def host_path(self) -> tuple[Segment, ...]:
        return tuple(segment_in_host_time(one, self.dilation) for one in self.path)

    @property
    def end_to_end(self) -> AccessLink | None:
        """The whole path between device and server at the start of the run, as if no other device used
        it. None if the path is not shaped."""
        return None if self.is_direct else (self.link or AccessLink()).through(self.path)

    @property
    def host_probed(self) -> AccessLink | None:
        """Link to measure before the run clock starts, in the host's time: the rates of the device's own
        link, and delay, jitter and loss of the whole path. None if the path is not shaped."""
        return None if self.is_direct else (self.host_link or AccessLink()).delayed_by(self.host_path)

    @property
    def is_direct(self) -> bool:
        return self.link is None and not self.path

    @property
    def period(self) -> int:
        """CFS period in µs, from 10 ms to 1 s (the kernel's maximum). The period is longer than 10 ms if
        a slice would otherwise be too short.

        In stretched time the pauses between slices are longer, so caches are colder. The minimum slice
        is therefore longer, too, so that a CPU second does the same work. `make dilation` measures the
        effect.
        """
        least = _MIN_SLICE_MICROSECONDS * math.sqrt(self.dilation)
        return min(max(10_000, round(least / self.host_cpu)), 1_000_000)

    @property
    def quota(self) -> int:
        """CFS quota in µs per period."""
        return round(self.host_cpu * self.period)

    @property
    def weight(self) -> int:
        """CPU weight among devices that compete for the same core, in proportion to the CPU share.

        With these weights, a device gets its quota in each period even if another device's slice is as
        long as the period.
        """
        return min(max(2, round(_SHARES_OF_A_CORE * self.host_cpu)), _MAX_SHARES)

    @property
    def threads(self) -> int:
        """Torch threads; 0 for torch's own choice, on a real device without CPU quota. Threads beyond
        the number of cores in the quota would only wait."""
        return 0 if self.host is not None and self.cpu is None else max(1, -(-self.quota // self.period))

    @property
    def profile(self) -> str:
        """Text such as `0.25 cpu, 512 MiB` or `10 gflops`."""
        facts = (
            f"{self.cpu:g} cpu" if self.cpu is not None else "",
            f"{self.memory / 2**20:g} MiB" if self.cpu is not None and self.memory else "",
            f"{self.gflops:g} gflops" if self.gflops is not None else "",
            f"timing {duration_text(self.timing)}" if self.timing is not None else "",
            f"real, {self.host}" if self.host is not None else "",
        )
        return ", ".join(filter(None, facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a run will launch. In virtual time, a run launches nothing, and the plan assigns
    no cores."""

    runtime: str
    devices: tuple[PlannedDevice, ...]
    """In the topology's order."""
    segments: Mapping[str, Segment] = field(default_factory=dict)
    """In device time. A parent comes before its children."""
    infrastructure_cpus: str = ""
    """cpuset of broker and aggregator, such as `0-1`."""
    device_cpus: str = ""
    evaluation_cpus: str = ""
    """Empty if evaluations use the aggregator's CPUs."""
    device_capacity: float = 0.0
    """Cores that all devices together can have."""
    dilation: float = 1.0
    """Host seconds per second of device time."""
    shaper: Shaper | None = None
    """None if no device has a link."""
    server: tuple[str, int] | None = None
    """Address and port of this host at which real devices reach the broker; None without real
    devices."""
    is_oversubscribed: bool = False
    """Whether the devices may request more than `device_capacity`."""
    notes: tuple[str, ...] = ()
    """Sentences on properties of devices that are emulated differently, or not at all."""
    nodes: tuple[PlannedNode, ...] = ()
    """This machine first; empty if the runtime uses one machine."""
    placement: Mapping[str, str] = field(default_factory=dict)
    """Emulated device -> node's id; empty if the runtime uses one machine."""
    aggregator_memory: int | None = None
    """Limit in bytes (`memory.aggregator_limit`); None in virtual time."""
    cpu_notes: tuple[str, ...] = ()
    profiles: Profiles = field(default_factory=Profiles)
    measured: Measurements = field(default_factory=Measurements)
    """Made on this host, or by the earlier run that this run repeats."""
    virtual: Virtual = field(default_factory=Virtual)
    """Costs, given by the topology or measured. A cost is None until it is measured."""
    is_routed: bool = False
    """Whether devices reach the broker through a router: if any device has a link or gets one later, or
    if there are several machines."""
    absent: frozenset[str] = frozenset()
    """Devices that join during the run."""

    @property
    def devices_below(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {name: [] for name in self.segments}
        for device in self.devices:
            for segment in device.path:
                found[segment.name].append(device.name)
        return found

    @property
    def emulated_devices(self) -> tuple[PlannedDevice, ...]:
        return tuple(device for device in self.devices if device.host is None)

    @property
    def real_devices(self) -> tuple[PlannedDevice, ...]:
        return tuple(device for device in self.devices if device.host is not None)

    @property
    def cpus(self) -> set[int]:
        """CPUs of broker, aggregator and devices."""
        return cpu_numbers(self.infrastructure_cpus) | cpu_numbers(self.device_cpus)

    @property
    def aggregator_cpus(self) -> str:
        """With those of evaluations."""
        return ",".join(filter(None, (self.infrastructure_cpus, self.evaluation_cpus)))

    @property
    def compromises(self) -> tuple[str, ...]:
        """Sentences on what a host with more cores would not need."""
        shares = self.device_cpus != "" and self.device_cpus == self.infrastructure_cpus
        return (
            *(("Broker and aggregator share the only core with the devices",) if shares else ()),
            *((f"One second of device time takes {self.dilation:g} s",) if self.dilation != 1 else ()),
        )

    def node_of(self, device: str) -> PlannedNode | None:
        """None if the runtime uses one machine."""
        return next((node for node in self.nodes if node.id == self.placement.get(device)), None)

    @property
    def measures_steps(self) -> bool:
        """Whether the time of a step has to be measured on this host for virtual time."""
        shares = any(device.cpu is not None and device.gflops is None for device in self.devices)
        return shares and self.virtual.step_time is None

    @property
    def simulates_packets(self) -> bool:
        """Whether virtual time simulates transfers packet by packet, as on emulated links."""
        return self.measures_steps if self.virtual.packets is None else self.virtual.packets

    def with_measurements(self, virtual: Virtual) -> Plan:
        return replace(
            self, virtual=virtual, measured=Measurements(cpu=self.measured.cpu, virtual=virtual)
        )

    @property
    def uses_netem(self) -> bool:
        """Whether devices emulate delay, jitter and loss themselves, by netem."""
        return self.shaper is not None and self.shaper.is_netem

    @property
    def probed_devices(self) -> frozenset[str]:
        """Devices that measure their link before the run clock starts."""
        if not self.traits.devices_probe:
            return frozenset()
        return frozenset(device.name for device in self.devices if not device.is_direct)

    @property
    def shared_gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs on which MPS limits the devices' parts."""
        gpus = [device.gpu for device in self.devices if device.gpu is not None]
        return tuple(dict.fromkeys(gpu.uuid for gpu in gpus if gpu.limited))

    @property
    def traits(self) -> Traits:
        return traits(self.runtime)

    def too_much(self, shares: Iterable[float]) -> str | None:
        """`shares`: in device time."""
        if self.is_oversubscribed:
            return None
        return feasibility.too_much(shares, self.device_capacity * self.dilation)

    def too_little(self, cpu: float) -> str | None:
        """`cpu`: cores in device time."""
        return feasibility.too_little(cpu, self.dilation) if self.traits.cgroups else None


def segment_in_host_time(segment: Segment, dilation: float) -> Segment:
    """The segment's background traffic stays in device time."""
    fields = ("up", "down", "rtt", "jitter")
    return segment.with_changes(
        to_host_time({name: getattr(segment, name) for name in fields}, dilation)
    )


def to_host_time(changes: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    made = in_host_time(changes, dilation)
    for name in ("up", "down"):
        if made.get(name) is not None:
            made[name] = max(_MIN_RATE_BITS_PER_SECOND, round(made[name]))
    return made


def duration_text(duration: DrawnDuration | None) -> str | None:
    """Return `200ms`, or the name of the duration's distribution."""
    if duration is None:
        return None
    if duration.distribution == "constant":
        return format_duration(duration.params["value"])
    return duration.distribution


def action_steps(topology: Topology, plan: Plan) -> Iterator[Step]:
    """Yield the steps in the order of their times."""
    heat = {
        device.name: Heat(device.cpu, device.thermal)
        for device in plan.devices
        if device.cpu is not None and device.thermal is not None
    }
    played = timeline(topology.scenario, topology.churn, topology.devices, topology.seed, heat=heat)
    traced = [link_traces.steps(device.name, device.trace) for device in plan.devices if device.trace]
    return heapq.merge(played, *traced, key=lambda step: step.at)


def has_action_steps(topology: Topology, plan: Plan) -> bool:
    return next(action_steps(topology, plan), None) is not None


def lowest_rates(topology: Topology, plan: Plan) -> dict[str, float]:
    """Return the lowest planned rate of each device's path during the run, in bit/s; infinite if the
    path is never limited. Outages do not count.

    A user may set a lower rate during the run (`testbed set`).
    """
    rates: dict[str, list[float | None]] = {
        device.name: [
            *(
                rate
                for link in (device.as_shaped.link, *device.path)
                if link is not None
                for rate in (link.up, link.down)
            ),
            *(
                rate
                for trace in device.trace
                for way in ("up", "down")
                for rate in trace.columns.get(way, ())
            ),
        ]
        for device in plan.devices
    }
    by_group = scenario.devices_by_group(topology.devices)
    below = plan.devices_below
    for entry in topology.scenario:
        if entry.link is not None:
            for target in scenario.expand(entry.targets, by_group):
                for name in below.get(target, (target,)):
                    rates[name] += [entry.link.changes.get(way) for way in ("up", "down")]
    return {
        name: min((rate for rate in found if rate and rate >= OUTAGE_RATE), default=math.inf)
        for name, found in rates.items()
    }
