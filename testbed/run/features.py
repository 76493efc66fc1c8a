"""Parts of features in the controller's core, a row each."""

from __future__ import annotations

from collections.abc import Callable

from testbed.energy.controlled import ControlledEnergy
from testbed.run.part import ControlledRun, ControllerPart
from testbed.segments.controlled import ControlledSegments

PARTS: tuple[Callable[[ControlledRun], ControllerPart], ...] = (ControlledEnergy, ControlledSegments)
