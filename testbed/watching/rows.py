"""The rows of the screen, for devices or groups, filtered and sorted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan

from analysis.activity import OFFLINE, STATES, UNPOWERED
from analysis.tally import Tally
from testbed.watching.overview import OverviewDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of a device or a group. An unknown figure is NaN."""

    name: str
    grouped: bool
    """Whether the row is a group."""
    devices: tuple[str, ...]
    """Names of the devices."""
    state: str
    """One of STATES; for a group, the most frequent state of its devices."""
    online: int
    """Number of devices that are neither offline nor unpowered."""
    updates: int
    """Number of applied updates."""
    last: float
    """Staleness of the device's last update, in versions; NaN for a group."""
    mean: float
    """Mean staleness of the updates, in versions."""
    cpu: float
    """Requested share of a core, mean over the devices."""
    used: float
    """Share of a core used in the last seconds, mean over the devices. If a device waited, the used
    share is less than the requested share."""
    memory: float
    """Memory in use in bytes, mean over the devices."""
    up: float
    """Sending rate in bit/s, mean over the devices."""
    down: float
    """Receiving rate in bit/s, mean over the devices."""
    power: float
    """Power in watts, mean over the devices."""
    level: float
    """Level of the battery as a share of its capacity, mean over the devices."""
    share: float
    """Share of all applied updates."""
    importance: float
    """Sum of the importance p_i of the devices."""

    @property
    def label(self) -> str:
        """Name as shown to the user. For a group, it includes the number of devices."""
        return f"{self.name} ×{len(self.devices)}" if self.grouped else self.name


_Key = Callable[[Row], float]
SORTS: dict[str, _Key | None] = {
    "": None,  # as in the topology
    "state": lambda row: STATES.index(row.state),
    "updates": lambda row: -row.updates,
    "mean": lambda row: -row.mean,
    "used": lambda row: -row.used,
    "mem": lambda row: -row.memory,
    "share": lambda row: -_ratio(row),
    "batt": lambda row: row.level,
}
"""Name of a sort order -> function that returns a row's sort key; None for the order of the topology.
The most remarkable rows come first."""


def rows(
    tally: Tally, devices: Sequence[OverviewDevice], at: float, *, grouped: bool, matching: str = ""
) -> list[Row]:
    """Return the rows at device time `at`, in the order of the topology. Only rows with `matching` in
    their name, group or state are returned."""
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
    updates = sum(one.updates for one in tallies)
    return Row(
        name=name,
        grouped=grouped,
        devices=tuple(device.name for device in devices),
        state=states.most_common(1)[0][0],
        online=len(devices) - states[OFFLINE] - states[UNPOWERED],
        updates=updates,
        last=tallies[0].staleness if updates and not grouped else nan,
        mean=sum(one.staleness_sum for one in tallies) / updates if updates else nan,
        cpu=_mean(nan if one.cpu is None else one.cpu for one in tallies),
        used=_mean(one.usage.share(at) for one in tallies),
        memory=_mean(one.usage.memory(at) for one in tallies),
        up=_mean(one.usage.up(at) for one in tallies),
        down=_mean(one.usage.down(at) for one in tallies),
        power=_mean(one.energy.power for one in tallies),
        level=_mean(one.energy.level for one in tallies),
        share=updates / tally.updates if tally.updates else nan,
        importance=sum(device.importance for device in devices),
    )


def _mean(values: Iterable[float]) -> float:
    """Return the mean of the known values; NaN if there are none."""
    known = [value for value in values if not isnan(value)]
    return sum(known) / len(known) if known else nan


def _ratio(row: Row) -> float:
    """Return the device's share of the updates, divided by its importance."""
    return row.share / row.importance if row.importance else nan
