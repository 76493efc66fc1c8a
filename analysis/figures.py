"""The figures of a device as data: terminal, page and Prometheus go through one table. A figure that is
added to `FIGURES` appears in all of them."""

from __future__ import annotations

from math import isnan, nan

from analysis.features import PARTS
from analysis.part import DeviceFigure, Together, count_text, decimal, formatted, rate


def _mean_text(value: float) -> str:
    return decimal(value, 0 if value >= 100 else 1)


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
            page_text=formatted("{:,.0f}"),
            orders={"fewest updates": True, "most updates": False},
        ),
        DeviceFigure(
            name="last_staleness",
            about="Staleness of the device's last applied update, in versions.",
            of=lambda device, *_: device.staleness if device.updates else nan,
            together=Together.NOTHING,
            title="stale",
            width=5,
            gives_way=2,
            text=lambda value: decimal(value, 0),
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
            page_text=formatted("{:.1f}"),
            orders={"most stale": False},
        ),
        DeviceFigure(
            name="asked",
            about="Requested CPU share of the device, in cores.",
            of=lambda device, *_: nan if device.cpu is None else device.cpu,
            title="cpu",
            text=_cores,
            heading="CPU requested",
            page_text=formatted("{:.1%}"),
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
            page_text=formatted("{:.1%}"),
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
            page_text=formatted("{:,.0f}", 2**-20),
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
            page_text=formatted("{:.1%}"),
        ),
        DeviceFigure(
            name="importance",
            about="Weight p_i of the device in the objective.",
            of=lambda device, *_: device.importance,
            together=Together.SUM,
            title="p_i",
            text=_part,
        ),
        *(one for part in PARTS for one in part.figures),
    )
}
"""Name -> figure, in the order of the terminal's columns."""
