"""Fidelity of an emulation: requested resources (`requested`) are compared with measured ones
(`measuring`), and the run is judged (`validity`)."""

from testbed.fidelity.measuring import measure
from testbed.fidelity.part import LegClock

__all__ = ["LegClock", "measure"]
