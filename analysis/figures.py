"""The figures of a device as data: terminal, page and Prometheus go through one table. A figure that is
added to `FIGURES` appears in all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from analysis.tally import DeviceTally, Tally

if TYPE_CHECKING:  # the terminal needs no pandas
    import pandas as pd

    from analysis.load import Run


class Together(Enum):
    """How the figures of several devices become that of their group. Unknown ones are left out."""

    MEAN = "mean"
    SUM = "sum"
    PER_UPDATE = "per update"
    """Mean over the updates of all devices."""
    NOTHING = "nothing"
    """A group has no such figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigure:
    """A figure of a device. A value that is not known is NaN."""

    name: str
    about: str
    """Sentence that says what it is, with its unit; the metric's help."""
    of: Callable[[DeviceTally, Tally, float], float]
    """The value for a device at a device time in seconds."""
    together: Together = Together.MEAN
    needs: str = ""
    """Part of a run without which it is unknown: `telemetry`, `links`, `energy` or `batteries`."""
    title: str = ""
    """Heading on the terminal; empty if it is not shown there."""
    width: int = 4
    """Characters that it has there at most."""
    text: Callable[[float], str] = str
    sort: int = 0
    """Order on the terminal when the user sorts by it: largest first (−1), smallest first (1), none."""
    heading: str = ""
    """Heading on the page; empty if it is not shown there."""
    page_text: Callable[[float], str] = str
    table: Callable[[Run], pd.Series[float]] | None = None
    """The values of a run's devices from its tables, by device; None if the page makes them itself."""
    orders: Mapping[str, bool] = field(default_factory=dict)
    """Orders that the page offers: name, and whether the smallest come first."""
    metric: str = ""
    """Name in Prometheus, with its unit; empty if it has none."""
    is_total: bool = False
    """Whether the metric only grows."""
    metric_of: Callable[[DeviceTally], float] | None = None
    """The metric's value, if it is not that of the last seconds."""

    def group(self, values: Sequence[float], updates: Sequence[float]) -> float:
        """Return the figure of a group of devices, with as many `updates` each."""
        known = [(one, count) for one, count in zip(values, updates, strict=True) if not isnan(one)]
        match self.together:
            case Together.MEAN:
                return sum(one for one, _ in known) / len(known) if known else nan
            case Together.SUM:
                return sum(one for one, _ in known) if known else nan
            case Together.PER_UPDATE:
                total = sum(count for _, count in known)
                return sum(one * count for one, count in known) / total if total else nan
            case Together.NOTHING:
                return values[0] if len(values) == 1 else nan


def _format(form: str, factor: float = 1.0) -> Callable[[float], str]:
    return lambda value: "–" if isnan(value) else form.format(factor * value)


percent = _format("{:.0%}")


def number(value: float, decimals: int) -> str:
    return "–" if isnan(value) else f"{value:.{decimals}f}"


def count_text(value: float) -> str:
    """Format a count in at most five characters."""
    return "–" if isnan(value) else f"{value:.0f}" if value < 1e5 else f"{value / 1e3:.0f}k"


def _mean_text(value: float) -> str:
    return number(value, 0 if value >= 100 else 1)


def _part(value: float) -> str:
    """Format a share in at most four characters, e.g. `12%` or `1.2%`."""
    return "–" if isnan(value) else f"{value:.0%}" if value >= 0.0995 or value == 0 else f"{value:.1%}"


def _cores(value: float) -> str:
    """Format a share of a core in at most four characters."""
    return "–" if isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _memory(value: float) -> str:
    """Format a number of bytes in at most four characters, in units of 1024: `312M` is 312 MiB."""
    if isnan(value):
        return "–"
    for power, unit in ((2**40, "T"), (2**30, "G"), (2**20, "M"), (2**10, "k")):
        if value >= 0.97 * power:  # `1.0G` and not `1000M`, which has five characters
            scaled = value / power
            return f"{scaled:.1f}{unit}" if scaled < 9.95 and unit in "TG" else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def watts(value: float) -> str:
    """Format a power in watts in at most four characters, such as `2.1`."""
    if isnan(value):
        return "–"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else count_text(value)


def energy(joules: float) -> str:
    """Format an energy with its unit, such as `1.2 kJ`."""
    if isnan(joules):
        return "–"
    for factor, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if joules >= factor * 0.9995:
            return f"{joules / factor:.3g} {unit}"
    return f"{joules:.3g} J"


def rate(bits: float) -> str:
    """Format a rate in bit/s in at most four characters, such as `1.2M`."""
    if isnan(bits):
        return "–"
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if bits >= factor * 0.9995:
            scaled = bits / factor
            return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{bits:.0f}"


def has(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Return which of `energy` and `batteries` (`DeviceFigure.needs`) a run has."""
    energies = [one.get("energy") for one in manifest.get("devices", {}).values()]
    found = {"energy": any(energies), "batteries": any(one and one.get("battery") for one in energies)}
    return frozenset(name for name, is_there in found.items() if is_there)


FIGURES: dict[str, DeviceFigure] = {
    figure.name: figure
    for figure in (
        DeviceFigure(
            name="updates",
            about="Updates of the device that were applied.",
            of=lambda device, *_: device.updates,
            together=Together.SUM,
            title="upd",
            width=5,
            text=count_text,
            sort=-1,
            heading="updates",
            page_text=_format("{:,.0f}"),
            orders={"fewest updates": True, "most updates": False},
        ),
        DeviceFigure(
            name="last_staleness",
            about="Staleness of the device's last applied update, in versions.",
            of=lambda device, *_: device.staleness if device.updates else nan,
            together=Together.NOTHING,
            title="stale",
            width=5,
            text=lambda value: number(value, 0),
            metric="last_staleness_versions",
        ),
        DeviceFigure(
            name="staleness",
            about="Mean staleness of the device's updates, in versions.",
            of=lambda device, *_: device.staleness_sum / device.updates if device.updates else nan,
            together=Together.PER_UPDATE,
            title="mean",
            text=_mean_text,
            sort=-1,
            heading="mean staleness",
            page_text=_format("{:.1f}"),
            orders={"most stale": False},
        ),
        DeviceFigure(
            name="asked",
            about="Requested CPU share of the device, in cores.",
            of=lambda device, *_: nan if device.cpu is None else device.cpu,
            title="cpu",
            text=_cores,
            heading="CPU requested",
            page_text=_format("{:.1%}"),
            metric="cpu_asked_cores",
        ),
        DeviceFigure(
            name="used",
            about="CPU that the device used since its last sample, in cores.",
            of=lambda device, _, at: device.usage.share(at),
            needs="telemetry",
            title="used",
            text=_cores,
            sort=-1,
            heading="CPU used",
            page_text=_format("{:.1%}"),
            orders={"most CPU": False},
            metric="cpu_used_cores",
            metric_of=lambda device: device.usage.latest,
        ),
        DeviceFigure(
            name="memory",
            about="Memory that the device uses.",
            of=lambda device, _, at: device.usage.memory(at),
            needs="telemetry",
            title="mem",
            text=_memory,
            sort=-1,
            heading="memory (MiB)",
            page_text=_format("{:,.0f}", 2**-20),
            orders={"most memory": False},
            metric="memory_bytes",
            metric_of=lambda device: device.usage.last_memory or nan,
        ),
        DeviceFigure(
            name="up",
            about="Sending rate of the device, in bit/s.",
            of=lambda device, _, at: device.usage.up(at),
            needs="links",
            title="up",
            text=rate,
            heading="up (bit/s)",
            page_text=rate,
        ),
        DeviceFigure(
            name="down",
            about="Receiving rate of the device, in bit/s.",
            of=lambda device, _, at: device.usage.down(at),
            needs="links",
            title="down",
            text=rate,
            heading="down (bit/s)",
            page_text=rate,
        ),
        DeviceFigure(
            name="share",
            about="Share of all applied updates.",
            of=lambda device, tally, _: device.updates / tally.updates if tally.updates else nan,
            together=Together.SUM,
            title="share",
            width=5,
            text=_part,
            sort=-1,
            heading="share",
            page_text=_format("{:.1%}"),
        ),
        DeviceFigure(
            name="importance",
            about="Weight p_i of the device in the objective.",
            of=lambda device, *_: device.importance,
            together=Together.SUM,
            title="p_i",
            text=_part,
        ),
        DeviceFigure(
            name="energy",
            about="Energy that the device has consumed, in joules.",
            of=lambda device, *_: device.energy.consumed,
            together=Together.SUM,
            needs="energy",
            heading="energy (J)",
            page_text=_format("{:,.4g}"),
            orders={"most energy": False},
            metric="energy_joules",
            is_total=True,
        ),
        DeviceFigure(
            name="power",
            about="Mean power of the device since its last sample, in watts.",
            of=lambda device, *_: device.energy.power,
            needs="energy",
            title="watt",
            text=watts,
            heading="power (W)",
            page_text=_format("{:.3g}"),
            metric="power_watts",
        ),
        DeviceFigure(
            name="level",
            about="Level of the device's battery, from 0 to 1.",
            of=lambda device, *_: device.energy.level,
            needs="batteries",
            title="batt",
            text=percent,
            sort=1,
            heading="battery",
            page_text=percent,
            orders={"lowest battery": True},
            metric="battery_level_ratio",
        ),
        DeviceFigure(
            name="powered",
            about="1 while the device with a battery has power, else 0.",
            of=lambda device, *_: device.powered,
            needs="batteries",
            metric="powered",
        ),
        DeviceFigure(
            name="power_offs",
            about="Number of times that the battery was too low and the device powered off.",
            of=lambda device, *_: device.power_offs,
            together=Together.SUM,
            needs="batteries",
            metric="power_offs",
            is_total=True,
        ),
    )
}
"""Name -> figure, in the order of the terminal's columns."""
