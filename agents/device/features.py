"""Features that take part in a device's init."""

from __future__ import annotations

from agents.device.part import InitPart
from agents.energy import init as energy

PARTS: tuple[InitPart, ...] = (InitPart(energy.make_half),)
