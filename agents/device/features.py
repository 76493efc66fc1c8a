"""Features that take part in a device's init."""

from __future__ import annotations

from agents.config import FeatureSettings
from agents.device.part import ClientHost, InitHalf, InitPart
from agents.energy import init as energy

PARTS: tuple[InitPart, ...] = (energy.make_half,)


def make_halves(settings: FeatureSettings, host: ClientHost) -> list[InitHalf]:
    made = (part(settings, host) for part in PARTS)
    return [half for half in made if half is not None]
