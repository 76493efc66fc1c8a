"""Interface of what features add to the fidelity of a run (`testbed.fidelity.features` lists them)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agents import events
from agents.timing.clock import in_device_time
from testbed.rundir.live_files import Samples

if TYPE_CHECKING:
    from testbed.fidelity.host_load import HostSample
    from testbed.plan.agent_configs import RunSpec


@dataclass(frozen=True, slots=True)
class LegClock:
    """Clock of a leg of a run."""

    epoch: float
    """The samples' monotonic clock at device time 0, in seconds."""
    begin: float = 0.0
    """Device time in seconds; above 0 if the run was resumed."""
    end: float = math.inf
    """Device time at which the leg ends, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts about the part of a run since the last start of its clock."""

    spec: RunSpec
    records: Sequence[events.Record]
    """Records of the whole run."""
    clock: LegClock
    """In device time."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    """Other host -> maximum error of the times recorded for its devices, in seconds."""
    loads: Mapping[str, Sequence[HostSample]] = field(default_factory=dict)
    """Other host -> samples of its load."""

    def samples(self) -> Iterator[dict[str, Any]]:
        """Telemetry, in device time."""
        dilation = self.spec.plan.dilation
        for one in Samples(self.spec.directory.telemetry).read():
            yield in_device_time(one, dilation)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFigures:
    feature: str
    """Key of `entry` and of the values in `devices`."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """Entry in `fidelity.json`; empty if there is none."""
    is_in_manifest: bool = False
    """Whether `entry` is also in the manifest."""
    devices: Mapping[str, Any] = field(default_factory=dict)
    """Device -> part of the device's entry in `fidelity.json`."""
    titles: Sequence[str] = ()
    """Titles of the columns of `rows`, for people."""
    rows: Sequence[Sequence[str]] = ()
    summary: str = ""
    """Part of a sentence; empty if there is none."""
    reasons: Sequence[str] = ()
    """Sentences against the run."""
    unjudged: Sequence[tuple[str, str]] = ()
    """Device, and a sentence such as `its clock: not measured`."""
