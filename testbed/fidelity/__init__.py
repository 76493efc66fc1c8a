"""Fidelity of an emulation: what was requested of each device (`requested`) against what was measured
(`measuring`), and whether the run can be believed (`validity`)."""

from testbed.fidelity.measuring import SegmentClock, measure

__all__ = ["SegmentClock", "measure"]
