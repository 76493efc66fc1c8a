"""Powers in microwatts and energies in femtojoules, whole numbers, so that sums are exact: one microwatt
during one nanosecond is one femtojoule."""

from __future__ import annotations

from fractions import Fraction

Microwatts = int
Femtojoules = int

MICROWATTS_PER_WATT = 10**6
FEMTOJOULES_PER_JOULE = 10**15
BYTES_PER_MB = 10**6


def microwatts(watts: float) -> Microwatts:
    """Convert `watts` to the nearest microwatt."""
    return round(Fraction(repr(float(watts))) * MICROWATTS_PER_WATT)


def femtojoules(joules: float) -> Femtojoules:
    """Convert `joules` to the nearest femtojoule."""
    return round(Fraction(repr(float(joules))) * FEMTOJOULES_PER_JOULE)


def femtojoules_per_byte(joules_per_mb: float) -> Femtojoules:
    """Convert joules per MB (10^6 bytes) to the nearest femtojoule per byte."""
    return round(Fraction(repr(float(joules_per_mb))) * FEMTOJOULES_PER_JOULE / BYTES_PER_MB)


def to_watts(power: Microwatts) -> float:
    return power / MICROWATTS_PER_WATT


def to_joules(energy: Femtojoules) -> float:
    return energy / FEMTOJOULES_PER_JOULE
