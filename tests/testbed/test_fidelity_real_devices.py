"""Measured figures of real devices: which are known, how they are shown, and what they mean for the
verdict."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from testbed.dashboard import board
from testbed.fidelity.figures import Fidelity
from testbed.fidelity.host_load import HostSample
from testbed.fidelity.table import render
from testbed.fidelity.validity import verdict
from testbed.real_devices import measured

PROBE = {"up": 2e7, "down": 4e7, "rtt": 0.012, "jitter": 0.001}


def sample(foreign: float) -> HostSample:
    return HostSample(
        at=10.0,
        seconds=10.0,
        server_load=None,
        foreign=foreign,
        elsewhere=None,
        device_busy=0.5,
        steal=0.0,
        tick_lateness=0.0,
    )


def fidelity(foreign: float = 0.02, clock: float = 4e-4) -> Fidelity:
    real = measured.of_run(
        {"pi": "pi@raspi"},
        (),
        [{"device": "pi", "at": 1.0, "probe": PROBE}, {"device": "near", "at": 1.0, "probe": {"up": 1}}],
        {"pi@raspi": clock},
        {"pi@raspi": [sample(foreign)]},
    )
    return Fidelity((), clocks={"pi@raspi": clock}, features=(measured.shown(real),))


def test_figures_of_real_device_are_saved_and_shown() -> None:
    found = fidelity()
    assert found.as_dict()["real"] == {
        "pi": {"host": "pi@raspi", "step": None, **PROBE, "clock": 4e-4, "foreign": 0.02}
    }
    screen = StringIO()
    Console(file=screen, width=120).print(render(found))
    row = next(line for line in screen.getvalue().splitlines() if line.strip().startswith("pi"))
    assert row.split() == ["pi", "–", "20", "40", "12", "±0.4", "2%"]


def test_competing_load_and_clock_of_real_device_count_against_the_run() -> None:
    calm = verdict([], fidelity(), others={"pi@raspi": [sample(0.02)]})
    assert calm.reasons == ()
    busy = verdict([], fidelity(clock=5e-3), others={"pi@raspi": [sample(0.5)]})
    assert any("pi@raspi" in reason and "50%" in reason for reason in busy.reasons)
    assert any("pi@raspi" in reason and "5 ms" in reason for reason in busy.reasons)


def test_real_device_without_measurements_is_not_judged() -> None:
    unknown = measured.of_run({"pi": "pi@raspi"}, (), (), {}, {})
    found = verdict([], Fidelity((), features=(measured.shown(unknown),)))
    assert any("pi, its clock, its link, its load" in sentence for sentence in found.unjudged)


def test_page_shows_what_was_measured_of_real_devices() -> None:
    figures = fidelity().as_dict()["real"]
    headings, rows = board.real_cells({"real": figures})
    assert [dict(zip(headings, row, strict=True)) for row in rows] == [
        {
            "device": "pi",
            "host": "pi@raspi",
            "step (ms)": "–",
            "up (bit/s)": "20M",
            "down (bit/s)": "40M",
            "round trip (ms)": "12",
            "clock (ms)": "±0.4",
            "other work": "2%",
        }
    ]
    assert board.real_cells({})[1] == board.real_cells({"real": {"pi": 1}})[1] == []
