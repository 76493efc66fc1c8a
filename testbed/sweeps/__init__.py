"""Sweeps. A sweep file says what changes from run to run (`cells`). The runs are executed one after
another or in parallel (`sweeping`, `worker`)."""

from testbed.sweeps.cells import Sweep, SweepCell, SweepFile, from_mapping, load, parse_path

__all__ = ["Sweep", "SweepCell", "SweepFile", "from_mapping", "load", "parse_path"]
