"""Fidelity of an emulation: requested resources (`requested`) are compared with measured ones
(`measuring`), and the run is judged (`validity`)."""

from testbed.fidelity.measuring import SegmentClock, measure

__all__ = ["SegmentClock", "measure"]
