"""Types of actions, messages and records that features add, a row for each feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from agents.energy.messages import (
    Charge,
    EnergyOrder,
    EnergySample,
    EnergyStart,
    PowerSwitch,
    RoundEnergy,
    SetBattery,
    Source,
    Unplug,
)

Action = SetBattery | Charge | Unplug
AggregatorOrder = EnergyOrder
"""Has the aggregator write a record, by `record()`."""
ActionSource = Source
"""Source of actions that no user has ordered, in the records."""
Record = RoundEnergy
InitOrder = EnergyStart
"""Order to the init of a device."""
Telemetry = EnergySample | PowerSwitch
"""Messages of one device to the controller."""

MODULES = frozenset(kind.__module__ for kind in get_args(Action | Record))
"""Modules of the actions and records."""
PACKAGES = ("agents.pipeline.", "agents.secure.", "agents.selection.")
"""Packages with parts of the aggregator's core: making their objects has no side effects."""
INIT_ORDERS: Mapping[str, type[InitOrder]] = {"epoch": EnergyStart}
"""The key is a field that no other order has."""
TELEMETRY: Mapping[str, type[Telemetry]] = {"energy": EnergySample, "powered": PowerSwitch}
"""The key is a field that no other telemetry has."""
