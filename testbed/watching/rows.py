"""The rows of the screen, for devices or groups, filtered and sorted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from analysis.activity import OFFLINE, STATES, UNPOWERED
from analysis.figures import FIGURES
from analysis.tally import Tally
from testbed.watching.overview import OverviewDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of a device or a group."""

    name: str
    grouped: bool
    devices: tuple[str, ...]
    state: str
    """One of STATES; for a group, the most frequent of its devices."""
    online: int
    """Number of devices that are neither offline nor unpowered."""
    figures: Mapping[str, float]
    """Name of a figure -> value; NaN if it is not known."""

    @property
    def label(self) -> str:
        """Name as shown to the user. For a group, it includes the number of devices."""
        return f"{self.name} ×{len(self.devices)}" if self.grouped else self.name


_Key = Callable[[Row], float]


def _by(figure: str, sign: int) -> _Key:
    return lambda row: sign * row.figures[figure]


def _ratio(row: Row) -> float:
    """Return the device's share of the updates, divided by its importance."""
    importance = row.figures["importance"]
    return row.figures["share"] / importance if importance else importance


SORTS: dict[str, _Key | None] = {
    "": None,  # as in the topology
    "state": lambda row: STATES.index(row.state),
    **{one.title: _by(one.name, one.sort) for one in FIGURES.values() if one.sort},
    "share": lambda row: -_ratio(row),
}
"""Sort key by name of the order; None for the order of the topology. The most remarkable rows come
first."""


def rows(
    tally: Tally, devices: Sequence[OverviewDevice], at: float, *, grouped: bool, matching: str = ""
) -> list[Row]:
    """In the order of the topology, with `matching` in name, group or state."""
    members: dict[str, list[OverviewDevice]] = {}
    for device in devices:
        members.setdefault(device.group if grouped else device.name, []).append(device)
    pattern, matches = matching.casefold(), []
    for name, row_devices in members.items():
        row = _row(name, row_devices, tally, at, grouped=grouped)
        if any(pattern in text.casefold() for text in (name, row_devices[0].group, row.state)):
            matches.append(row)
    return matches


def in_order(unsorted: Iterable[Row], sort: str, *, reverse: bool = False) -> list[Row]:
    """Sort rows by one of SORTS. Rows with an unknown figure come last, even if `reverse` is true."""
    key = SORTS[sort]
    unsorted = list(unsorted)
    if key is None:
        return unsorted[::-1] if reverse else unsorted
    known = [row for row in unsorted if not isnan(key(row))]
    return sorted(known, key=key, reverse=reverse) + [row for row in unsorted if isnan(key(row))]


def _row(name: str, devices: Sequence[OverviewDevice], tally: Tally, at: float, *, grouped: bool) -> Row:
    tallies = [tally.devices[device.name] for device in devices]
    states = Counter(one.activity.now(at) for one in tallies)
    updates = [one.updates for one in tallies]
    return Row(
        name=name,
        grouped=grouped,
        devices=tuple(device.name for device in devices),
        state=states.most_common(1)[0][0],
        online=len(devices) - states[OFFLINE] - states[UNPOWERED],
        figures={
            one.name: one.group([one.of(device, tally, at) for device in tallies], updates)
            for one in FIGURES.values()
        },
    )
