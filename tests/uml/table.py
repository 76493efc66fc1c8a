"""Measurements inside user-mode Linux: netem's links (rates in bit/s, times in seconds), and limits of
cgroup v2."""

from __future__ import annotations

from typing import TypedDict

from agents.config import AccessLink
from agents.fields import NO_LIMIT
from agents.wire.messages import CgroupLimits

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
JITTER = AccessLink(rtt=0.040, jitter=0.010)
JITTER_PACKETS = 100
WHOLE = AccessLink(up=4_000_000, down=8_000_000, rtt=0.020)
"""Link that is measured as a device measures its own; so short a delay that TCP's slow start does not
count."""
MODEL, MODEL_RATE = 100_000, 2_000_000
"""A small model's bytes, and the rate both ways."""
FAST, SLOW = (
    AccessLink(10_000_000, 10_000_000, rtt=0.100),
    AccessLink(1_000_000, 1_000_000, rtt=0.010),
)
"""A link and what it becomes while packets pass."""
WAYS = ("up", "down")
FRAME = 1514
"""Bytes of a flood's packet on the wire."""

LIMITS = {
    "as a group begins": (
        {},
        CgroupLimits(quota=NO_LIMIT, period=100_000, weight=100, memory=NO_LIMIT, swap=NO_LIMIT),
    ),
    "as an engine sets them": (
        {
            "cpu.max": "5000 20000",
            "cpu.weight": "97",
            "memory.max": str(2**29 + 1),  # the kernel takes whole pages
            "memory.swap.max": "0",
        },
        CgroupLimits(quota=5_000, period=20_000, weight=97, memory=2**29, swap=0),
    ),
    "swap's limit lost": (
        {"memory.swap.max": "max"},
        CgroupLimits(quota=5_000, period=20_000, weight=97, memory=2**29, swap=NO_LIMIT),
    ),
    "without a quota": (
        {"cpu.max": "max", "cpu.weight": "1", "memory.swap.max": "0"},
        CgroupLimits(quota=NO_LIMIT, period=20_000, weight=1, memory=2**29, swap=0),
    ),
}
"""Files of a control group and what is written into them, and the limits that it has then. This kernel
has no cpuset."""


class Flood(TypedDict):
    """Seconds since the first packet was sent."""

    changed: list[float]
    """When the change from FAST to SLOW began, and when it was done."""
    arrivals: list[tuple[float, int]]
    """Arrival time and number of each packet."""


def full(flood: Flood, way: str) -> bool:
    """Whether the link was full before the change and for 200 ms at least after it, within 10 %."""
    times = [at for at, _ in flood["arrivals"]]
    begun, done = flood["changed"]
    spans = ((getattr(FAST, way), 0.1, begun), (getattr(SLOW, way), done, min(done + 0.5, times[-1])))
    return times[-1] > done + 0.2 and all(
        abs(8 * FRAME * sum(begin <= at < end for at in times) / (end - begin) / rate - 1) <= 0.1
        for rate, begin, end in spans
    )
