"""The kinds of work that training consists of, and how much of each a step takes."""

from __future__ import annotations

from testbed.topology.fields import Model, NotNegative

KINDS = ("convolution", "depthwise", "matrix", "memory")
"""Of work. Each has a speed of its own on a device, and on this host."""


class Work(Model):
    """How much of each kind."""

    convolution: NotNegative
    """Gflop of convolutions, depthwise ones excepted."""
    depthwise: NotNegative
    """Gflop of convolutions in groups, depthwise ones above all."""
    matrix: NotNegative
    """Gflop of products of matrices."""
    memory: NotNegative
    """GB that all other operations read and write."""
