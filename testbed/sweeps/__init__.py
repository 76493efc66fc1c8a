"""Sweeps: a file with what changes from run to run (`cells`), and its runs, one after another or in
parallel (`sweeping`, `worker`)."""

from testbed.sweeps.cells import Cell, Sweep, SweepFile, load, of, parse_path

__all__ = ["Cell", "Sweep", "SweepFile", "load", "of", "parse_path"]
