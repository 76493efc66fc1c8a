"""What is measured of netem's links inside user-mode Linux. Rates in bit/s, times in seconds."""

from __future__ import annotations

from agents.config import Link

RATES = (
    (256_000, 512_000),
    (768_000, 1_600_000),
    (1_000_000, 8_000_000),
    (9_000_000, 9_000_000),
    (12_000_000, 12_000_000),
    (20_000_000, 50_000_000),
    (100_000_000, 100_000_000),
)
"""Up and down, as in testbed/catalog/fidelity-links.yaml."""
DELAYS = (0.005, 0.025, 0.085, 0.150, 0.300)
"""One way."""
LOSSES = (0.0, 0.01, 0.1)
LOSS_PACKETS = 5_000
JITTER = Link(rtt=0.040, jitter=0.010)
JITTER_PACKETS = 100
WHOLE = Link(up=4_000_000, down=8_000_000, rtt=0.020)
"""Measured as a device measures its link; so short that TCP's slow start is no part of it."""
MODEL, MODEL_RATE = 100_000, 2_000_000
"""A small model's bytes, and the rate both ways."""
FAST, SLOW = Link(10_000_000, 10_000_000, rtt=0.100), Link(1_000_000, 1_000_000, rtt=0.010)
"""A link and what it becomes while packets pass."""
WAYS = ("up", "down")
