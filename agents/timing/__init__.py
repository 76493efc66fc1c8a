"""Clocks, times in whole nanoseconds, and random durations."""
