"""Processes that run once per host of a run, with more rights than a device."""
