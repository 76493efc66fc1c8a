"""Configuration of a device's energy: power draw, battery and charger. Powers are in watts, energies in
joules, times in seconds of device time since the start of the run clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.energy.amounts import BYTES_PER_MB


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryConfig:
    """A battery. Levels are shares of the capacity, from 0 to 1."""

    capacity: float
    """Energy of the full battery, in joules."""
    initial: float = 1.0
    """Level at the start of the run."""
    power_off_at: float = 0.0
    """Level at or below which the device powers off."""
    return_at: float = 0.1
    """Level at or above which a device that has powered off starts again. It is above `power_off_at`."""
    loses_memory: bool = False
    """Whether a power-off erases the vectors that the client keeps on its disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargerConfig:
    """Power of a charger over time. Each power holds from its time to the next time."""

    times: Sequence[float]
    """Times in seconds, in increasing order; the first is 0."""
    watts: Sequence[float]
    """Power in watts from each of `times` on."""
    period: float | None = None
    """Seconds after which the powers repeat; None if the last power holds for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyConfig:
    """Energy settings of a device."""

    idle: float
    """Power in watts while the device is on, whatever else it does."""
    busy: float
    """Power in watts in addition to `idle` while the whole CPU share of the device is in use. If half of
    the CPU share is in use, half of this power is added."""
    sent: float = 0.0
    """Energy in joules per MB (10^6 bytes) sent over the device's link."""
    received: float = 0.0
    """Energy in joules per MB (10^6 bytes) received over the device's link."""
    battery: BatteryConfig | None = None
    """Battery; None if the device has mains power."""
    charger: ChargerConfig | None = None
    """Charger of the battery, plugged in at the start of the run; None if there is none."""

    @property
    def counts_bytes(self) -> bool:
        """Whether the device needs energy for the bytes that it sends or receives."""
        return self.sent > 0 or self.received > 0

    def transfer(self, *, sent: float, received: float) -> float:
        """Return the energy in joules to send and to receive these numbers of bytes."""
        return (self.sent * sent + self.received * received) / BYTES_PER_MB
