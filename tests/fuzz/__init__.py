"""Fuzzers of all readers of bytes from strangers: `python -m tests.fuzz --help`."""
