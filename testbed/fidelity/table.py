"""Tables at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from testbed import console
from testbed.fidelity.figures import (
    CPU,
    DELAYS,
    ENOUGH_DEMAND_SECONDS,
    RATES,
    Carried,
    DeviceFidelity,
    Fidelity,
    Figure,
)
from testbed.fidelity.part import FeatureFigures

MAX_ROWS = 20  # more devices are shown by group, as in the other tables
NONE = "–"
_SHORT_SECONDS = 0.05
"""Below this waiting time the share of the rate is not shown: it is that of a few packets."""
UNITS = {
    "up": ("up Mbit/s", 1e-6),
    "down": ("down Mbit/s", 1e-6),
    "rtt": ("rtt ms", 1e3),
    "jitter": ("jitter ms", 1e3),
    "loss": ("loss %", 1e2),
}
"""Title of a figure's column, and factor to its unit."""


def rows(fidelity: Fidelity) -> tuple[DeviceFidelity, ...]:
    """One per device; one per group and node if there are many devices, with the worst value of each
    figure and the mean of `used`."""
    if len(fidelity.devices) <= MAX_ROWS:
        return fidelity.devices
    groups: dict[tuple[str, str | None], list[DeviceFidelity]] = {}
    for one in fidelity.devices:
        groups.setdefault((one.group, one.node), []).append(one)
    return tuple(_group_row(members) for members in groups.values())


def _group_row(members: Sequence[DeviceFidelity]) -> DeviceFidelity:
    def worst(name: str) -> DeviceFidelity:
        return max(members, key=lambda one: one.figures[name].distance)

    def cpu_error(one: DeviceFidelity) -> float:
        return max(
            (figure.distance for name, figure in one.judged_figures() if name == CPU), default=-1.0
        )

    used = [one.used for one in members if one.used is not None]
    worst_cpu = max(members, key=cpu_error)
    return replace(
        worst_cpu,  # it also supplies the seconds that the CPU figure is based on
        device=f"{members[0].group} ×{len(members)}",
        figures={
            name: (worst_cpu if name == CPU else worst(name)).figures[name]
            for name in members[0].figures
        },
        used=fmean(used) if used else None,
        carried=_worst_carried(members),
        probes=sum(one.probes for one in members),
    )


def _worst_carried(members: Sequence[DeviceFidelity]) -> dict[str, Carried]:
    """Return direction -> traffic of the device whose link carried the smallest share of its rate."""
    found = {}
    for way in RATES:
        known = [one.carried[way] for one in members if way in one.carried]
        if known:
            found[way] = min(known, key=lambda one: math.inf if one.share is None else one.share)
    return found


def render(fidelity: Fidelity) -> RenderableType:
    """Figures of links that were neither requested nor measured for any device are left out."""
    shown = rows(fidelity)
    parts: list[RenderableType] = [Text(), _cpu_table(shown)] if shown else []
    for names in (RATES, DELAYS):
        columns = [n for n in names if any(one.figures[n] != Figure() for one in fidelity.devices)]
        if columns:
            parts += [Text(), _link_table(shown, columns)]
    if any(one.share is not None for device in shown for one in device.carried.values()):
        parts += [Text(), _carried_table(shown)]
    for feature in fidelity.features:
        if feature.rows:
            parts += [Text(), _feature_table(feature)]
    return Group(*parts, Text(), Text(summary(fidelity)))


def summary(fidelity: Fidelity) -> str:
    """Line with the worst CPU error, and that of a link if links were requested."""
    line = "CPU: every device got its share whenever it wanted to run"
    if all((one.wanted or 0.0) < ENOUGH_DEMAND_SECONDS for one in fidelity.devices):
        line = "CPU: no device was busy long enough to be judged"
    if worst := fidelity.worst(CPU):
        line = f"CPU: at worst {worst.deviation} than requested ({worst.label})"
    links = [one.figures[name] for one in fidelity.devices for name in (*RATES, *DELAYS)]
    if any(figure.requested is not None for figure in links):
        if worst := fidelity.worst(*RATES, *DELAYS):
            line += f"; links: {worst.deviation} ({worst.label})"
        elif any(figure.error is not None for figure in links):
            line += "; links: no error beyond chance"
        else:
            line += "; links: not measured"
    for feature in fidelity.features:
        line += f"; {feature.summary}" if feature.summary else ""
    if fidelity.clocks:
        host = max(fidelity.clocks, key=lambda name: fidelity.clocks[name])
        line += f"; clocks: within {1e3 * fidelity.clocks[host]:.2g} ms of this host's ({host})"
    return line


def _cpu_table(shown: Sequence[DeviceFidelity]) -> Table:
    on_nodes = any(one.node is not None for one in shown)
    table = console.number_table(
        "device", CPU, "got", "error", "measured", "used", *(["node"] * on_nodes)
    )
    for one in shown:
        requested, got, error = figure_cells(one.figures[CPU])
        if None not in (one.figures[CPU].requested, one.used) and one.figures[CPU].got is None:
            got, error = _by_demand(one)
        table.add_row(
            console.shorten(one.device),
            requested,
            got,
            error,
            f"{one.measured or one.wanted or 0:.0f} s",
            number_text(one.used),
            *([console.shorten(one.node or NONE)] * on_nodes),
        )
    return table


def _feature_table(feature: FeatureFigures) -> Table:
    table = console.number_table(*feature.titles)
    for first, *others in feature.rows:
        table.add_row(console.shorten(first), *others)
    return table


def _by_demand(one: DeviceFidelity) -> tuple[str, str]:
    """Cells `got` and `error` for a device that was never busy for long, from its CPU share while the
    client wanted to run; `enough` if that is at least the requested one."""
    if one.demand.got is None or (one.wanted or 0.0) < ENOUGH_DEMAND_SECONDS:
        return "hardly used", NONE
    if one.demand.error is not None and one.demand.error < 0:
        return figure_cells(one.demand)[1:]
    return "enough", NONE


def _link_table(shown: Iterable[DeviceFidelity], names: Sequence[str]) -> Table:
    table = console.number_table(
        "device", *(title for name in names for title in (UNITS[name][0], "got", "error"))
    )
    for one in shown:
        cells = [cell for name in names for cell in figure_cells(one.figures[name], UNITS[name][1])]
        table.add_row(console.shorten(one.device), *cells)
    return table


def _carried_table(shown: Iterable[DeviceFidelity]) -> Table:
    """Seconds in which packets waited, and share of the rate that was carried then."""
    ways = [way for way in RATES if any(way in one.carried for one in shown)]
    table = console.number_table(
        "device", *(title for way in ways for title in (f"{way} while queued", "seconds"))
    )
    for one in shown:
        cells = []
        for way in ways:
            carried = one.carried.get(way)
            if carried is None or carried.share is None:
                cells += [NONE, NONE]
            elif carried.busy < _SHORT_SECONDS:
                cells += [NONE, f"{carried.busy:.1f}"]
            else:
                cells += [f"{carried.share:.1%}", f"{carried.busy:.1f}"]
        table.add_row(console.shorten(one.device), *cells)
    return table


def figure_cells(figure: Figure, scale: float = 1.0) -> tuple[str, str, str]:
    error = NONE if figure.error is None else f"{figure.error:+.1f}%"
    return number_text(figure.requested, scale), number_text(figure.got, scale), error


def number_text(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return NONE
    value *= scale
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
