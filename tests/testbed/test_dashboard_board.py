"""The dashboard server's view of run directories: of a growing one and of a damaged one."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from math import nan
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from bokeh.core.templates import FILE, MACROS
from bokeh.document import Document
from bokeh.embed.util import RenderRoot
from bokeh.server.connection import ServerConnection

from agents import events
from analysis.load import Follower
from testbed.dashboard import board as boards
from testbed.dashboard import first_page, page
from testbed.dashboard import page as headers
from testbed.dashboard.board import Board, device_cells, group_rows, select_rows
from testbed.dashboard.feed import Feed
from testbed.dashboard.web_server import is_not_early_leave
from testbed.fidelity.validity import doubt_note
from testbed.rundir.directory import RunDirectory
from tests.analysis.conftest import EVENTS, MANIFEST

UPDATE = next(line for line in EVENTS if '"update"' in line)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Directory of a running run, whose controller is this process."""
    directory = RunDirectory(tmp_path)
    directory.write_manifest(**MANIFEST)
    directory.claim()
    directory.topology.write_text(
        "name: by-hand\nrule: {name: fedbuff, buffer_size: 1}\nstop: {after: 60s}\n"
    )
    directory.events.write_text("".join(line + "\n" for line in EVENTS[:-1]))
    return directory


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def evaluation_part(**changes: object) -> str:
    part = {"event": "evaluation_part", "at": 0, "version": 0, "part": "device", "name": "slow"}
    return json.dumps(part | {"samples": 9, "loss": 1.5, "accuracy": 0.5} | changes)


def note(board: Board, name: str) -> str:
    return next(panel.chart.note for panel in board.panels if panel.name == name)


def test_new_records_are_read_once(directory: RunDirectory) -> None:
    board = Board([Feed(directory.path)])
    board.refresh(at_once=True)
    (feed,), first = board.feeds, board.generation
    assert (feed.updates, feed.live) == (3, True)
    board.refresh(at_once=True)
    assert board.generation == first
    append(directory.events, UPDATE)
    board.refresh(at_once=True)
    assert board.generation > first
    assert feed.updates == 4
    assert "running" in headers.header(feed)
    assert "10 s of 60 s" in headers.header(feed)
    assert "4 (0.4/s)" in headers.header(feed)
    append(directory.events, EVENTS[-1])
    directory.write_manifest(outcome="after", validity={"valid": False, "reasons": ["too <slow>"]})
    board.refresh(at_once=True)
    assert "ended: time is up" in headers.header(feed)
    assert "not valid: too &lt;slow&gt;" in headers.header(feed)


def test_header_of_a_live_run_has_the_doubts_of_its_notes(directory: RunDirectory) -> None:
    feed = Feed(directory.path)
    feed.refresh()
    assert "judged at the end" in headers.header(feed)
    append(directory.events, events.to_line(events.Note(9.0, doubt_note("pi-1 has no link"))).strip())
    feed.refresh()
    assert "not valid so far: pi-1 has no link" in headers.header(feed)


def test_first_page_has_the_runs_name_and_state(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the theme that the address names."""
    monkeypatch.setattr(first_page._Handler, "timeout", 120.0)
    visible = first_page.VisibleRuns([directory], directory.path.parent)
    answers = []
    with socket.create_server(("127.0.0.1", 0)) as listening, first_page.served(listening, visible):
        host, port = listening.getsockname()
        page = f"/run?run={directory.run}&theme=dark"
        for path, name in (page, host), ("/", host), (page + "&run=other", host), (page, "elsewhere"):
            with closing(http.client.HTTPConnection(host, port, timeout=120)) as connection:
                connection.request("GET", path, headers={"Host": f"{name}:{port}"})
                with connection.getresponse() as answer:
                    answers.append((answer.status, answer.read().decode()))
    (_, first), (_, all_runs), (_, unknown), (foreign, _) = answers
    assert f"<small>{directory.run}</small> <small>running</small>" in first
    assert "color-scheme: dark" in first
    assert f'name="run" value="{directory.run}"' in all_runs
    assert ("No such run" in unknown, foreign) == (True, 403)


def test_header_is_on_the_page_before_any_script_of_bokeh(directory: RunDirectory) -> None:
    document = Document()
    board = Board([Feed(directory.path)])
    page.fill(document, board, "light")
    bokeh: dict[str, Any] = {"base": FILE, "macros": MACROS, "bokeh_js": "BOKEH", "plot_script": "PLOT"}
    roots = {root.name: RenderRoot(root.id, root.id, root.name) for root in document.roots}
    text = document.template.render(**bokeh, **document.template_variables, roots=roots)
    assert text.index("10 s of 60 s") < text.index("BOKEH") < text.index("PLOT")


def test_losses_by_device_are_shown_if_recorded(directory: RunDirectory) -> None:
    append(directory.events, evaluation_part(name="slow"), evaluation_part(name="fast"))
    for text, shown in (("{}", False), ("{every: 1s, devices: 40}", True), ("[no, map]", False)):
        directory.topology.write_text(f"name: by-hand\nevaluate: {text}\n")
        board = Board([Feed(directory.path)])
        board.refresh(at_once=True)
        charts = [panel.chart for panel in board.panels if panel.name == "loss-by-device"]
        assert [chart.is_empty for chart in charts] == [False] * shown


def test_nothing_is_drawn_before_the_plan_exists(tmp_path: Path) -> None:
    board = Board([Feed(tmp_path)])
    board.refresh(at_once=True)
    RunDirectory(tmp_path).write_manifest(run="t-1")
    board.refresh(at_once=True)
    assert (board.runs, board.panels, board.feeds[0].error) == ((), (), "")


def test_run_that_cannot_be_shown_is_explained(directory: RunDirectory) -> None:
    feed = Feed(directory.path)
    directory.write_manifest(devices={}, outcome="failed", error="no space for <shards>")
    feed.refresh()
    assert feed.run is None
    assert feed.error == "The run ended (failed) before it started: no space for <shards>"
    document = Document()
    page.fill(document, Board([feed]), "light")
    shown = document.template.render(document.template_variables)
    assert "no space for &lt;shards&gt;" in shown
    assert "refresh" not in shown
    directory.manifest.write_text("{")
    feed.refresh()
    assert "not a manifest" in feed.error


def test_new_data_reuses_the_existing_bokeh_models(directory: RunDirectory) -> None:
    """No new models are made: Bokeh never frees the ids of removed ones."""
    board, document = Board([Feed(directory.path)]), Document()
    page.fill(document, board, "light")
    (callback,) = document.session_callbacks
    before = {model.id for model in document.models}
    append(directory.events, UPDATE)
    board.refresh(at_once=True)
    document.get_model_by_name("sent").active = False  # type: ignore[union-attr]  # as the browser does
    callback.callback()
    assert "4 (0.4/s)" in document.get_model_by_name("header-0").text  # type: ignore[union-attr]
    assert {model.id for model in document.models} == before


def test_slow_browser_gets_the_next_state_when_it_has_drawn_the_last(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the states that it has not drawn yet would pile up."""
    monkeypatch.setattr(page, "_MAX_WAIT_SECONDS", 1e9)
    board, document = Board([Feed(directory.path)]), Document()
    page.fill(document, board, "light")
    (callback,), sent = document.session_callbacks, document.get_model_by_name("sent")

    def shown() -> str:
        append(directory.events, UPDATE)
        board.refresh(at_once=True)
        callback.callback()
        return str(document.get_model_by_name("header-0").text)  # type: ignore[union-attr]

    assert "3 (0.3/s)" in shown()
    sent.active = False  # type: ignore[union-attr]  # as the browser does
    assert "5 (0.5/s)" in shown()
    assert "5 (0.5/s)" in shown()
    monkeypatch.setattr(page, "_MAX_WAIT_SECONDS", 0.0)
    assert "7 (0.7/s)" in shown()


def test_run_with_a_diverged_model_is_drawn(directory: RunDirectory) -> None:
    """One evaluation has no finite loss on any device."""
    append(directory.events, evaluation_part(), evaluation_part(at=1, version=1, loss=None))
    directory.topology.write_text("name: by-hand\nevaluate: {every: 1s, devices: 40}\n")
    board = Board([Feed(directory.path)])
    board.refresh(at_once=True)
    assert "1 evaluation without a finite loss" in note(board, "loss-by-device")


def test_page_refers_to_compare_when_updates_are_not_all_held(
    directory: RunDirectory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    copytree(directory.path, other, dirs_exist_ok=True)
    board = Board([Feed(directory.path), Feed(other)])
    board.refresh(at_once=True)
    assert "testbed compare" not in page._compared(board)
    board.feeds[0].updates += 1
    assert "testbed compare" in page._compared(board)


def test_damaged_line_is_reported_until_repaired(directory: RunDirectory) -> None:
    feed = Feed(directory.path)
    feed.refresh()
    good = directory.events.read_text()
    append(directory.events, "no record")
    feed.refresh()
    assert f"events.jsonl:{len(EVENTS)}" in feed.error
    assert "events.jsonl" in headers.header(feed)
    directory.events.write_text(good + UPDATE + "\n")
    feed.refresh()
    assert (feed.error, feed.updates) == ("", 4)


def test_memory_is_bounded(directory: RunDirectory) -> None:
    follower = Follower(directory.path, {"update": 8})
    for count in range(1, 60):
        append(directory.events, UPDATE.replace('"sequence":1', f'"sequence":{count}'))
        held = follower.run().updates
        assert len(held) <= 10
    assert follower.rows["update"] == 3 + 59
    assert held["sequence"].tolist()[-8:] == list(range(52, 60))


def test_lanes_of_a_running_run_show_the_newest_updates(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "_LIVE_LANE_UPDATES", 1)
    board = Board([Feed(directory.path)])
    board.refresh(at_once=True)
    assert "the newest 1 updates" in note(board, "devices-0")
    directory.write_manifest(outcome="after")
    board.refresh(at_once=True)
    assert "newest" not in note(board, "devices-0")


def test_measured_values_so_far_are_shown(directory: RunDirectory) -> None:
    for at, cpu in ((100.0, 1.0), (104.0, 2.0), (106.0, 3.0)):  # 2 s of CPU in 6 s
        append(directory.telemetry, json.dumps({"device": "fast", "at": at, "cpu": cpu}))
    append(
        directory.events,
        '{"event":"action","at":7.0,"device":"fast","source":"hand","lateness":0.0,'
        '"details":{"action":"set","cpu":0.25}}',
    )
    feed = Feed(directory.path)
    feed.refresh()
    assert feed.run is not None
    table = feed.run.fidelity
    shares = table[table["figure"] == "cpu"].set_index("device")
    assert shares["got"].to_dict() == pytest.approx(
        {"fast": 1 / 3, "slow": nan, "mute": nan}, nan_ok=True
    )
    assert shares["asked"].to_dict() == {"fast": 0.25, "slow": 0.1, "mute": 0.1}


def test_devices_are_shown_in_a_table(directory: RunDirectory) -> None:
    for at, cpu in ((100.0, 1.0), (104.0, 2.0), (106.0, 3.0)):
        sample = {"device": "fast", "at": at, "cpu": cpu, "memory": 2**28, "sent": 1000 * (at - 100)}
        append(directory.telemetry, json.dumps(sample))
    board = Board([Feed(directory.path)])
    board.refresh(at_once=True)
    (table,) = board.tables
    headings, rows = device_cells(table.devices)
    fast = dict(zip(headings, rows[0], strict=True))
    assert (fast["device"], fast["updates"], fast["CPU used"]) == ("fast", "2", "33.3%")
    assert (fast["memory (MiB)"], fast["up (bit/s)"]) == ("256", "8.0k")
    assert "down (bit/s)" not in headings
    assert select_rows(table.devices, "fewest updates", "pi").index.tolist() == ["slow", "fast"]
    pi = group_rows(table.devices).loc["pi ×2"]
    assert (pi["updates"], pi["staleness"]) == (3, pytest.approx(2 / 3))


def test_finished_run_shows_no_chart_of_one_point(directory: RunDirectory) -> None:
    directory.events.write_text("".join(line + "\n" for line in (*EVENTS[:4], EVENTS[-1])))
    board = Board([Feed(directory.path)])
    board.refresh(at_once=True)
    shown = {panel.name for panel in board.panels if panel.shown}
    assert "devices-0" in shown
    assert not shown & {"accuracy", "loss", "staleness-0", "memory-over-time-0"}


def test_charts_of_two_runs_name_the_run(directory: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other")
    other.path.mkdir()
    other.write_manifest(**MANIFEST)
    other.topology.write_text("name: other\nrule: {name: fedbuff, buffer_size: 9}\n")
    other.events.write_text(directory.events.read_text())
    directory.topology.write_text("name: by-hand\nrule: {name: fedbuff, buffer_size: 1}\n")
    board = Board([Feed(directory.path), Feed(other.path)])
    board.refresh(at_once=True)
    titles = {panel.name: panel.chart.title for panel in board.panels}
    assert titles["devices-0"] == "What the devices did · fedbuff buffer_size 1"
    assert titles["devices-1"] == "What the devices did · fedbuff buffer_size 9"
    many = Board([Feed(directory.path)] * 2 + [Feed(other.path)] * 2)
    many.refresh(at_once=True)
    assert {panel.column for panel in many.panels} == {None}


def test_visitor_leaving_early_causes_no_traceback() -> None:
    """Bokeh's server raises this error if the page was not created yet; other errors are reported."""
    early = ServerConnection.__new__(ServerConnection)
    early._session = None
    assert is_not_early_leave(logged(lambda: early.session)) is False
    assert is_not_early_leave(logged(lambda: Path("/nowhere").read_text()))
    assert is_not_early_leave(logging.makeLogRecord({}))


def logged(call: Callable[[], object]) -> logging.LogRecord:
    """The record of what `call` raises."""
    try:
        call()
    except (AssertionError, OSError):
        return logging.makeLogRecord({"exc_info": sys.exc_info()})
    raise AssertionError("nothing was raised")


def test_page_of_a_run_with_batteries_has_their_levels(directory: RunDirectory) -> None:
    plain = device_table_of(directory)
    assert not {"energy (J)", "battery"} & {*device_cells(plain)[0]}
    manifest = directory.read_manifest()
    for one in manifest["devices"].values():
        one["energy"] = {"idle": 1.0, "busy": 2.0, "battery": {"capacity": 100.0}}
    directory.write_manifest(**manifest)
    at = manifest.get("monotonic_zero", 0.0)
    for name, level in (("fast", 0.25), ("slow", 0.75)):
        figures = {"consumed": 40.0, "transferred": 1.0, "power": 2.0, "level": level}
        append(directory.telemetry, json.dumps({"device": name, "at": at + 9.0, "energy": figures}))
    board = Board([Feed(directory.path)])
    board.refresh(at_once=True)
    assert {"battery-over-time-0", "power-over-time-0", "accuracy-by-energy"} <= {
        p.name for p in board.panels
    }
    table = board.tables[0]
    assert table.devices["level"].dropna().to_dict() == {"fast": 0.25, "slow": 0.75}
    lowest = select_rows(table.devices, "lowest battery", "")
    assert lowest.index[0] == "fast"
    headings, rows = device_cells(lowest)
    assert headings[-3:] == ["energy (J)", "power (W)", "battery"]
    assert rows[0][-1] == "25%"
    assert group_rows(table.devices)["energy"].sum() == 80.0


def device_table_of(directory: RunDirectory) -> Any:
    """Devices of the table on the page of a run."""
    board = Board([Feed(directory.path)])
    board.refresh(at_once=True)
    return board.tables[0].devices
