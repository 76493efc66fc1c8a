"""Figures of segments in the fidelity table, from telemetry of literal numbers."""

from __future__ import annotations

import pytest

from agents.config import Background, Segment
from testbed.fidelity.figures import Figure
from testbed.fidelity.segments import measure_segments
from testbed.fidelity.validity import segment_doubt

SEGMENTS = {
    "backhaul": Segment("backhaul", up=2_000_000),
    "cell": Segment(
        "cell", "backhaul", up=1_000_000, background=(Background(0, "up", "constant", {"rate": 4e5}),)
    ),
}


def _probe(together: float) -> dict[str, object]:
    figures = {"full": 2e6, "reach": 1e6, "alone": 1e6, "together": together}
    return {
        "device": "router",
        "at": 90.0,  # before the run clock starts at 100 s
        "segments": [{"segment": "backhaul", "way": "up", **figures}],
    }


def _use(at: float, background: int) -> dict[str, object]:
    rows = [
        {"segment": name, "way": "up", "devices": {"pi": 10}, "background": background}
        for name in SEGMENTS
    ]
    return {"device": "router", "at": at, "seconds": 1.0, "segments": rows}


def test_background_is_compared_with_what_was_offered() -> None:
    """0.4 Mbit/s are offered; 45,000 bytes in each of two seconds are 0.36 Mbit/s, all of the cell."""
    samples = [_probe(2.02e6), _use(99.5, 10**6), _use(101.0, 45_000), _use(102.0, 45_000)]
    backhaul, cell = measure_segments(SEGMENTS, samples, 1, 100.0, 100.0, 102.0)
    assert (backhaul.segment, backhaul.together) == ("backhaul", Figure(2e6, 2.02e6))
    assert backhaul.background == Figure()
    assert cell.background.requested == pytest.approx(4e5)
    assert cell.background.got == pytest.approx(3.6e5)


@pytest.mark.parametrize(("together", "is_doubted"), [(1.92e6, False), (1.88e6, True), (2.12e6, True)])
def test_segment_beyond_five_per_cent_is_doubted(together: float, is_doubted: bool) -> None:
    found = segment_doubt(measure_segments(SEGMENTS, [_probe(together)], 1, 0.0, 0.0, 0.0))
    assert (found is not None and "up of segment backhaul" in found) == is_doubted
