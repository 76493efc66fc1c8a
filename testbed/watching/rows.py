"""The rows that a user looks at: of devices or of groups, filtered and sorted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan

from testbed.watching.activity import OFFLINE, STATES
from testbed.watching.overview import Device
from testbed.watching.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A device, or a group with what its devices come to. NaN is what is not known."""

    name: str
    grouped: bool
    devices: tuple[str, ...]
    state: str
    """One of STATES: of a group, that of most of its devices."""
    online: int
    """Devices that are not offline."""
    updates: int
    last: float
    """Staleness of the last update, in versions; of a group NaN."""
    mean: float
    """Staleness."""
    cpu: float
    """Requested share of a core, mean over the devices."""
    used: float
    """Share of a core that it had in the last seconds: less than requested where it had to wait."""
    memory: float
    """Bytes in use, mean over the devices, as the next two."""
    up: float
    """bit/s, as `down`."""
    down: float
    share: float
    """Of all updates applied."""
    importance: float

    @property
    def label(self) -> str:
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
}
"""By the name of a column: what brings the most remarkable rows to the top."""


def rows(
    tally: Tally, devices: Sequence[Device], at: float, *, grouped: bool, matching: str = ""
) -> list[Row]:
    """At device time `at`, as in the topology; those with `matching` in the name, group or state."""
    members: dict[str, list[Device]] = {}
    for device in devices:
        members.setdefault(device.group if grouped else device.name, []).append(device)
    wanted, found = matching.casefold(), []
    for name, of_row in members.items():
        row = _row(name, of_row, tally, at, grouped=grouped)
        if any(wanted in text.casefold() for text in (name, of_row[0].group, row.state)):
            found.append(row)
    return found


def in_order(found: Iterable[Row], sort: str, *, reverse: bool = False) -> list[Row]:
    """Sorted by one of SORTS; what has no figure comes last either way."""
    key = SORTS[sort]
    found = list(found)
    if key is None:
        return found[::-1] if reverse else found
    known = [row for row in found if not isnan(key(row))]
    return sorted(known, key=key, reverse=reverse) + [row for row in found if isnan(key(row))]


def _row(name: str, devices: Sequence[Device], tally: Tally, at: float, *, grouped: bool) -> Row:
    tallies = [tally.devices[device.name] for device in devices]
    states = Counter(one.activity.now(at) for one in tallies)
    updates = sum(one.updates for one in tallies)
    return Row(
        name=name,
        grouped=grouped,
        devices=tuple(device.name for device in devices),
        state=states.most_common(1)[0][0],
        online=len(devices) - states[OFFLINE],
        updates=updates,
        last=tallies[0].staleness if updates and not grouped else nan,
        mean=sum(one.staleness_sum for one in tallies) / updates if updates else nan,
        cpu=_mean(nan if one.cpu is None else one.cpu for one in tallies),
        used=_mean(one.usage.share(at) for one in tallies),
        memory=_mean(one.usage.memory(at) for one in tallies),
        up=_mean(one.usage.up(at) for one in tallies),
        down=_mean(one.usage.down(at) for one in tallies),
        share=updates / tally.updates if tally.updates else nan,
        importance=sum(device.importance for device in devices),
    )


def _mean(values: Iterable[float]) -> float:
    """Of those that are known."""
    known = [value for value in values if not isnan(value)]
    return sum(known) / len(known) if known else nan


def _ratio(row: Row) -> float:
    """How much more a device gives than its importance says."""
    return row.share / row.importance if row.importance else nan
