"""Facts of a run that are known before it begins, from its plan or its directory."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field
from typing import Any

from agents import config
from testbed.errors import reading_run
from testbed.plan import Plan
from testbed.rundir.directory import RunDirectory
from testbed.topology import StopSettings, Topology, yamlfile
from testbed.traits import is_simulated, traits
from testbed.watching.tally import DeviceTally, Tally


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    group: str
    cpu: float | None = None
    """Share of one host core."""
    importance: float = math.nan
    """p_i: its part in the objective; NaN before the data have been dealt out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    rule: str
    stop: config.StopConditions
    devices: tuple[Device, ...]
    runtime: str = "process"
    dilation: float = 1.0
    """Seconds of the host that make one of device time."""
    run: str = ""
    links: bool = False
    """Whether telemetry counts the bytes that devices send and receive: in containers, and where
    processes have links."""
    cpus: dict[str, str] = field(default_factory=dict)
    """CPU numbers of the `infrastructure` and of the `devices`, where these are of this host."""

    @property
    def virtual(self) -> bool:
        """Whether the clock is simulated: device time goes as fast as it can be computed."""
        return is_simulated(self.runtime)

    def gone(self, at: float, updates: int) -> float:
        """What share of the run is over at `at`, after so many updates, by what may stop it first; 0
        where only an accuracy does."""
        ends = ((at, self.stop.after), (updates, self.stop.updates))
        return min(1.0, max((now / end for now, end in ends if end), default=0.0))

    def tally(self) -> Tally:
        """An empty one, of these devices."""
        return Tally({device.name: DeviceTally(planned_cpu=device.cpu) for device in self.devices})


def of_plan(topology: Topology, plan: Plan, run: str) -> Overview:
    """Of a run that is to be launched."""
    return Overview(
        rule=topology.rule.name,
        stop=topology.stop.build(),
        devices=tuple(Device(d.name, d.group, d.cpu) for d in plan.devices),
        runtime=plan.runtime,
        dilation=plan.dilation,
        run=run,
        links=_counted(plan.runtime, linked=plan.shaper is not None),
    )


def read(directory: RunDirectory) -> Overview | None:
    """Of a run that has been launched; None where it is not yet known what it is made of.

    Raises BadInputError.
    """
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
                Device(name, d["group"], d["cpu"], d["importance"])
                for name, d in manifest["devices"].items()
            ),
            runtime=manifest["runtime"],
            dilation=manifest["dilation"],
            run=directory.run,
            links=_counted(manifest["runtime"], linked=bool(manifest.get("shaper"))),
            cpus=_cpus(manifest),
        )


def _counted(runtime: str, *, linked: bool) -> bool:
    counts = traits(runtime).counts_bytes
    return counts == "always" or (counts == "linked" and linked)


def _cpus(manifest: dict[str, Any]) -> dict[str, str]:
    """By component of the run; none where they are another host's."""
    cpus = manifest.get("cpus") if manifest["host"]["name"] == platform.node() else None
    return {name: value for name, value in (cpus or {}).items() if isinstance(value, str)}
