"""The features of a plan: a row of `PARTS` each, and their columns in a device's row."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.energy import planned as energy
from testbed.gpu import planned as gpu
from testbed.plan.part import PlanPart
from testbed.real_devices import planned as real_devices
from testbed.secure import schema as secure
from testbed.segments import planned as segments
from testbed.selection import schema as selection

PARTS = (
    PlanPart(notes=selection.notes),
    PlanPart(refusals=segments.refusals, place=segments.place, notes=segments.notes),
    PlanPart(refusals=real_devices.refusals, notes=real_devices.notes),
    PlanPart(notes=secure.notes),
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
        init=energy.init_settings,
        entry=energy.entry,
        brings_back=energy.has_charger,
    ),
    PlanPart(
        attribute="gpu",
        refusals=gpu.refusals,
        place=gpu.place,
        notes=gpu.notes,
        client=gpu.with_limits,
        entry=gpu.entry,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FeatureColumns(energy.EnergyColumns):
    """Columns of a `DeviceRow` that features fill in."""
