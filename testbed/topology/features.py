"""The features of a topology: keys of device groups, and checks of a whole topology."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from testbed.energy import schema as energy
from testbed.gpu.schema import GpuKeys
from testbed.real_devices import schema as real_devices
from testbed.secure import schema as secure
from testbed.segments import schema as segments
from testbed.selection import schema as selection
from testbed.topology.yamlfile import Where

if TYPE_CHECKING:  # it imports this module
    from testbed.topology.schema import Topology


class FeatureKeys(energy.EnergyKeys, GpuKeys, segments.SegmentKeys, real_devices.RealDeviceKeys):
    """Keys of a device group."""


class FeatureProfileKeys(energy.EnergyProfileKeys):
    """Keys of a device profile."""


TWIN_REMARKS: tuple[Callable[[Topology], str | None], ...] = (energy.twin_remark,)
"""Each returns what a twin of a run with this topology leaves out; None if nothing."""
LONG_FIGURES: tuple[str, ...] = (*energy.LONG_FIGURES,)
"""Keys of a device profile of which a table says only that they are known."""
CHECKS: tuple[Callable[[Topology], Iterator[tuple[Where, str]]], ...] = (
    real_devices.problems,
    secure.problems,
    segments.problems,
    selection.problems,
)
"""Each yields conflicts between keys, with their places."""
