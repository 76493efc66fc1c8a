"""Requested and measured figures of devices (`testbed.fidelity` measures them).

Times are in seconds, `at` is device time; shares are those of one host core, rates bit/s on the wire.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.disk import files
from testbed.fidelity.limits import RequestedLimits

FORMAT = 1
"""Version of `fidelity.json`."""
CPU, RATES, DELAYS = "cpu", ("up", "down"), ("rtt", "jitter", "loss")
"""Names of the figures."""
ENOUGH_SECONDS = 3.0
"""What a CPU figure must be based on to count against a run: of one second, a period more or less is
some per cent."""
ENOUGH_DEMAND_SECONDS = 0.5
"""The same for what a device got while it wanted to run: less than that can have cost it no more."""
_SPREAD = math.sqrt(2 / 3)
"""Standard deviation of a round trip of two legs, each uniform in ± 1."""
_RTT_SLACK_SECONDS = 0.002
"""How far a round trip may be off: a throttled device answers late, whatever its link."""
_UNREQUESTED_RTT_SECONDS = 0.01
"""How long a round trip may take where no delay was requested, besides sending it."""
_ECHO_BITS = 1000
"""At most what a probe's echo has on the wire."""
_LOSS_SLACK = 0.02
"""How far a share of lost packets may be off, besides what is chance."""
_CHANCE_SIGMAS = 4.0
_CONTEXT_BYTES = 512 * 2**20
"""What CUDA's context of a process takes of a GPU beside what the process asks for, at most; NVML counts
it. Some hundred MB are usual; not measured here."""

Interval = tuple[float, float]
"""Begin and end."""


@dataclass(frozen=True, slots=True)
class RequestedCpu:
    """The CPU requested for a device from `at` on."""

    share: float
    period: float | None = None
    """Seconds of a CFS period, as set in the kernel; None where no cgroup limits the device."""
    at: float = 0.0
    """When it was set; for a change, when that had been done."""
    limits: RequestedLimits | None = None
    """Limits of its control group; None if no control group limits the device."""


@dataclass(frozen=True, slots=True)
class RequestedLink:
    """The link requested for a device from `at` on."""

    up: float | None = None
    """None: not limited; as `down`."""
    down: float | None = None
    delay: float = 0.0
    """One way, in each direction, as are jitter and loss."""
    jitter: float = 0.0
    """The delay is uniform in delay ± jitter."""
    loss: float = 0.0
    """Share of the packets."""
    at: float = 0.0

    def figures(self) -> dict[str, float | None]:
        """The requested values by name of the figure: of round trips, as only these can be measured."""
        return {
            "up": self.up,
            "down": self.down,
            "rtt": 2 * self.delay or None,
            "jitter": _SPREAD * self.jitter or None,
            "loss": 1 - (1 - self.loss) ** 2 or None,
        }


@dataclass(frozen=True, slots=True)
class RequestedGpu:
    """What was requested of a GPU for a device."""

    share: float
    """Of its multiprocessors, at most."""
    memory: int | None = None
    """Bytes, at most; None: not limited."""
    limited: bool = False
    """Whether MPS is to hold the device within that."""


@dataclass(frozen=True, slots=True)
class GpuFidelity:
    """What a device had of its GPU, by NVML's samples."""

    requested: RequestedGpu
    samples: int
    """In which its client used the GPU."""
    memory: int | None
    """Bytes, the most that a sample showed; None: NVML does not tell."""
    sm: float | None
    """Mean share of the time in which a kernel of its client ran; None: NVML does not tell, as of MPS's
    clients."""
    outside: int
    """Samples in which MPS did not hold it, of a device that it was to hold."""

    @property
    def over_memory(self) -> bool:
        """Whether it had more than it may have, CUDA's own context aside."""
        limit = self.requested.memory
        return limit is not None and (self.memory or 0) > limit + _CONTEXT_BYTES

    def unjudged(self) -> Iterator[str]:
        """What could not be checked, and why."""
        if not self.samples:
            yield "its GPU: NVML saw no process of it there"
            return
        if self.requested.limited:
            yield (
                "its share of the GPU: MPS held it, and NVML does not tell on how many multiprocessors "
                "a client of MPS runs"
            )
        if self.requested.memory is not None and self.memory is None:
            yield "its GPU memory: NVML does not tell what the process took"

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "share": {"asked": self.requested.share, "got": None},
            "memory": {"asked": self.requested.memory, "got": self.memory},
            "sm": _rounded(self.sm),
            "samples": self.samples,
            "outside": self.outside,
        }


@dataclass(frozen=True, slots=True)
class Requested:
    """What was requested of one device; `cpu` (one or more) and `link` in the order of time."""

    device: str
    group: str
    cpu: tuple[RequestedCpu, ...]
    link: tuple[RequestedLink, ...] = ()
    away: tuple[Interval, ...] = ()
    """When it was frozen, down or starting up: from the order until its limit held again."""
    gpu: RequestedGpu | None = None
    node: str | None = None
    """Name of its node, where there are several."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Traffic of one direction of a link in the run, while packets waited in its queue."""

    busy: float
    """Seconds in which packets waited."""
    share: float | None
    """Bytes that left the queue then ÷ bytes that its rate allows; None if packets never waited."""
    slow: tuple[float, float, float] | None = None
    """Begin, end and share of the worst stretch in which it was too slow to count as the link that was
    requested; None if there was none."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as those of a figure of which 1 was requested."""
        figure = Figure(1.0, self.share)
        values = {"asked": 1.0, "got": self.share, "error": figure.error, "busy": self.busy}
        return {name: _rounded(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Figure:
    requested: float | None = None
    """None: not requested."""
    got: float | None = None
    """None: not known."""

    @property
    def error(self) -> float | None:
        """In % of the requested value; above zero: got more. None where there is nothing to compare."""
        if not self.requested or self.got is None:
            return None
        return (self.got - self.requested) / self.requested * 100

    @property
    def distance(self) -> float:
        """The error without its sign, to find the worst by; below zero where there is none."""
        return -1.0 if self.error is None else abs(self.error)


@dataclass(frozen=True, slots=True)
class DeviceFidelity:
    device: str
    group: str
    figures: Mapping[str, Figure]
    """`cpu` (share), `up` and `down` (rates), `rtt` (round trip; requested: twice the delay), `jitter`
    (standard deviation of round trips), `loss` (share of round trips)."""
    measured: float
    """Seconds that `cpu` is based on: in these the device demanded more than it had."""
    demand: Figure
    """The share that it got while it wanted to run, which is more than requested where short bursts fit
    into the quota; of the phase with the worst."""
    wanted: float | None
    """Seconds that `demand` is based on: those in which the client ran or waited for a CPU. None: this
    kernel does not count them."""
    present: float
    """Seconds of the run in which it was neither frozen, down nor starting up."""
    observed: float
    """Seconds of these that telemetry covers."""
    used: float | None
    """Share of one core over the whole run, start-up after a crash included; None without telemetry."""
    probes: int
    """Number of probes that the link's figures are based on."""
    round_trips: int = 0
    """Number of round trips of all probes."""
    gpu: GpuFidelity | None = None
    """None: it was to have none."""
    node: str | None = None
    """Name of its node, where there are several."""
    wrong_limits: tuple[str, ...] = ()
    """Limits that the kernel had otherwise than requested, in a few words each."""
    unread_limits: str | None = None
    """Which of its limits are not known, though requested."""
    carried: Mapping[str, Carried] = field(default_factory=dict)
    """Traffic of the links whose rate is limited, by direction (`up`, `down`)."""

    def judged(self) -> Iterator[tuple[str, Figure]]:
        """The figures that can count against a run by their error. Jitter cannot: it would take
        thousands of round trips. Loss can beyond chance (`loss_is_off`). Rates cannot where packets are
        lost: fewer arrive."""
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
        """Whether more or fewer round trips were lost than requested (none, where nothing was), beyond
        chance."""
        loss = self.figures["loss"]
        if loss.got is None:
            return False
        wanted, trips = loss.requested or 0.0, max(self.round_trips, 1)
        chance = max(_CHANCE_SIGMAS * math.sqrt(wanted * (1 - wanted) / trips), 1 / trips)
        return abs(loss.got - wanted) > _LOSS_SLACK + chance

    @property
    def unrequested_delay(self) -> float | None:
        """The round trip, in seconds, where none was requested and it takes longer than it takes to send
        it; else None."""
        rtt, rates = self.figures["rtt"], [self.figures[name].requested for name in RATES]
        if rtt.requested or rtt.got is None:
            return None
        sending = sum(_ECHO_BITS / rate for rate in rates if rate)
        return rtt.got if rtt.got > _UNREQUESTED_RTT_SECONDS + sending else None

    def unjudged(self) -> Iterator[str]:
        """What of this device could not be checked, and why."""
        if self.present >= ENOUGH_SECONDS:
            if self.observed < self.present / 2:
                yield f"CPU: telemetry of {self.observed:.0f} of {self.present:.0f} s"
            elif self.wanted is None and self.measured < ENOUGH_SECONDS:
                yield "CPU: it was never busy, and this kernel does not say whether it waited for a CPU"
            if self.unread_limits is not None:
                yield self.unread_limits
        if any(
            figure.requested is not None for name, figure in self.figures.items() if name != CPU
        ) and (not self.probes):
            yield "its link: never measured"
        if self.gpu is not None:
            yield from self.gpu.unjudged()

    def as_dict(self) -> dict[str, Any]:
        """Plain values; None where nothing was requested, or the value is not known."""
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
            entries[name] = {key: _rounded(value) for key, value in values.items()}
        if self.gpu is not None:
            entries["gpu"] = self.gpu.as_dict()
        if self.carried:
            entries |= {f"{way}_carried": one.as_dict() for way, one in self.carried.items()}
        if self.wrong_limits:
            entries["wrong_limits"] = list(self.wrong_limits)
        return {**entries, "probes": self.probes}


@dataclass(frozen=True, slots=True)
class Worst:
    """The figure of a device that is farthest from its request."""

    device: DeviceFidelity
    name: str
    figure: Figure
    error: float

    @property
    def off(self) -> str:
        """`3.1% less`."""
        return f"{abs(self.error):.1f}% {'less' if self.error < 0 else 'more'}"

    @property
    def whose(self) -> str:
        """`pi-2`, or `pi-2, up`."""
        return self.device.device if self.name == CPU else f"{self.device.device}, {self.name}"


@dataclass(frozen=True, slots=True)
class Fidelity:
    devices: tuple[DeviceFidelity, ...]
    clocks: Mapping[str, float] = field(default_factory=dict)
    """By how many seconds at most the times of each other host's devices may be off; none where all is
    on one host."""

    def as_dict(self) -> dict[str, Any]:
        """The content of `fidelity.json`: `devices` by name, each with its `group`, its `node` where
        there are several, its figures (`asked`, which is `Figure.requested`, `got` and `error` in %; see
        DeviceFidelity), `up_carried` and `down_carried` (see Carried) and `probes`; `cpu` has
        `measured`, `used`, `demand` (`demand.got`) and `wanted` too. Where there are several hosts,
        `clocks` has the `uncertainty` of each other one's, in seconds."""
        clocks = {host: {"uncertainty": _rounded(one)} for host, one in self.clocks.items()}
        devices = {one.device: one.as_dict() for one in self.devices}
        return {"format": FORMAT, "devices": devices, **({"clocks": clocks} if clocks else {})}

    def save(self, path: Path) -> None:
        """Raises OSError; then there is no such file."""
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"
        with files.atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")

    def worst(self, *names: str) -> Worst | None:
        """The worst of the figures called `names`, as far as they can count against a run."""
        found = [
            Worst(one, name, figure, figure.error)
            for one in self.devices
            for name, figure in one.judged()
            if name in names and figure.error is not None
        ]
        return max(found, key=lambda worst: abs(worst.error), default=None)


def _rounded(value: float | None) -> float | None:
    """Six significant digits; None for what is not known."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
