"""What a device's link gives, measured through it before the run clock starts."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence

from agents import packettrain, turns
from agents.config import Link
from agents.device import echo
from agents.messages import LinkFigures

_MOST = 500
"""Round trips."""
_SECONDS = 2.0
"""For them."""
_CLOSEST = 0.002
"""Seconds between them, at least."""
_SHARE = 0.25
"""Of the link that they may take, so that none waits for another."""
_LATE = 1.0
"""Seconds after which an answer is lost, beside what the link delays it."""
_TRAINS, _GOOD = 4, 0.98
"""Trains at most, until one is as good: a busy host makes them slower, and nothing makes them faster."""


def measure(asked: Link, host: str, shared: str, patience: float) -> LinkFigures:
    """Through `asked`, to the router `host`: `rtt` in seconds, `jitter` (their standard deviation) and
    `loss` (share), all of round trips; `up` and `down` in bit/s on the wire where rates are asked.
    `shared` names the link, for all that measure it in turn; `patience` is how many seconds until the
    router answers. Raises OSError.
    """
    _await(host, patience)
    late = _LATE + asked.rtt + 2 * asked.jitter
    with turns.turn(host, shared):
        count, every = pace(asked, echo.SIZE + 14)
        trips = echo.round_trips(socket.gethostbyname(host), count, every, late)
        answered = [trip for trip in trips if trip is not None]
        found = {"loss": 1 - len(answered) / len(trips), **told(asked, answered)}
        if asked.up is not None:
            found["up"] = _fastest(packettrain.upload, host, asked.up, late)
        if asked.down is not None:
            found["down"] = _fastest(packettrain.download, host, asked.down, late)
    return LinkFigures(**found)


def pace(asked: Link, size: int) -> tuple[int, float]:
    """How many round trips of `size` bytes on the wire to make through `asked`, and how many seconds
    apart: so that none waits for another, for the link, or, as order is kept, for its jitter."""
    slowest = min(rate for rate in (asked.up, asked.down, 10**12) if rate is not None)
    every = max(_CLOSEST, 8 * size / slowest / _SHARE, 2 * asked.jitter)
    return min(_MOST, max(5, int(_SECONDS / every))), every


def told(asked: Link, trips: Sequence[float]) -> dict[str, float]:
    """`rtt` and `jitter`, in seconds, of round trips through `asked`; nothing where there are none.

    The round trip is the typical one under jitter, else the shortest: what is above that is the wait of
    a busy host, not the link's.
    """
    if not trips:
        return {}
    rtt = statistics.median(trips) if asked.jitter else min(trips)
    return {"rtt": rtt, "jitter": statistics.pstdev(trips)}


def _fastest(
    measured: Callable[[str, int, float], float], host: str, rate: int, patience: float
) -> float:
    best = 0.0
    for _ in range(_TRAINS):
        best = max(best, measured(host, rate, patience))
        if best > _GOOD * rate:
            break
    return best


def _await(host: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, turns.PORT), 1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return
