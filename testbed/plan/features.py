"""The features of a plan: a row of `PARTS` each, and their columns in a device's row."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.energy import planned as energy
from testbed.plan.part import PlanPart

PARTS = (
    PlanPart(
        attribute="energy",
        files=energy.files,
        lacks=energy.lacks,
        refusals=energy.refusals,
        device=energy.with_energy,
        remarks=energy.remarks,
        columns=energy.columns,
        group_columns=energy.group_columns,
        numbers=energy.NUMBERS,
        init=energy.with_meter,
        entry=energy.entry,
        brings_back=energy.has_charger,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FeatureColumns(energy.EnergyColumns):
    """Columns of a `DeviceRow` that features fill in."""
