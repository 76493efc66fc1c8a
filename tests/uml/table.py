"""What is measured of netem's links inside user-mode Linux. Rates in bit/s, times in seconds."""

from __future__ import annotations

from typing import TypedDict

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
FRAME = 1514
"""Bytes of a flood's packet on the wire."""


class Flood(TypedDict):
    """Seconds since the first packet was sent."""

    changed: list[float]
    """When the change from FAST to SLOW began, and when it was done."""
    arrivals: list[tuple[float, int]]
    """Of each packet that arrived, with its number."""


def full(flood: Flood, way: str) -> bool:
    """Whether the link was full before the change and for 200 ms at least after it, within 10 %."""
    times = [at for at, _ in flood["arrivals"]]
    begun, done = flood["changed"]
    spans = ((getattr(FAST, way), 0.1, begun), (getattr(SLOW, way), done, min(done + 0.5, times[-1])))
    return times[-1] > done + 0.2 and all(
        abs(8 * FRAME * sum(begin <= at < end for at in times) / (end - begin) / rate - 1) <= 0.1
        for rate, begin, end in spans
    )
