"""Contents of a run's screen: facts known before the run starts, and rows of devices or groups."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

from agents import config
from analysis.activity import OFFLINE, STATES, UNPOWERED
from analysis.features import parts_of_run
from analysis.figures import FIGURES
from analysis.part import Facts
from analysis.tally import DeviceTally, Tally
from testbed.errors import reading_run
from testbed.plan import Plan
from testbed.run import provenance
from testbed.rundir.directory import RunDirectory
from testbed.topology import StopSettings, Topology, yamlfile
from testbed.traits import is_simulated, traits


@dataclass(frozen=True, slots=True)
class OverviewDevice:
    name: str
    group: str
    cpu: float | None = None
    """Share of one host core; None if there is no limit."""
    importance: float = math.nan
    """Weight p_i of the device in the objective; NaN before the data are partitioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    rule: str
    stop: config.StopConditions
    devices: tuple[OverviewDevice, ...]
    runtime: str = "process"
    dilation: float = 1.0
    """Host seconds per second of device time."""
    run: str = ""
    links: bool = False
    """Telemetry counts bytes that devices send and receive: those of containers, and of processes with
    links."""
    facts: Facts = field(default_factory=dict)
    """Content of the manifest, or the part that is known; empty if nothing is known."""
    parts: frozenset[str] = field(init=False)
    """Parts of the run (`analysis.features.parts_of_run`)."""
    cpus: dict[str, str] = field(default_factory=dict)
    """cpusets of `infrastructure` and `devices`; empty if unknown or on another host."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", frozenset(parts_of_run(self.facts)))

    @property
    def is_virtual(self) -> bool:
        return is_simulated(self.runtime)

    @property
    def has(self) -> frozenset[str]:
        """Parts of the run that figures need (`analysis.part.DeviceFigure.needs`)."""
        found = {
            "": True,
            # Virtual time has no telemetry, and processes without links count no bytes.
            "telemetry": not self.is_virtual,
            "links": self.links,
        }
        return self.parts | {name for name, has in found.items() if has}

    def progress(self, at: float, updates: int) -> float:
        """From 0 to 1, at `at` seconds of device time. The stop condition that is closest to being met
        counts; 0 if there is only an accuracy."""
        ends = ((at, self.stop.after), (updates, self.stop.updates))
        return min(1.0, max((now / end for now, end in ends if end), default=0.0))

    def tally(self) -> Tally:
        """Return a tally without any records."""
        return Tally(
            {
                one.name: DeviceTally(planned_cpu=one.cpu, importance=one.importance)
                for one in self.devices
            },
            self.facts,
        )


def overview_of_plan(topology: Topology, plan: Plan, run: str) -> Overview:
    return Overview(
        rule=topology.rule.name,
        stop=topology.stop.build(),
        devices=tuple(OverviewDevice(d.name, d.group, d.cpu) for d in plan.devices),
        runtime=plan.runtime,
        dilation=plan.dilation,
        run=run,
        links=_counts_bytes(plan.runtime, linked=plan.shaper is not None),
        facts=provenance.plan_facts(plan),
    )


def read_overview(directory: RunDirectory) -> Overview | None:
    """None if the run's devices are not known yet. Raises BadInputError."""
    manifest = directory.read_manifest()
    if "devices" not in manifest:
        return None
    with reading_run(directory.path):
        topology = yamlfile.read(directory.topology).data
        return Overview(
            rule=manifest["rule"],
            stop=StopSettings.model_validate(
                topology["stop"] if isinstance(topology, dict) else None
            ).build(),
            devices=tuple(
                OverviewDevice(name, d["group"], d["cpu"], d["importance"])
                for name, d in manifest["devices"].items()
            ),
            runtime=manifest["runtime"],
            dilation=manifest["dilation"],
            run=directory.run,
            links=_counts_bytes(manifest["runtime"], linked=bool(manifest.get("shaper"))),
            facts=manifest,
            cpus=_cpus(manifest),
        )


def _counts_bytes(runtime: str, *, linked: bool) -> bool:
    counts = traits(runtime).counts_bytes
    return counts == "always" or (counts == "linked" and linked)


def _cpus(manifest: dict[str, Any]) -> dict[str, str]:
    """cpusets by component; empty if they are on another host."""
    cpus = manifest.get("cpus") if manifest["host"]["name"] == platform.node() else None
    return {name: value for name, value in (cpus or {}).items() if isinstance(value, str)}


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
