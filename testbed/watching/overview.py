"""Facts of a run that are known before it starts, from its plan or its directory."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field
from typing import Any

from agents import config
from analysis import figures
from analysis.tally import DeviceTally, SegmentTally, Tally
from testbed.errors import reading_run
from testbed.plan import Plan
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
    energy: bool = False
    batteries: bool = False
    segments: tuple[str, ...] = ()
    cpus: dict[str, str] = field(default_factory=dict)
    """cpusets of `infrastructure` and `devices`; empty if unknown or on another host."""

    @property
    def is_virtual(self) -> bool:
        return is_simulated(self.runtime)

    @property
    def has(self) -> frozenset[str]:
        """Parts of the run that figures need (`analysis.figures.DeviceFigure.needs`)."""
        found = {
            "": True,
            # Virtual time has no telemetry, and processes without links count no bytes.
            "telemetry": not self.is_virtual,
            "links": self.links,
            "energy": self.energy,
            "batteries": self.batteries,
        }
        return frozenset(name for name, has in found.items() if has)

    def progress(self, at: float, updates: int) -> float:
        """From 0 to 1, at `at` seconds of device time. The stop condition that is closest to being met
        counts; 0 if there is only an accuracy."""
        ends = ((at, self.stop.after), (updates, self.stop.updates))
        return min(1.0, max((now / end for now, end in ends if end), default=0.0))

    def tally(self) -> Tally:
        """Return a tally of the run's devices and segments without any records."""
        return Tally(
            {
                one.name: DeviceTally(planned_cpu=one.cpu, importance=one.importance)
                for one in self.devices
            },
            {name: SegmentTally() for name in self.segments},
        )


def from_plan(topology: Topology, plan: Plan, run: str) -> Overview:
    return Overview(
        rule=topology.rule.name,
        stop=topology.stop.build(),
        devices=tuple(OverviewDevice(d.name, d.group, d.cpu) for d in plan.devices),
        runtime=plan.runtime,
        dilation=plan.dilation,
        run=run,
        links=_counts_bytes(plan.runtime, linked=plan.shaper is not None),
        energy=any(d.energy is not None for d in plan.devices),
        batteries=any(d.energy is not None and d.energy.battery is not None for d in plan.devices),
        segments=tuple(plan.segments),
    )


def read(directory: RunDirectory) -> Overview | None:
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
            energy="energy" in (has := figures.has(manifest)),
            batteries="batteries" in has,
            segments=tuple(manifest.get("segments", ())),
            cpus=_cpus(manifest),
        )


def _counts_bytes(runtime: str, *, linked: bool) -> bool:
    counts = traits(runtime).counts_bytes
    return counts == "always" or (counts == "linked" and linked)


def _cpus(manifest: dict[str, Any]) -> dict[str, str]:
    """cpusets by component; empty if they are on another host."""
    cpus = manifest.get("cpus") if manifest["host"]["name"] == platform.node() else None
    return {name: value for name, value in (cpus or {}).items() if isinstance(value, str)}
