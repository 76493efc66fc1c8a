"""Key `network` of a topology: the shared links between devices and server, and other people's traffic
on them.

A device group names the segment that its devices are attached to. Its key `access` is a segment without
a parent and without further properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from agents import config
from agents.config import WAYS, Background, DrawnDuration, Segment, Way
from agents.links import background
from agents.timing.durations import DISTRIBUTIONS
from testbed.topology import units
from testbed.topology.fields import (
    Duration,
    Frequency,
    Model,
    Name,
    OneOf,
    OrConstant,
    Rate,
    Seconds,
    Share,
    Size,
    Variant,
    expecting,
    optional,
)
from testbed.topology.links import LinkTrace
from testbed.topology.validation_errors import did_you_mean
from testbed.topology.yamlfile import Where

if TYPE_CHECKING:  # they import this module
    from testbed.topology.devices import DeviceGroup
    from testbed.topology.link_traces import LinkSeries
    from testbed.topology.schema import Topology

PACKET_BYTES = 1514
_MAX_DEPTH = 16
"""Segments on the path of a device."""
_PACKETS = " packets"


def _queue(value: Any) -> Any:
    """Read `64kB` or `100 packets` as bytes."""
    if isinstance(value, str) and value.endswith(_PACKETS):
        count = value.removesuffix(_PACKETS)
        if not (count.isascii() and count.isdigit()):
            raise ValueError(f"found {value!r}, expected a size such as 64kB or 100 packets")
        return int(count) * PACKET_BYTES
    return value if isinstance(value, int) and not isinstance(value, bool) else units.size(value)


def _load(value: str) -> str:
    """Accept a rate, or a share of the segment's rate."""
    if value.endswith("%"):
        share = units.share(value)
        if not 0 < share <= 1:
            raise ValueError(f"found {value}, expected a share above 0%, such as 50%")
    else:
        units.rate(value)
    return value


Load = Annotated[
    str,
    AfterValidator(_load),
    WithJsonSchema({"type": "string", "examples": ["2mbit", "50%"]}),
    expecting("a rate such as 2mbit, or a share of the segment's rate such as 50%"),
]


class _TransferSize(Variant):
    """Distribution of the size of a transfer."""

    tag: ClassVar[str] = "distribution"
    seconds: ClassVar[Any] = Size
    distribution: str

    def plain(self) -> DrawnDuration:
        return DrawnDuration(self.distribution, self.params)


TransferSize = Annotated[
    _TransferSize,
    OneOf({name: cls for name, cls in DISTRIBUTIONS.items() if name != "trace"}),
    OrConstant(
        (str,),
        {"type": "string", "examples": ["100kB"]},
        "a size such as 100kB, or a distribution such as {distribution: exponential, mean: 100kB}",
    ),
]


class _Loaded(Model):
    """Traffic with a rate in at least one direction."""

    up: Load | None = optional("Rate from the devices to the server, or share of the segment's rate")
    down: Load | None = optional("Rate from the server to the devices, or share of the segment's rate")

    @model_validator(mode="after")
    def _has_direction(self) -> Self:
        if self.up is None and self.down is None:
            raise ValueError("found neither up nor down, expected a rate such as down: 50%")
        return self

    def problem(self, rates: Mapping[Way, int | None]) -> str | None:
        for way in WAYS:
            load = getattr(self, way)
            if load is not None and load.endswith("%") and rates[way] is None:
                return f"{way} is a share of a rate, but the segment has none: add {way} to the segment"
        return None

    def rate(self, way: Way, rates: Mapping[Way, int | None]) -> float | None:
        """bit/s; None if there is no traffic in this direction. `rates`: of the segment."""
        load: str | None = getattr(self, way)
        if load is None:
            return None
        return units.share(load) * (rates[way] or 0) if load.endswith("%") else float(units.rate(load))


class ConstantTraffic(_Loaded):
    """Traffic at a constant rate. It does not react to congestion."""

    kind: Literal["constant"]

    def params(
        self, way: Way, rates: Mapping[Way, int | None], _: Sequence[LinkSeries]
    ) -> dict[str, Any] | None:
        rate = self.rate(way, rates)
        return None if rate is None else {"rate": rate}


class OnOffTraffic(_Loaded):
    """Traffic at a constant rate during on periods, and none during off periods. The first period is
    off. The traffic does not react to congestion."""

    kind: Literal["on_off"]
    on: Duration = Field(description="Duration of an on period")
    off: Duration = Field(description="Duration of an off period")

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        background.OnOff(1.0, self.on.plain(), self.off.plain())
        return self

    def params(
        self, way: Way, rates: Mapping[Way, int | None], _: Sequence[LinkSeries]
    ) -> dict[str, Any] | None:
        rate = self.rate(way, rates)
        if rate is None:
            return None
        return {"rate": rate, "on": self.on.plain(), "off": self.off.plain()}


class TracedTraffic(LinkTrace):
    """Traffic whose rate follows files. It does not react to congestion. Paths are relative to the
    topology file. csv: a CSV file with a column time (s) and any of up and down (bit/s); up, down:
    mahimahi trace files."""

    kind: Literal["trace"]

    def problem(self, _: Mapping[Way, int | None]) -> str | None:
        return None

    def params(
        self, way: Way, _: Mapping[Way, int | None], traces: Sequence[LinkSeries]
    ) -> dict[str, Any] | None:
        for trace in traces:
            if (column := trace.columns.get(way)) is not None:
                return {
                    "times": list(trace.times),
                    "rates_at": list(column),
                    "period": trace.period,
                }
        return None


class FlowTraffic(Model):
    """Transfers that arrive at random (Poisson). Each one shares the segment with the devices, as TCP
    does in containers."""

    kind: Literal["flows"]
    up: Frequency | None = optional("Mean number of uploads that begin per time, such as 2/s")
    down: Frequency | None = optional("Mean number of downloads that begin per time, such as 2/s")
    size: TransferSize = Field(description="Size of a transfer")

    @model_validator(mode="after")
    def _has_direction(self) -> Self:
        if self.up is None and self.down is None:
            raise ValueError("found neither up nor down, expected arrivals such as down: 2/s")
        for arrivals in (self.up, self.down):
            if arrivals is not None:
                background.Flows(arrivals, self.size.plain())
        return self

    def problem(self, rates: Mapping[Way, int | None]) -> str | None:
        for way in WAYS:
            arrivals, rate = getattr(self, way), rates[way]
            if arrivals is None:
                continue
            if rate is None:
                return f"the segment has no rate that its transfers could share: add {way} to it"
            load = background.Flows(arrivals, self.size.plain()).mean_rate
            if load >= rate:
                return (
                    f"{way} brings {units.format_rate(round(load)) if load < 1e15 else 'unlimited'} on "
                    f"average, which the segment's {units.format_rate(rate)} never carry: use fewer or "
                    "smaller transfers"
                )
        return None

    def params(
        self, way: Way, _: Mapping[Way, int | None], __: Sequence[LinkSeries]
    ) -> dict[str, Any] | None:
        arrivals = getattr(self, way)
        return None if arrivals is None else {"arrivals": arrivals, "size": self.size.plain()}


BackgroundSettings = Annotated[
    ConstantTraffic | OnOffTraffic | TracedTraffic | FlowTraffic, Field(discriminator="kind")
]


class _TotalRates(Model):
    up: Rate | None = optional("Total rate from the devices to the server. Default: unlimited")
    down: Rate | None = optional("Total rate from the server to the devices. Default: unlimited")


class SegmentSettings(_TotalRates):
    """A link that several devices share, such as a cell, a home's uplink or a backhaul."""

    parent: Name | None = optional(
        "Segment that comes next on the way to the server. Default: the server comes next"
    )
    rtt: Seconds = optional("Round-trip time that the segment adds, half in each direction", 0.0)
    jitter: Seconds = optional(
        "Maximum deviation of the delay in each direction. Deviations are uniform", 0.0
    )
    loss: Share = optional("Share of packets lost, in each direction", 0.0)
    queue: (
        Annotated[
            int,
            BeforeValidator(_queue),
            Field(ge=PACKET_BYTES),
            PlainSerializer(units.format_size),
            WithJsonSchema({"type": "string", "examples": ["64kB", "100 packets"]}),
            expecting("a size of at least one packet (1514 bytes), such as 64kB or 100 packets"),
        ]
        | None
    ) = optional(
        "Length of the queue in each direction, in bytes or packets. Default: 200 ms of the rate. "
        "Without effect in virtual time"
    )
    background: tuple[BackgroundSettings, ...] = optional(
        "Other people's traffic on the segment. Default: none", ()
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.jitter > self.rtt / 2:
            raise ValueError("jitter exceeds the delay of one direction, rtt/2: lower it, or raise rtt")
        if self.loss >= 1:
            raise ValueError("loss is 100%, so nothing ever passes: lower it, or cut the segment in the "
                             "scenario")  # fmt: skip
        for number, traffic in enumerate(self.background):
            if problem := traffic.problem(self.rates):
                raise ValueError(f"background entry {number + 1}: {problem}")
        return self

    @property
    def rates(self) -> dict[Way, int | None]:
        """bit/s; None if the direction is not limited."""
        return {"up": self.up, "down": self.down}

    def plain(self, name: str, series: Callable[[TracedTraffic], Sequence[LinkSeries]]) -> Segment:
        """In device time. `series`: returns the content of the files of traced traffic."""
        found = [
            Background(number, way, traffic.kind, params)
            for number, traffic in enumerate(self.background)
            for way in WAYS
            if (
                params := traffic.params(
                    way,
                    self.rates,
                    series(traffic) if isinstance(traffic, TracedTraffic) else (),
                )
            )
            is not None
        ]
        return Segment(
            name,
            self.parent,
            self.up,
            self.down,
            self.rtt,
            self.jitter,
            self.loss,
            self.queue,
            tuple(found),
        )


class AccessSettings(_TotalRates):
    """Link that is shared by all devices whose groups name it, such as a Wi-Fi cell. Short form of a
    segment without a parent (key `network`). Needs up, down, or both."""

    name: Name

    @model_validator(mode="after")
    def _has_rate(self) -> Self:
        if self.up is None and self.down is None:
            raise ValueError("found neither up nor down, expected a rate such as down: 50mbit")
        return self


class SegmentKeys(Model):
    access: AccessSettings | None = optional(
        "Link shared with all devices whose group has an access of the same name"
    )
    segment: Name | None = optional(
        "Segment of `network` that the devices are attached to. Default: none, each device has a path "
        "of its own to the server",
        hidden=True,
    )

    @property
    def segment_name(self) -> str | None:
        """Segment of the devices, which may come from `access`."""
        return self.segment if self.access is None else self.access.name


def all_segments(
    network: Mapping[str, SegmentSettings], groups: Sequence[DeviceGroup]
) -> dict[str, SegmentSettings]:
    """From the key `network` and the groups' `access`. A parent comes before its children. The parents
    must exist, and form no cycle."""
    found: dict[str, SegmentSettings] = {}

    def add(name: str) -> None:
        if name not in found:
            if (parent := network[name].parent) is not None:
                add(parent)
            found[name] = network[name]

    for name in network:
        add(name)
    for group in groups:
        if group.access is not None and group.access.name not in found:
            access = group.access
            # Without validation, which was done for `access`, and which expects texts.
            found[access.name] = SegmentSettings.model_construct(up=access.up, down=access.down)
    return found


def problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    network, groups = topology.network, topology.devices
    for name, segment in network.items():
        where: Where = ("network", name, "parent")
        parent = segment.parent
        if parent is not None and parent not in network:
            yield where, f"found {parent!r}, {_expected(parent, network)}"
            continue
        above = _ancestors(name, network)
        if name in above:
            path = " → ".join((name, *above[: above.index(name) + 1]))
            yield where, f"the segments form a cycle ({path}): one of them needs no parent"
        elif len(above) >= _MAX_DEPTH:
            yield where, f"is level {len(above) + 1} of the tree, expected at most {_MAX_DEPTH} levels"
    rates: dict[str, tuple[int | None, int | None]] = {}
    devices = {name for group in groups for name in (group.group_name, *group.device_names)}
    for name in network:
        if name in devices:
            yield (
                ("network", name),
                f"{name} is the name of a device or group, too: rename one of the two",
            )
    for index, group in enumerate(groups):
        if group.segment is not None and group.segment not in network:
            yield (
                ("devices", index, "segment"),
                f"found {group.segment!r}, {_expected(group.segment, network)}",
            )
        if group.transfers is not None and group.segment_name is not None:
            yield (
                ("devices", index, "access" if group.segment is None else "segment"),
                "has no effect beside transfers, which are whole durations: remove one of the two",
            )
        if (access := group.access) is None:
            continue
        where = ("devices", index, "access")
        if group.segment is not None:
            yield where, "access and segment cannot be combined: keep segment"
        elif access.name in network:
            yield (
                where,
                f"{access.name} is a segment of network: write segment: {access.name} instead of access",
            )
        elif rates.setdefault(access.name, (access.up, access.down)) != (access.up, access.down):
            yield (
                where,
                f"{access.name} has other rates in an earlier group: use the same rates, or another "
                "name",
            )


def notes(topology_segments: Mapping[str, Segment], used: frozenset[str]) -> Iterator[str]:
    """Look for segments that nobody uses, that are faster than a segment above them, or that background
    traffic of a given rate can fill. `used`: names of the segments on the devices' paths."""
    for name, segment in topology_segments.items():
        if name not in used:
            yield f"No device uses the segment {name}"
        for way in WAYS:
            if (own := segment.rate(way)) is None:
                continue
            limited = [
                (most, one.name)
                for one in config.path_of(segment.parent, topology_segments)
                if (most := one.rate(way)) is not None
            ]
            if limited and own > min(limited)[0]:
                most, above = min(limited)
                yield (
                    f"Segment {name} has {way} {units.format_rate(own)}, more than the "
                    f"{units.format_rate(most)} of {above} above it"
                )
            others = sum(one.params.get("rate", 0) for one in segment.background if one.way == way)
            if others >= own:
                yield (
                    f"Background traffic of segment {name} can take all of its {way} "
                    f"{units.format_rate(own)}: devices get nothing meanwhile"
                )


def _ancestors(name: str, network: Mapping[str, SegmentSettings]) -> list[str]:
    """From the nearest on. A cycle ends the list at the first repetition."""
    found: list[str] = []
    parent = network[name].parent
    while parent is not None and parent in network and parent not in found:
        found.append(parent)
        parent = network[parent].parent
    return found


def _expected(name: str, network: Mapping[str, SegmentSettings]) -> str:
    if not network:
        return "but the topology has no segments: add network, such as network: {cell: {down: 10mbit}}"
    guess = did_you_mean(name, list(network))
    return "expected a segment of network" + (
        f"; {guess}" if guess else f" such as {next(iter(network))}"
    )


def to_segments(
    found: Mapping[str, SegmentSettings],
    series: Callable[[TracedTraffic], Sequence[LinkSeries]],
) -> dict[str, config.Segment]:
    """In device time, in the order of `found`."""
    return {name: one.plain(name, series) for name, one in found.items()}
