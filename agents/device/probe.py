"""What a device's link gives, measured through it before the run clock starts."""

from __future__ import annotations

import statistics
import time

from agents import speedtest
from agents.config import Link

_ROUND_TRIPS = 5
_PATIENCE = 30.0
"""Seconds until the router must answer."""


def measure(asked: Link, host: str, port: int) -> dict[str, float]:
    """`up` and `down` in bit/s of TCP payload where a rate is asked for, `rtt` in seconds: the median of
    some round trips. Raises OSError."""
    _await(host, port)
    found = {"rtt": statistics.median(speedtest.round_trip(host, port) for _ in range(_ROUND_TRIPS))}
    if asked.up is not None:
        found["up"] = speedtest.upload(host, asked.up)
    if asked.down is not None:
        found["down"] = speedtest.download(host, asked.down)
    return found


def _await(host: str, port: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            speedtest.round_trip(host, port)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
