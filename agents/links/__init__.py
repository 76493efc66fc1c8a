"""Measurement of links: packet trains, timestamps of the kernel, and the server for measurements."""
