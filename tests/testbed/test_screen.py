"""Content of a terminal frame, and the effect of keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from agents import events
from agents.config import StopConditions
from agents.device_actions import Crash, Pause, Restart, Resume
from analysis.activity import OFFLINE, STATES, TRAIN, WAIT, ActivityCell
from analysis.tally import Tally
from testbed.fidelity.validity import Validity, doubt_note
from testbed.watching.choices import Choices, Command, Quit, Request, press_key
from testbed.watching.rows import SORTS, Overview, OverviewDevice, Row, in_order, rows
from testbed.watching.screen import Screen, stacked
from tests.testbed.record_factories import STARTED, fleet, update

SIX = (*fleet(3), *fleet(3, "far-away-device", cpu=0.05))


def screen(
    devices: tuple[OverviewDevice, ...],
    records: Iterable[events.Record],
    runtime: str = "process",
    *,
    links: bool = False,
) -> Screen:
    overview = Overview(
        rule="fedbuff",
        stop=StopConditions(after=60.0),
        devices=devices,
        runtime=runtime,
        run="small-run",
        links=links,
    )
    made = Screen(overview, overview.tally())
    for record in records:
        made.tally.add(record)
    return made


def drawn(shown: Screen, at: float, width: int = 80, height: int = 24) -> list[str]:
    lines = [line.plain.rstrip() for line in shown.frame(at, width, height)]
    assert len(lines) == height
    assert max(map(len, lines)) < width
    return lines


def small() -> Screen:
    updates = update("pi-1", 2.0, 0), update("pi-1", 4.0, 3), update("pi-2", 5.0, 1)
    shown = screen(fleet(3), [STARTED, *updates, events.Evaluated(4.0, 2, 0.5, 0.915)])
    for at in (5.0, 6.0, 7.0):
        shown.tally.sample("pi-1", at, {"cpu": 0.25 * at})
    return shown


def test_every_device_has_a_row() -> None:
    shown = small()
    shown.validity = Validity(("the server was busy",))
    shown.messages.append("pi-3 has not come")
    lines = drawn(shown, at=7.0)
    assert lines[:8] == [
        "fedbuff  small-run  process",
        "7.0 s of 60 s (12%)  version 2  3 updates  0.4/s",
        "accuracy 91.5%  loss 0.500",
        "not valid so far: the server was busy",
        "  device state    last 60 s              upd stale mean  cpu used share  p_i",
        "  pi-1   train                     ▄▒▒     2     3  1.5 0.25 0.25   67%  10%",
        "  pi-2   train                     ·▄▒     1     1  1.0 0.25    –   33%  10%",
        "  pi-3   offline                   ×××     0     –    – 0.25    –    0%  10%",
    ]
    assert set(lines[8:-3]) == {""}
    assert lines[-3:] == [
        "pi-3 has not come",
        "▄ download █ train ▀ upload · wait × offline = paused ▒ inferred",
        "q quit  ↑↓ select  s sort  / filter  g group  b bar  p pause  x kill  r restart",
    ]


def test_verdict_so_far_agrees_with_the_notes() -> None:
    shown = small()
    shown.validity = Validity()
    assert drawn(shown, 7.0)[3] == "valid so far"
    shown.tally.add(events.Note(7.0, doubt_note("the uplink of pi-1 was too slow")))
    shown.tally.add(events.Disrupted(8.0, 7.5, "the machine was asleep"))
    line = "not valid so far: the uplink of pi-1 was too slow; the machine was asleep from"
    assert " ".join(drawn(shown, 8.0)[3:5]).startswith(line)
    shown.tally.add(events.Note(8.0, "a client left"))
    assert "a client left" not in " ".join(drawn(shown, 8.0))


def test_long_verdict_is_wrapped() -> None:
    shown = small()
    reasons = tuple(
        f"device pi-{number} got 81% of what was requested of its link" for number in range(3)
    )
    shown.validity = Validity(reasons)
    shown.outcome = "after"
    lines = drawn(shown, 10.0)
    first = next(place for place, line in enumerate(lines) if line.startswith("not valid: "))
    assert " ".join(lines[first : first + 3]) == f"not valid: {'; '.join(reasons)}"
    assert any("pi-3" in line.split() for line in lines[first + 3 :])
    assert drawn(shown, 10.0, height=6)[4].endswith("…")


def test_wide_bar_has_a_cell_per_second() -> None:
    row = drawn(small(), at=7.0, width=140, height=40)[5]
    assert (
        row
        == "  pi-1   train    " + 52 * " " + "▄█▄█▂▒▒" + "      2     3  1.5 0.25 0.25    –   67%  10%"
    )


def test_link_rates_are_shown() -> None:
    shown = screen(fleet(2), [STARTED], links=True)
    for at in (0.0, 1.0):
        shown.tally.sample("pi-1", at, {"cpu": 0.0, "sent": 43_700 * at, "received": 1_500_000 * at})
    lines = drawn(shown, at=1.0)
    assert lines[4].split()[-9:-2] == ["upd", "stale", "mean", "cpu", "used", "up", "down"]
    assert lines[5].split()[-6:] == ["0.25", "0.00", "350k", "12M", "–", "10%"]


def test_segments_are_shown_with_their_use_and_are_no_devices() -> None:
    overview = Overview(
        rule="fedbuff",
        stop=StopConditions(after=60.0),
        devices=fleet(1),
        facts={"segments": ["cell", "backhaul"]},
    )
    shown = Screen(overview, overview.tally())
    shown.tally.add(STARTED)
    use = {"segment": "cell", "way": "up", "devices": {"pi-1": 100_000}, "background": 50_000}
    shown.tally.sample("router", 2.0, {"seconds": 2.0, "segments": [use]})
    assert drawn(shown, 2.0)[2].endswith("cell: up 600k  backhaul: idle")
    notice = shown.tally.add(events.Acted(3.0, "cell", "hand", 0.0, {"action": "disconnect"}))
    assert notice is not None
    assert (notice.what, notice.detail) == ("cut", "cell")
    assert drawn(shown, 3.0)[2].endswith("cell: cut  backhaul: idle")
    assert "cell" not in shown.tally.devices
    shown.tally.add(events.Acted(4.0, "cell", "hand", 0.0, {"action": "reconnect"}))
    assert "cut" not in drawn(shown, 4.0)[2]


def test_large_update_counts_fit_their_column() -> None:
    shown = screen(fleet(1), [STARTED])
    shown.tally.devices["pi-1"].updates = 123_456
    lines = drawn(shown, at=1.0)
    assert len(lines[4]) == len(lines[5])
    assert " 123k " in lines[5]


def test_virtual_time_has_no_telemetry() -> None:
    shown = screen(fleet(2), [STARTED], runtime="virtual")
    shown.real = 0.5
    lines = drawn(shown, at=1.0)
    assert lines[1].startswith("1.0 s of 60 s (2%) virtual, 0.5 s real  version 0")
    shown.real = 12.0
    assert "virtual, 12.0 s real, about 12 min left" in drawn(shown, at=1.0)[1]
    assert lines[4].split()[-6:] == ["upd", "stale", "mean", "cpu", "share", "p_i"]


def test_a_large_fleet_is_shown_by_group() -> None:
    devices = (*fleet(100), *fleet(60, "a-group-with-quite-a-long-name"))
    started = events.RunStarted(0.0, 1.7e9, tuple(d.name for d in devices), ())
    shown = screen(devices, [started, events.ClientStatus(3.0, "pi-4", "offline")])
    lines = drawn(shown, at=6.0)
    assert lines[4].split()[:2] == ["group", "online"]
    assert lines[5].startswith("  pi ×100          99/100   ██████")
    assert lines[6].startswith("  a-group…name ×60 60/60    ██████")
    shown.choices = Choices(grouped=False, selected="pi-40")
    lines = drawn(shown, at=6.0)
    assert lines[5].split()[0] == "pi-26"
    assert lines[19].split()[:2] == [">", "pi-40"]
    assert lines[-2].startswith("26–40 of 160  ▄ download")
    assert lines[5:20] == drawn(shown, at=6.0)[5:20]


@pytest.mark.parametrize("size", [(20, 5), (60, 12), (80, 24), (81, 25), (140, 40), (300, 90)])
@pytest.mark.parametrize("runtime", ["docker", "process", "virtual"])
@pytest.mark.parametrize("grouped", [True, False])
def test_frame_fits_every_terminal_size(size: tuple[int, int], runtime: str, grouped: bool) -> None:
    records: list[events.Record] = [STARTED, update("pi-1", 5.0, 1234)]
    shown = screen(SIX, records, runtime, links=runtime == "docker")
    shown.choices = Choices(grouped=grouped, sort="share", matching="i", selected="pi-2")
    lines = drawn(shown, 61.5, *size)
    if size[0] >= 80:
        assert lines[4].endswith("share  p_i")
        assert len({len(line) for line in lines[4:6]}) == 1  # aligned


def test_terminal_without_unicode_shows_an_ascii_bar() -> None:
    shown = small()
    shown.ascii_only = True
    assert "d++" in drawn(shown, at=7.0)[5]


def test_inferred_states_are_lighter_and_readable_without_colour() -> None:
    signs = [Screen._sign(small(), ActivityCell(state, inferred=False)) for state in STATES]
    assert len({sign for sign, _ in signs}) == len({colour for _, colour in signs}) == len(STATES)


def test_stacked_bar_uses_largest_remainders() -> None:
    bar = stacked({TRAIN: 31.0, WAIT: 19.0, OFFLINE: 10.0}, 10)  # 5.17, 3.17 and 1.67 cells
    assert [cell and cell.state for cell in bar] == [TRAIN] * 5 + [WAIT] * 3 + [OFFLINE] * 2
    assert stacked(dict.fromkeys(STATES, 0.0), 4) == [None] * 4


def seen(tally: Tally, at: float = 6.0, **wanted: object) -> list[Row]:
    grouped, matching = bool(wanted.get("grouped")), str(wanted.get("matching", ""))
    return rows(tally, SIX, at, grouped=grouped, matching=matching)


def tallied() -> Tally:
    started = events.RunStarted(0.0, 1.7e9, tuple(d.name for d in SIX), ())
    counts = {"pi-1": 3, "pi-2": 1, "far-away-device-1": 2}
    updates = [update(name, 2.0 * k, k) for name, count in counts.items() for k in range(1, count + 1)]
    gone = events.ClientStatus(5.0, "pi-3", "offline")
    return screen(SIX, [started, *updates, gone]).tally


def test_group_row_aggregates_its_devices() -> None:
    pi, far = seen(tallied(), grouped=True)
    assert (pi.name, pi.devices, pi.online) == ("pi", ("pi-1", "pi-2", "pi-3"), 2)
    assert (pi.figures["updates"], pi.figures["staleness"]) == (4, (1 + 2 + 3 + 1) / 4)
    assert pi.figures["share"] == pytest.approx(4 / 6)
    assert pi.figures["importance"] == pytest.approx(0.3)
    assert far.figures["updates"] == 2
    assert far.figures["asked"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("matching", "names"),
    [
        ("PI-2", ["pi-2"]),
        ("far", [f"far-away-device-{k}" for k in (1, 2, 3)]),
        ("offline", ["pi-3"]),
        ("nothing", []),
    ],
)
def test_filter_matches_name_group_or_state(matching: str, names: list[str]) -> None:
    assert [row.name for row in seen(tallied(), matching=matching)] == names


def test_rows_are_sorted_with_the_unknown_last() -> None:
    found = seen(tallied())
    assert [row.figures["updates"] for row in in_order(found, "upd")] == [3, 2, 1, 0, 0, 0]
    assert [row.figures["updates"] for row in in_order(found, "upd", reverse=True)] == [
        0,
        0,
        0,
        1,
        2,
        3,
    ]
    assert [row.name for row in in_order(found, "mean")][:3] == ["pi-1", "far-away-device-1", "pi-2"]
    assert [row.name for row in in_order(found, "mean", reverse=True)][:1] == ["pi-2"]
    assert in_order(found, "state")[-1].name == "pi-3"
    assert in_order(found, "") == found


def after(keys: Iterable[str], choices: Choices | None = None) -> tuple[Choices, list[Request]]:
    """Return the choices and the wishes after `keys`, among the rows of `tallied`, four per page."""
    requests: list[Request] = []
    choices = choices or Choices()
    for key in keys:
        found = in_order(
            seen(tallied(), matching=choices.matching), choices.sort, reverse=choices.reverse
        )
        choices, request = press_key(choices, key, found, page=4, grouped=bool(choices.grouped))
        if request is not None:
            requests.append(request)
    return choices, requests


@pytest.mark.parametrize(
    ("keys", "selected"),
    [
        (["down"], "pi-1"),
        (["down", "down"], "pi-2"),
        (["j", "j", "k", "k", "up"], "pi-1"),
        (["end"], "far-away-device-3"),
        (["down", "page down"], "far-away-device-2"),
        (["end", "page up", "home"], "pi-1"),
        (["down", "s", "s", "s", "s"], "pi-1"),  # by name, wherever it is
        (["down", "escape"], None),
    ],
)
def test_rows_can_be_selected(keys: list[str], selected: str | None) -> None:
    assert after(keys)[0].selected == selected


def test_keys_choose_what_is_shown() -> None:
    assert after(["s", "s", "S", "b", "g"])[0] == Choices(
        sort="upd", reverse=True, stacked=True, grouped=True
    )
    known = [name for name in SORTS if name not in ("used", "mem", "batt")]  # what devices have told
    assert after(["s"] * len(known))[0] == Choices()
    typed, requests = after(["/", "q", "x", "backspace", "up", "enter"])
    assert (typed.matching, typed.typing, requests) == ("q", False, [])
    assert after(["/", "q", "escape"])[0] == Choices()


def test_devices_can_be_paused_killed_and_restarted_by_key() -> None:
    pause, kill = Command(Pause(), ("pi-1",), "pi-1"), Command(Crash(), ("pi-1",), "pi-1")
    assert after(["p", "x", "r"])[1] == []  # nothing is selected
    assert after(["down", "p"])[1] == [pause]
    assert after(["down", "x"])[1] == []
    assert after(["down", "x", "n", "y"])[1] == []
    assert after(["down", "x", "y"])[1] == [kill]
    assert after(["down", "r"])[1] == [replace(kill, action=Restart())]
    assert str(kill) == "kill pi-1"
    assert after(["q"])[1] == [Quit()]


def test_paused_device_is_resumed_by_key() -> None:
    tally = tallied()
    tally.add(events.Acted(5.5, "pi-1", "hand", 0.0, {"action": "pause"}))
    _, request = press_key(Choices(selected="pi-1"), "p", seen(tally), page=4, grouped=False)
    assert request == Command(Resume(), ("pi-1",), "pi-1")


def test_batteries_have_levels_and_a_power_off_is_a_state() -> None:
    shown = screen(fleet(3), [STARTED], runtime="virtual")
    facts = {"devices": {"pi-1": {"energy": {"battery": {"capacity": 9.0}}}}}
    shown.overview = replace(shown.overview, facts=facts)
    for device, joules, level in (("pi-1", 1200.0, 0.2), ("pi-2", 300.0, 0.9), ("pi-3", 3.0, None)):
        figures = {"consumed": joules, "power": joules / 100, "level": level}
        shown.tally.sample(device, 4.0, {"energy": figures})
    shown.tally.add(events.Acted(5.0, "pi-1", "battery", 0.0, {"action": "poweroff"}))
    shown.tally.add(events.ClientStatus(5.0, "pi-1", "offline"))
    lines = drawn(shown, at=7.0)
    assert "1.5 kJ" in lines[1]
    assert lines[4].split()[-8:] == ["upd", "stale", "mean", "cpu", "share", "p_i", "watt", "batt"]
    assert "unpowered" in lines[5]
    assert [line.split()[-2:] for line in lines[5:8]] == [
        ["12.0", "20%"],
        ["3.00", "90%"],
        ["0.03", "–"],
    ]
    assert "▁ unpowered" in lines[-2]
    (group,) = rows(shown.tally, fleet(3), 7.0, grouped=True)
    assert group.online == 1
    shown.tally.add(events.Acted(8.0, "pi-1", "battery", 0.0, {"action": "poweron"}))
    assert "offline" in drawn(shown, at=8.0)[5]  # until it is ready
