"""Factories of records and devices, for the tests of watching."""

from __future__ import annotations

from agents import events
from testbed.watching.rows import OverviewDevice

STARTED = events.RunStarted(0.0, 1.7e9, ("pi-1", "pi-2"), ("pi-3",))


def update(
    client: str,
    arrived: float,
    staleness: int = 0,
    *,
    download: float = 1.0,
    training: float = 0.75,
    upload: float = 0.25,
    waited: float = 0.0,
    dispatch: int = 0,
) -> events.UpdateApplied:
    """An update that the aggregator applied `waited` seconds after it arrived; download, training and
    upload followed each other without a pause."""
    sent = arrived - upload
    begun = sent - training
    return events.UpdateApplied(
        client=client,
        sequence=1,
        kind="delta",
        base_version=0,
        applied_version=staleness + 1,
        staleness=staleness,
        weight=1.0,
        samples=100,
        steps=20,
        loss=1.0,
        bytes=2600,
        dispatched=begun - download,
        downloaded=begun,
        train_start=begun,
        train_end=sent,
        sent=sent,
        arrived=arrived,
        applied=arrived + waited,
        dispatch=dispatch,
    )


def fleet(count: int, group: str = "pi", cpu: float = 0.25) -> tuple[OverviewDevice, ...]:
    """Devices that are of equal importance in a fleet of ten."""
    return tuple(OverviewDevice(f"{group}-{k}", group, cpu, 0.1) for k in range(1, count + 1))
