"""Fidelity of an emulation: the resources requested for each device (`requested`) compared with the
measured ones (`measuring`), and whether the run is valid (`validity`)."""

from testbed.fidelity.measuring import SegmentClock, measure

__all__ = ["SegmentClock", "measure"]
