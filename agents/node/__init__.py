"""What runs once on each host of a run, with more rights than a device."""
