"""Fidelity of an emulation. The resources requested for each device (`requested`) are compared with the
measured ones (`measuring`), and the run is judged (`validity`)."""

from testbed.fidelity.measuring import SegmentClock, measure

__all__ = ["SegmentClock", "measure"]
