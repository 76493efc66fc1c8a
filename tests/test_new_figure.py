"""A figure is one row of a table: the terminal, the page and Prometheus show one that is added."""

from __future__ import annotations

from math import nan
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import testbed as product
from agents import events
from analysis.figures import FIGURES
from analysis.part import DeviceFigure, Together
from testbed.dashboard.board import Board, device_cells, group_rows
from testbed.dashboard.feed import Feed
from testbed.rundir.directory import RunDirectory
from testbed.watching import screen
from testbed.watching.prometheus import RunCollector
from testbed.watching.rows import read_overview

SIZE = DeviceFigure(
    name="size",
    about="Mean payload of the device's updates, in bytes.",
    of=lambda device, *_: device.bytes / device.updates if device.updates else nan,
    together=Together.PER_UPDATE,
    title="size",
    text=lambda value: f"{value:.0f}",
    heading="size (B)",
    page_text=lambda value: f"{value:.0f}",
    table=lambda run, live: run.updates.groupby(run.updates["client"].astype(str))["bytes"].mean(),
    orders={"largest": False},
    metric="update_size_bytes",
)
TOPOLOGY = {
    "name": "sized",
    "task": {"name": "digits-logreg", "local": {"steps": 2, "lr": 0.1}},
    "rule": {"name": "fedasync"},
    "devices": [{"name": "pi", "count": 2, "timing": "1s"}],
    "stop": {"after": "6s"},
}


def test_new_figure_appears_in_every_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, SIZE.name, SIZE)
    directory = RunDirectory(product.simulate(TOPOLOGY, runs=tmp_path).path)
    known = read_overview(directory)
    assert known is not None
    shown = screen.Screen(known, known.tally())
    for record in events.read(directory.events):
        shown.tally.add(record)
    mean = shown.tally.bytes / shown.tally.updates
    frame = [line.plain.split() for line in shown.frame(6.0, 150, 24)]
    heading = next(line for line in frame if "upd" in line)
    row = next(line for line in frame if "pi-1" in line)
    assert (heading[-1], row[-1]) == ("size", f"{mean:.0f}")
    registry = CollectorRegistry()
    registry.register(RunCollector(directory))
    assert f'testbed_update_size_bytes{{device="pi-2"}} {mean}' in generate_latest(registry).decode()
    board = Board([Feed(directory.path)])
    board.refresh(at_once=True)
    for rows in (board.tables[0].devices, group_rows(board.tables[0].devices)):
        headings, cells = device_cells(rows)
        assert cells[0][headings.index("size (B)")] == f"{mean:.0f}"
