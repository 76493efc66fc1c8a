"""The kinds of work that training consists of, and the amount of each in a training step."""

from __future__ import annotations

from testbed.topology.fields import Model, NotNegative

KINDS = ("convolution", "depthwise", "matrix", "memory")
"""Kinds of work. A device or host has a separate speed for each kind."""


class Work(Model):
    """Amount of each kind of work."""

    convolution: NotNegative
    """Gflop of convolutions, except depthwise ones."""
    depthwise: NotNegative
    """Gflop of convolutions in groups, mainly depthwise ones."""
    matrix: NotNegative
    """Gflop of matrix products."""
    memory: NotNegative
    """GB that all other operations read and write."""
