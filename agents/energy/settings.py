"""A device's power draw, battery and charger. Powers are in watts, energies in joules, times in seconds
of device time since the start of the run clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.energy.amounts import BYTES_PER_MB


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryConfig:
    """Levels are shares of the capacity, from 0 to 1."""

    capacity: float
    """Joules of the full battery."""
    initial: float = 1.0
    """Level at the start of the run."""
    power_off_at: float = 0.0
    """Level at or below which the device powers off."""
    return_at: float = 0.1
    """Level at or above which a device that has powered off starts again. It is above `power_off_at`."""
    loses_memory: bool = False
    """A power-off erases the vectors that the client keeps on its disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargerConfig:
    """Each power holds from its time to the next."""

    times: Sequence[float]
    """Seconds in increasing order; the first is 0."""
    watts: Sequence[float]
    """Power in watts from each of `times` on."""
    period: float | None = None
    """Seconds after which the powers repeat; None if the last one holds for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyConfig:
    idle: float
    """Watts while the device is on, whatever else it does."""
    busy: float
    """Watts beside `idle` while the whole CPU share of the device is in use; half of it for half of the
    share."""
    sent: float = 0.0
    """Joules per MB (10^6 bytes) over the device's link."""
    received: float = 0.0
    """Joules per MB (10^6 bytes) over the device's link."""
    battery: BatteryConfig | None = None
    """None for mains power."""
    charger: ChargerConfig | None = None
    """Plugged in at the start of the run."""

    @property
    def counts_bytes(self) -> bool:
        """Bytes that the device sends or receives need energy."""
        return self.sent > 0 or self.received > 0

    def transfer(self, *, sent: float, received: float) -> float:
        """Joules for these bytes."""
        return (self.sent * sent + self.received * received) / BYTES_PER_MB
