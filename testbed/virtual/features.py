"""Features that take part in virtual time, in the order in which they start."""

from __future__ import annotations

from testbed.energy import simulated as energy
from testbed.segments import simulated as segments
from testbed.virtual.part import VirtualPart

PARTS: tuple[VirtualPart, ...] = (segments.make_fleet, energy.make_fleet)
