"""Measurement of links: trains of packets, the kernel's timestamps, the server to measure against."""
