"""Figures of segments in the fidelity table, from telemetry of literal numbers."""

from __future__ import annotations

import pytest

from agents import events
from agents.config import Background, Segment
from agents.device_actions import Disconnect, Reconnect, SetBackground, to_json
from testbed.fidelity.figures import Figure
from testbed.segments.measured import background_spans, measure_segments, segment_doubt

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


def test_background_is_compared_with_what_was_offered_while_it_was_on() -> None:
    """0.4 Mbit/s are offered. 45,000 bytes in a second are 0.36 Mbit/s, all of the cell's own. In the
    last second, the traffic is off."""
    samples = [
        _probe(2.02e6),
        _use(99.5, 10**6),
        _use(101.0, 45_000),
        _use(102.0, 45_000),
        _use(103.0, 0),
    ]
    backhaul, cell = measure_segments(SEGMENTS, samples, 1, 100.0, {"cell": [(0.0, 2.0)]})
    assert (backhaul.segment, backhaul.together) == ("backhaul", Figure(2e6, 2.02e6))
    assert backhaul.background == Figure()
    assert cell.background.requested == pytest.approx(4e5)
    assert cell.background.got == pytest.approx(3.6e5)


def test_background_is_on_until_it_or_a_segment_above_is_switched_off() -> None:
    records = [
        events.Acted(at, device, "hand", 0.0, to_json(action))
        for at, device, action in (
            (1.0, "cell", SetBackground(on=False)),  # before the resumed run
            (3.0, "cell", SetBackground(on=False)),
            (4.0, "backhaul", Disconnect()),
            (5.0, "cell", SetBackground(on=True)),
            (6.0, "backhaul", Reconnect()),
            (7.0, "backhaul", SetBackground(on=False)),
            (7.5, "pi", Disconnect()),
        )
    ]
    assert [*background_spans("cell", SEGMENTS, records, 2.0, 9.0)] == [(2.0, 3.0), (6.0, 9.0)]


@pytest.mark.parametrize(("together", "is_doubted"), [(1.92e6, False), (1.88e6, True), (2.12e6, True)])
def test_segment_beyond_five_per_cent_is_doubted(together: float, is_doubted: bool) -> None:
    found = segment_doubt(measure_segments(SEGMENTS, [_probe(together)], 1, 0.0, {}))
    assert (found is not None and "up of segment backhaul" in found) == is_doubted
