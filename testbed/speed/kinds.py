"""The kinds of work of a training, and the amount of each kind in a training step."""

from __future__ import annotations

from testbed.topology.fields import Model, NotNegative

KINDS = ("convolution", "depthwise", "matrix", "memory")
"""A device or host has a separate speed for each."""


class Work(Model):
    convolution: NotNegative
    """Gflop of convolutions that are not depthwise."""
    depthwise: NotNegative
    """Gflop of grouped convolutions, which are mainly depthwise."""
    matrix: NotNegative
    """Gflop."""
    memory: NotNegative
    """GB that all other operations read and write."""
