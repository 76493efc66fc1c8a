"""Segments of the network, which devices share."""
