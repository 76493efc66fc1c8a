"""Requested and measured figures of devices.

Times are in seconds, `at` is a device time. CPU shares are shares of one host core. Rates are in bit/s
on the wire.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.device.control_group import weights_of
from agents.disk import files
from agents.fields import NO_LIMIT
from agents.wire.messages import CgroupLimits
from testbed.fidelity.part import FeatureFigures
from testbed.host.cpus import cpu_numbers

FORMAT = 1
CPU, RATES, DELAYS = "cpu", ("up", "down"), ("rtt", "jitter", "loss")
"""Names of the figures, as in `fidelity.json`."""
ENOUGH_SECONDS = 3.0
"""Minimum measuring time of a CPU figure. A shorter one does not count against a run: within one second,
a single CFS period more or less changes the figure by some per cent."""
ENOUGH_DEMAND_SECONDS = 0.5
"""Minimum measuring time of the figure `demand`, in which the client ran or waited for a CPU. A shorter
one does not count against a run: the device cannot have lost more CPU time than that."""
_SPREAD = math.sqrt(2 / 3)
"""Standard deviation of the sum of two independent delays that are uniform from −1 to 1."""
_RTT_SLACK_SECONDS = 0.002
"""A throttled device answers late even if its link is fast."""
_UNREQUESTED_RTT_SECONDS = 0.01
"""Tolerance if no delay was requested, beside the time to send the probe."""
_ECHO_BITS = 1000
"""Upper bound for the size of a probe's echo on the wire, in bits."""
_LOSS_SLACK = 0.02
"""Tolerance for the share of lost round trips, beside random deviations."""
_CHANCE_SIGMAS = 4.0
"""Larger deviations from the expected value do not count as random."""
Interval = tuple[float, float]
"""Begin and end in seconds of device time."""


@dataclass(frozen=True, slots=True)
class RequestedCpu:
    share: float | None
    """Share of one core; None on a real device without a limit."""
    period: float | None = None
    """CFS period in seconds, as set in the kernel; None without a control group."""
    at: float = 0.0
    """Device time, in seconds, from which the request was in force: when the action that changed it was
    completed."""
    limits: RequestedLimits | None = None
    """None without a control group."""


@dataclass(frozen=True, slots=True)
class RequestedLink:
    """Link requested from `at` on. Delay, jitter and loss are per direction."""

    up: float | None = None
    """bit/s; None if not limited."""
    down: float | None = None
    """bit/s; None if not limited."""
    delay: float = 0.0
    """Seconds in one direction."""
    jitter: float = 0.0
    """Maximum deviation from `delay` in seconds, uniformly distributed."""
    loss: float = 0.0
    """Share of packets lost in one direction."""
    at: float = 0.0
    """Device time at which the link was set, in seconds."""

    def figures(self) -> dict[str, float | None]:
        """None if nothing was requested. Delay, jitter and loss are converted to values of round trips,
        because only these can be measured."""
        return {
            "up": self.up,
            "down": self.down,
            "rtt": 2 * self.delay or None,
            "jitter": _SPREAD * self.jitter or None,
            "loss": 1 - (1 - self.loss) ** 2 or None,
        }


@dataclass(frozen=True, slots=True)
class Requested:
    device: str
    group: str
    cpu: tuple[RequestedCpu, ...]
    """Requested CPU in the order of time; at least one."""
    link: tuple[RequestedLink, ...] = ()
    """Requested links in the order of time; empty if no link was requested."""
    away: tuple[Interval, ...] = ()
    """Intervals in which the device was frozen, down or starting: from the order, or the end of the
    client, until the device's CPU limit is in effect again."""
    node: str | None = None
    """None if there is only one node."""


@dataclass(frozen=True, slots=True)
class Carried:
    busy: float
    """Seconds in which packets waited."""
    share: float | None
    """Bytes that left the queue, divided by those that the rate allows in `busy`; None if packets never
    waited."""
    slow: tuple[float, float, float] | None = None
    """Worst period in which the link was too slow: begin and end in seconds of device time, and carried
    share of the rate. None if it was never too slow."""

    def as_dict(self) -> dict[str, Any]:
        figure = Figure(1.0, self.share)
        values = {"asked": 1.0, "got": self.share, "error": figure.error, "busy": self.busy}
        return {name: rounded(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Figure:
    requested: float | None = None
    got: float | None = None

    @property
    def error(self) -> float | None:
        """Percent of the requested value, positive if the device got more; None if one value is
        missing."""
        if not self.requested or self.got is None:
            return None
        return (self.got - self.requested) / self.requested * 100

    @property
    def distance(self) -> float:
        """Absolute error in percent, as a sort key; −1 without an error."""
        return -1.0 if self.error is None else abs(self.error)


@dataclass(frozen=True, slots=True)
class DeviceFidelity:
    device: str
    group: str
    figures: Mapping[str, Figure]
    """Figures by name: `cpu` (CPU share), `up` and `down` (rates), `rtt` (round-trip time), `jitter`
    (standard deviation of round-trip times), `loss` (share of lost round trips). The requested `rtt` is
    twice the requested delay."""
    measured: float
    """Seconds in which the device demanded more CPU than it had, over which `cpu` is measured."""
    demand: Figure
    """CPU share while the client ran or waited for a CPU, in the worst phase. More than requested if
    short bursts fit into the quota."""
    wanted: float | None
    """Seconds in which the client ran or waited for a CPU, over which `demand` is measured; None if this
    kernel does not count them."""
    present: float
    """Seconds in which the device was neither frozen, down nor starting."""
    observed: float
    """Seconds of `present` that telemetry covers."""
    used: float | None
    """Share of one core over the whole run, with starts after a crash; None without telemetry."""
    probes: int
    """Number of probes of the link."""
    round_trips: int = 0
    node: str | None = None
    """None if there is only one node."""
    wrong_limits: tuple[str, ...] = ()
    """A short text per limit of the kernel that differs from the requested one."""
    unread_limits: str | None = None
    """Sentence on limits that could not be read; None if all could."""
    carried: Mapping[str, Carried] = field(default_factory=dict)
    """By direction (`up`, `down`), if it has a rate limit."""

    def judged_figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield the name and the figure of each figure whose error can count against a run.

        Errors of jitter cannot count, because measuring jitter would need thousands of round trips. Loss
        is judged separately (`loss_is_off`). Errors of rates cannot count if packets are lost, because
        then fewer bytes arrive.
        """
        error = self.demand.error
        if error is not None and error < 0 and (self.wanted or 0.0) >= ENOUGH_DEMAND_SECONDS:
            yield CPU, self.demand
        for name in (CPU, *RATES, "rtt"):
            figure = self.figures[name]
            if not figure.requested or figure.got is None:
                continue
            if name == CPU and self.measured < ENOUGH_SECONDS:
                continue
            if name in RATES and self.figures["loss"].requested:
                continue
            if name == "rtt" and abs(figure.got - figure.requested) <= _RTT_SLACK_SECONDS:
                continue
            yield name, figure

    @property
    def loss_is_off(self) -> bool:
        """Beyond what random deviations explain. If no loss was requested, its share is 0."""
        loss = self.figures["loss"]
        if loss.got is None:
            return False
        wanted, trips = loss.requested or 0.0, max(self.round_trips, 1)
        chance = max(_CHANCE_SIGMAS * math.sqrt(wanted * (1 - wanted) / trips), 1 / trips)
        return abs(loss.got - wanted) > _LOSS_SLACK + chance

    @property
    def unrequested_delay(self) -> float | None:
        """Measured round trip in seconds, if it is too long for a link without a requested delay; else
        None."""
        rtt, rates = self.figures["rtt"], [self.figures[name].requested for name in RATES]
        if rtt.requested or rtt.got is None:
            return None
        sending = sum(_ECHO_BITS / rate for rate in rates if rate)
        return rtt.got if rtt.got > _UNREQUESTED_RTT_SECONDS + sending else None

    def unjudged(self) -> Iterator[str]:
        """Yield a sentence for each check that was not possible."""
        if self.present >= ENOUGH_SECONDS:
            if self.observed < self.present / 2:
                yield f"CPU: telemetry covers only {self.observed:.0f} of {self.present:.0f} s"
            elif self.wanted is None and self.measured < ENOUGH_SECONDS:
                yield "CPU: it was never busy, and this kernel does not count waiting for a CPU"
            if self.unread_limits is not None:
                yield self.unread_limits
        if any(
            figure.requested is not None for name, figure in self.figures.items() if name != CPU
        ) and (not self.probes):
            yield "its link: it was never measured"

    def as_dict(self) -> dict[str, Any]:
        entries: dict[str, Any] = {"group": self.group}
        if self.node is not None:
            entries["node"] = self.node
        for name, figure in self.figures.items():
            values = {"asked": figure.requested, "got": figure.got, "error": figure.error}
            if name == CPU:
                values |= {
                    "measured": self.measured,
                    "used": self.used,
                    "demand": self.demand.got,
                    "wanted": self.wanted,
                }
            entries[name] = {key: rounded(value) for key, value in values.items()}
        if self.carried:
            entries |= {f"{way}_carried": one.as_dict() for way, one in self.carried.items()}
        if self.wrong_limits:
            entries["wrong_limits"] = list(self.wrong_limits)
        return {**entries, "probes": self.probes}


@dataclass(frozen=True, slots=True)
class Worst:
    device: DeviceFidelity
    name: str
    figure: Figure
    error: float
    """Error in %."""

    @property
    def deviation(self) -> str:
        """Error in words, such as `3.1% less`."""
        return f"{abs(self.error):.1f}% {'less' if self.error < 0 else 'more'}"

    @property
    def label(self) -> str:
        """`pi-2` for the CPU, `pi-2, up` for another figure."""
        return self.device.device if self.name == CPU else f"{self.device.device}, {self.name}"


@dataclass(frozen=True, slots=True)
class Fidelity:
    devices: tuple[DeviceFidelity, ...]
    clocks: Mapping[str, float] = field(default_factory=dict)
    """Other host -> maximum error, in seconds, of the times recorded for its devices. Empty if there is
    only one host."""
    features: tuple[FeatureFigures, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `fidelity.json`.

        `devices` has an entry per device. The entry has the device's `group`, its `node` if there are
        several nodes, its figures, the traffic of its link (`up_carried` and `down_carried`), and the
        number of `probes`. A figure has the requested value (`asked`), the measured value (`got`) and
        the `error` in %. The figure `cpu` also has the values of `measured`, `used`, `demand` and
        `wanted` of DeviceFidelity.

        `clocks` has the `uncertainty` of the clock of each other host, in seconds. `clocks` is left out
        if there is only one host. Each feature that has an entry adds it (`segments`, for example).
        """
        clocks = {host: {"uncertainty": rounded(one)} for host, one in self.clocks.items()}
        devices = {one.device: one.as_dict() for one in self.devices}
        for feature in self.features:
            for device, entry in feature.devices.items():
                devices[device][feature.feature] = entry
        return {
            "format": FORMAT,
            "devices": devices,
            **({"clocks": clocks} if clocks else {}),
            **{feature.feature: feature.entry for feature in self.features if feature.entry},
        }

    def save(self, path: Path) -> None:
        """Raises OSError; then no partial file is left."""
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"
        with files.atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")

    def worst(self, *names: str) -> Worst | None:
        """Largest error among the figures `names` that can count against a run; None if there is
        none."""
        found = [
            Worst(one, name, figure, figure.error)
            for one in self.devices
            for name, figure in one.judged_figures()
            if name in names and figure.error is not None
        ]
        return max(found, key=lambda worst: abs(worst.error), default=None)


def rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


_PAGE_BYTES = 64 * 1024
"""Largest page size of common kernels, which round memory limits to whole pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedLimits:
    """Limits that the engine was asked to set. None if not requested, as on a real device, whose CPU
    quota alone is limited."""

    quota: int
    """µs of CPU time per period."""
    period: int
    """µs of a CFS period."""
    shares: int | None = None
    """CPU weight on the scale of cgroup v1, which container engines use."""
    cpus: str | None = None
    """Cores, as in `0,2-3`."""
    memory: int | None = None
    """Maximum memory in bytes; swap is not allowed."""


def differences(requested: RequestedLimits, found: CgroupLimits) -> Iterator[str]:
    """Yield a short text for each. Swap is not compared if the kernel cannot limit it."""
    quota = f"{found.quota} of {found.period} µs" if found.quota != NO_LIMIT else "none"
    if (found.quota, found.period) != (requested.quota, requested.period):
        yield f"its CPU quota is {quota}, requested {requested.quota} of {requested.period} µs"
    if (shares := requested.shares) is not None:
        if found.shares not in (None, shares):
            yield f"its CPU shares are {found.shares}, requested {shares}"
        if found.weight is not None and found.weight not in weights_of(shares):
            yield f"its CPU weight is {found.weight}, requested {_one_of(weights_of(shares))}"
    cpus = None if found.cpus is None else requested.cpus
    if cpus is not None and cpu_numbers(found.cpus or "") != cpu_numbers(cpus):
        yield f"its cores are {found.cpus or 'all'}, requested {cpus}"
    if (memory := requested.memory) is None:
        return
    if found.memory is None:
        yield f"this kernel cannot limit memory, requested {_bytes(memory)}"
    elif not 0 <= memory - found.memory < _PAGE_BYTES:
        yield f"its memory limit is {_bytes(found.memory)}, requested {_bytes(memory)}"
    if found.swap not in (None, 0):
        yield f"it may swap ({_bytes(found.swap)}), requested no swap"


def _one_of(weights: tuple[int, int]) -> str:
    return " or ".join(map(str, dict.fromkeys(weights)))


def _bytes(limit: int) -> str:
    return "without limit" if limit == NO_LIMIT else f"{limit} bytes"
