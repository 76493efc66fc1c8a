"""Measured figures of the real devices of a run: evidence, without an error, as nothing was
requested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from agents import events
from testbed.fidelity.figures import rounded
from testbed.fidelity.host_load import HostSample, mean
from testbed.fidelity.part import Evidence, FeatureFigures
from testbed.fidelity.table import MAX_ROWS, NONE, UNITS, number_text
from testbed.rundir.live_files import Samples

FIGURES = ("step", "up", "down", "rtt", "jitter", "clock", "foreign")
_TITLES = (
    *("real device", "step ms", *(UNITS[name][0] for name in ("up", "down", "rtt"))),
    *("clock ms", "other work"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealDeviceFigures:
    """A figure is None if it was not measured."""

    device: str
    host: str
    """SSH destination."""
    step: float | None
    """Median duration of a local training step in the run, in seconds."""
    up: float | None
    """Rate of one encrypted connection to this host before the run, in bit/s."""
    down: float | None
    """Rate of one encrypted connection from this host before the run, in bit/s."""
    rtt: float | None
    """Median round trip to the broker's port before the run, in seconds."""
    jitter: float | None
    """Standard deviation of these round trips, in seconds."""
    clock: float | None
    """Maximum error of the device's times in the run, in seconds."""
    foreign: float | None
    """Mean share of the device's CPUs that other work took during the run."""

    def unjudged(self) -> str | None:
        """Sentence on what was not measured; None if all was."""
        lacking = {
            "its clock": self.clock,
            "its link": self.rtt,
            "its load": self.foreign,
        }
        missing = [name for name, value in lacking.items() if value is None]
        return f"{', '.join(missing)}: not measured" if missing else None

    def row(self) -> tuple[str, ...]:
        return (
            self.device,
            number_text(self.step, 1e3),
            *(number_text(getattr(self, name), UNITS[name][1]) for name in ("up", "down", "rtt")),
            NONE if self.clock is None else f"±{number_text(self.clock, 1e3)}",
            NONE if self.foreign is None else f"{self.foreign:.0%}",
        )

    def as_dict(self) -> dict[str, Any]:
        return {"host": self.host, **{name: rounded(getattr(self, name)) for name in FIGURES}}


def figures(evidence: Evidence) -> FeatureFigures | None:
    spec = evidence.spec
    found = of_run(
        {one.name: str(one.host) for one in spec.plan.real_devices},
        evidence.records,
        Samples(spec.directory.telemetry).read(),
        evidence.clocks,
        evidence.loads,
    )
    return shown(found) if found else None


def shown(found: Sequence[RealDeviceFigures]) -> FeatureFigures:
    return FeatureFigures(
        feature="real",
        entry={one.device: one.as_dict() for one in found},
        is_in_manifest=True,
        titles=_TITLES,
        rows=[one.row() for one in found[:MAX_ROWS]],
        unjudged=[(one.device, lack) for one in found if (lack := one.unjudged())],
    )


def of_run(
    hosts: Mapping[str, str],
    records: Iterable[events.Record],
    samples: Iterable[Mapping[str, Any]],
    clocks: Mapping[str, float],
    loads: Mapping[str, Sequence[HostSample]],
) -> tuple[RealDeviceFigures, ...]:
    """`hosts`: device -> SSH destination. `samples`: telemetry. `clocks`: SSH destination -> maximum
    error of the times, in seconds. `loads`: samples of the load, by SSH destination."""
    if not hosts:
        return ()
    steps: dict[str, list[float]] = {}
    for record in records:
        if isinstance(record, events.UpdateApplied) and record.client in hosts and record.steps > 0:
            took = record.train_end - record.train_start
            steps.setdefault(record.client, []).append(took / record.steps)
    probes = {
        str(one.get("device")): probe
        for one in samples
        if one.get("device") in hosts and isinstance(probe := one.get("probe"), Mapping)
    }
    return tuple(
        RealDeviceFigures(
            device=name,
            host=host,
            step=median(steps[name]) if name in steps else None,
            clock=clocks.get(host),
            foreign=mean(loads.get(host, ()), "foreign"),
            **{key: probes.get(name, {}).get(key) for key in ("up", "down", "rtt", "jitter")},
        )
        for name, host in hosts.items()
    )
