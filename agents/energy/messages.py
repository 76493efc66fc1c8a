"""Actions on batteries, messages on energy, and records of it in `events.jsonl`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from agents.fields import (
    AggregatorOrderFields,
    Count,
    DeviceTime,
    FeatureAction,
    Fields,
    Name,
    Seconds,
    Share,
)

MAX_WATTS = 1e12
_MAX_CHARGER_WATTS = 1e9
Watts = Annotated[float, Meta(ge=0, le=MAX_WATTS)]
Joules = Annotated[float, Meta(ge=0, le=1e18)]
Source = Literal["battery"]
"""Source of power-offs and returns in the records."""


class SetBattery(FeatureAction, frozen=True, tag="battery"):
    """A device that then has too little power powers off at once."""

    level: Share
    """Share of the battery's capacity."""


class Charge(FeatureAction, frozen=True, omit_defaults=True):
    """Plug in a charger."""

    sets: ClassVar[str | None] = "charger"
    watts: Annotated[float, Meta(ge=0, le=_MAX_CHARGER_WATTS)] | None = None
    """Constant watts; None for the device's own charger."""


class Unplug(FeatureAction, frozen=True):
    """Unplug the charger."""

    sets: ClassVar[str | None] = "charger"


@dataclass(frozen=True, slots=True)
class RoundEnergy:
    """Energy that a device consumed for one round. A round has the device's model, its training, and its
    update. The energy of a round consists of the energy to receive the model, of everything that the
    device consumed from the start of the training to its end, transfers of other messages excluded, and
    of the energy to send the update. Only runs that count energy have this record. A round that is in
    progress at the end of the run has none."""

    event: ClassVar[str] = "energy"
    at: float
    """Time at which the device sent the update, or at which the round was lost."""
    client: str
    dispatch: int
    """Number of the dispatch that began the round. `client` and `dispatch` together identify the update.
    """
    energy_j: float
    """Energy in joules."""
    outcome: str
    """`sent`: the device began to send the update. The update may still be lost on its way; then it has
    no record `update`. `lost`: the round ended before, for instance because the device powered off."""
    level: float = math.nan
    """Battery level at `at`, from 0 to 1; NaN if the device has no battery."""


class EnergyOrder(AggregatorOrderFields, frozen=True):
    """Record the energy of a round, as `RoundEnergy`."""

    at: DeviceTime
    client: Name
    dispatch: Count
    energy_j: Joules
    outcome: Literal["sent", "lost"]
    level: Share | None = None

    def record(self) -> RoundEnergy:
        level = math.nan if self.level is None else self.level
        return RoundEnergy(self.at, self.client, self.dispatch, self.energy_j, self.outcome, level)


class EnergyFigures(Fields, frozen=True, kw_only=True):
    """Totals are in joules since the start of the run clock."""

    consumed: Joules
    """Includes `transferred`."""
    transferred: Joules
    """Energy that the device has consumed to send and receive bytes."""
    power: Watts
    """Mean since the previous sample."""
    is_on: bool = True
    level: Share | None = None
    """Level of the battery, from 0 to 1; None if the device has no battery."""
    supplied: Joules | None = None
    """From the charger, consumed or stored; None without a battery."""
    charging: Watts | None = None
    """Offered by the charger now; None without a battery."""


class EnergyStart(Fields, frozen=True):
    """Have the init of `device` count its energy, at each start of the run clock."""

    device: Name
    epoch: DeviceTime
    """Monotonic time of the aggregator's host at device time 0."""
    at: Seconds = 0.0
    """Device time of the start."""
    energy: EnergyFigures | None = None
    """Energy at the end of the run's earlier part; None if the run was not resumed."""


class EnergySample(Fields, frozen=True):
    """`at`: seconds on the host's monotonic clock, in virtual time seconds of device time since the
    start of the run clock."""

    device: Name
    at: Seconds
    energy: EnergyFigures


class PowerSwitch(Fields, frozen=True):
    """Because the battery is too low, or charged. `at`: seconds on the host's monotonic clock."""

    device: Name
    at: Seconds
    powered: bool
    level: Share
    """Level of the battery, from 0 to 1."""
