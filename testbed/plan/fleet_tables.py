"""Distribution of a drawn fleet's figures: quantiles, counts and histograms, for `testbed plan`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.config import AccessLink
from agents.energy.settings import BatteryConfig
from testbed.plan.planned_devices import Plan, PlannedDevice
from testbed.topology import Topology
from testbed.topology.availability import Availability
from testbed.topology.devices import DeviceGroup
from testbed.topology.units import format_rate, format_size

_BINS = 24
_LEAST_RATIO = 20.0
"""Ratio of the largest to the smallest value from which a histogram has a logarithmic scale."""
_BARS = " ▁▂▃▄▅▆▇█"
_MAX_NAMES = 12
"""Maximum number of names of a key that are listed; the rarer ones are counted together."""


@dataclass(frozen=True, slots=True)
class KeyDistribution:
    """Values of one key, such as `cpu` or `link.up`, of a group's drawn devices."""

    group: str
    key: str
    values: tuple[float, ...]
    """Sorted, in the unit that `text` expects."""
    text: Callable[[float], str]

    @property
    def is_logarithmic(self) -> bool:
        return self.values[0] > 0 and self.values[-1] > _LEAST_RATIO * self.values[0]

    @property
    def bars(self) -> tuple[int, ...]:
        """Number of devices per bar, from the smallest values to the largest."""
        values = np.asarray(self.values)
        if self.is_logarithmic:
            values = np.log(values)
        counts, _ = np.histogram(values, bins=_BINS)
        return tuple(counts.tolist())

    def quantile(self, share: float) -> str:
        """Format the least value that at least `share` of the devices do not exceed."""
        return self.text(self.values[max(0, math.ceil(share * len(self.values)) - 1)])


def key_distributions(topology: Topology, plan: Plan) -> list[KeyDistribution]:
    """Look at each number that differs among the drawn devices of a group."""
    found = []
    for group, members in _drawn(topology, plan):
        for key, (value, text) in _NUMBERS.items():
            values = sorted(one for pair in members if (one := value(*pair)) is not None)
            if values and values[0] < values[-1]:
                found.append(KeyDistribution(group, key, tuple(values), text))
    return found


def quantile_table(distributions: Sequence[KeyDistribution]) -> list[dict[str, Any]]:
    """Return one row per distribution, with a histogram of block characters."""
    return [
        {
            "group": one.group,
            "key": one.key,
            "devices": len(one.values),
            "least": one.quantile(0),
            "10 %": one.quantile(0.1),
            "median": one.quantile(0.5),
            "90 %": one.quantile(0.9),
            "most": one.quantile(1),
            "histogram": _as_blocks(one.bars) + (" (log)" if one.is_logarithmic else ""),
        }
        for one in distributions
    ]


def name_table(topology: Topology, plan: Plan) -> list[dict[str, Any]]:
    """Return one row per profile and per link class of a group, with the number of devices. Rare names
    share a row."""
    rows = []
    for group, members in _drawn(topology, plan):
        for key, name in _NAMES.items():
            counts = Counter(one for written, _ in members if (one := name(written)) is not None)
            named = counts.most_common()
            if len(named) > _MAX_NAMES:
                rest = named[_MAX_NAMES - 1 :]
                others = (f"{len(rest)} others", sum(count for _, count in rest))
                named = [*named[: _MAX_NAMES - 1], others]
            rows += [
                {
                    "group": group,
                    "key": key,
                    "value": value,
                    "devices": count,
                    "share": f"{count / len(members):.1%}",
                    "histogram": "█" * max(1, round(_BINS * count / named[0][1])),
                }
                for value, count in named
            ]
    return rows


def _drawn(
    topology: Topology, plan: Plan
) -> Iterator[tuple[str, list[tuple[DeviceGroup, PlannedDevice]]]]:
    planned = {device.name: device for device in plan.devices}
    drawn = (group for group in topology.devices if group.is_drawn)
    for name, members in itertools.groupby(drawn, lambda group: group.group_name):
        yield name, [(group, planned[group.name]) for group in members]


def _as_blocks(counts: Sequence[int]) -> str:
    most = max(counts)
    return "".join(_BARS[math.ceil((len(_BARS) - 1) * count / most)] for count in counts)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _duration(value: float) -> str:
    return f"{1000 * value:.3g}ms" if value < 1 else f"{float(f'{value:.3g}'):g}s"


def _rate(value: float) -> str:
    digits = 10 ** max(0, math.floor(math.log10(value)) - 2)
    return format_rate(round(value / digits) * digits)


def _link(device: PlannedDevice) -> AccessLink:
    return device.link or AccessLink()


def _battery(device: PlannedDevice) -> BatteryConfig | None:
    return None if device.energy is None else device.energy.battery


def _timing(device: PlannedDevice) -> float | None:
    timing = device.timing
    if timing is None or timing.distribution != "constant":
        return None
    return float(timing.params["value"]) / device.speed


def _connected(availability: Availability | None) -> float:
    """Share of the time. For a trace without `loop`, the time ends with the trace."""
    if availability is None:
        return 1.0
    if availability.trace is None:
        means = {
            state: 0.0 if one is None else one.build().expectation
            for state, one in (("on", availability.on), ("off", availability.off))
        }
        return 1.0 if math.isinf(means["on"]) else means["on"] / (means["on"] + means["off"])
    times = [at for at, _ in availability.trace]
    end = availability.loop or times[-1]
    if end == 0:
        return float(availability.trace[0][1] == "on")
    spans = zip(availability.trace, [*times[1:], end], strict=True)
    return math.fsum(until - at for (at, state), until in spans if state == "on") / end


_NUMBERS: dict[
    str, tuple[Callable[[DeviceGroup, PlannedDevice], float | None], Callable[[float], str]]
] = {
    "cpu": (lambda _, device: device.cpu, _number),
    "gflops": (lambda _, device: device.gflops, _number),
    "timing": (lambda _, device: _timing(device), _duration),
    "speed": (lambda _, device: device.speed, _number),
    "memory": (lambda _, device: float(device.memory), lambda value: format_size(round(value))),
    "link.up": (lambda _, device: _link(device).up, _rate),
    "link.down": (lambda _, device: _link(device).down, _rate),
    "link.rtt": (lambda _, device: _link(device).rtt, _duration),
    "link.jitter": (lambda _, device: _link(device).jitter, _duration),
    "link.loss": (lambda _, device: _link(device).loss, _number),
    "battery.capacity": (
        lambda _, device: None if (one := _battery(device)) is None else one.capacity,
        lambda value: f"{value / 3600:.3g}Wh",
    ),
    "battery.initial": (
        lambda _, device: None if (one := _battery(device)) is None else one.initial,
        lambda value: f"{value:.0%}",
    ),
    "connected": (lambda group, _: _connected(group.availability), lambda value: f"{value:.0%}"),
}
"""Key -> function that returns a device's value, if any; function that formats a value."""
_NAMES: dict[str, Callable[[DeviceGroup], str | None]] = {
    "profile": lambda group: group.profile,
    "link.class": lambda group: None if group.link is None else group.link.kind,
}
