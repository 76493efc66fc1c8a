"""Requested and measured figures of devices (`testbed.fidelity` measures them).

Times are in seconds, `at` is device time; shares are those of one host core, rates bit/s on the wire.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of `fidelity.json`."""
CPU, RATES, DELAYS = "cpu", ("up", "down"), ("rtt", "jitter", "loss")
"""Names of the figures."""
ENOUGH_SECONDS = 3.0
"""What a CPU figure must be based on to count against a run: of one second, a period more or less is
some per cent."""
_SPREAD = math.sqrt(2 / 3)
"""Standard deviation of a round trip of two legs, each uniform in ± 1."""
_RTT_SLACK_SECONDS = 0.002
"""How far a round trip may be off: a throttled device answers late, whatever its link."""

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
class Requested:
    """What was requested of one device; `cpu` (one or more) and `link` in the order of time."""

    device: str
    group: str
    cpu: tuple[RequestedCpu, ...]
    link: tuple[RequestedLink, ...] = ()
    away: tuple[Interval, ...] = ()
    """When it was frozen, down or starting up: from the order until its limit held again."""


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
    used: float | None
    """Share of one core over the whole run, start-up after a crash included; None without telemetry."""
    probes: int
    """Number of probes that the link's figures are based on."""

    def judged(self) -> Iterator[tuple[str, Figure]]:
        """The figures that can count against a run. Jitter and loss cannot: they would take thousands of
        round trips. Nor can rates where packets are lost: fewer arrive."""
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

    def as_dict(self) -> dict[str, Any]:
        """Plain values; None where nothing was requested, or the value is not known."""
        entries: dict[str, Any] = {"group": self.group}
        for name, figure in self.figures.items():
            values = {"asked": figure.requested, "got": figure.got, "error": figure.error}
            if name == CPU:
                values |= {"measured": self.measured, "used": self.used}
            entries[name] = {key: _rounded(value) for key, value in values.items()}
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

    def as_dict(self) -> dict[str, Any]:
        """The content of `fidelity.json`: `devices` by name, each with its `group`, its
        figures (`asked`, which is `Figure.requested`, `got` and `error` in %; see DeviceFidelity) and
        `probes`; `cpu` has `measured` and `used` too."""
        return {"format": FORMAT, "devices": {one.device: one.as_dict() for one in self.devices}}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

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
    """Six significant digits."""
    return None if value is None else float(f"{value:.6g}")
