"""Clocks, whole nanoseconds, random durations."""
