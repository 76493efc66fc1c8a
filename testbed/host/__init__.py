"""This machine, as runs use it: Docker engine, kernel, signals, processes, cache."""
