"""Program of `tests/test_new_feature.py`: simulates a run, adds the records of the feature to it, and
prints as JSON what all views show of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

import testbed as product
from agents import events
from analysis import comparison, export, features, metrics, report, summary
from analysis.charts import CHARTS
from analysis.columns import COLUMNS
from analysis.load import load
from testbed.dashboard.board import Board, device_cells, group_rows, sorts
from testbed.dashboard.feed import Feed
from testbed.dashboard.page import header
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import Samples
from testbed.tracking.following import Points
from testbed.watching import live, screen
from testbed.watching.prometheus import RunCollector
from testbed.watching.rows import read_overview

TOPOLOGY = {
    "name": "hot",
    "task": {"name": "digits-logreg", "local": {"steps": 2, "lr": 0.1}},
    "rule": {"name": "fedasync"},
    "devices": [{"name": "pi", "count": 2, "timing": "1s"}],
    "stop": {"after": "6s"},
}


def run_with_heat() -> Path:
    path = product.simulate(TOPOLOGY, runs=Path("runs")).path
    lines = (path / "events.jsonl").read_text().splitlines()
    lines.insert(-1, '{"event":"throttled","at":5.5,"client":"pi-1","degrees":81.0}')
    (path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    samples = [("pi-1", 1.0, 60.0), ("pi-2", 1.0, 40.0), ("pi-1", 5.0, 80.0), ("pi-2", 5.0, 50.0)]
    found = [{"device": name, "at": at, "heat": {"degrees": heat}} for name, at, heat in samples]
    (path / "telemetry.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in found))
    manifest = json.loads((path / "manifest.json").read_text())
    for facts in manifest["devices"].values():
        facts["heat"] = True
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def main() -> None:
    path = run_with_heat()
    directory, run = RunDirectory(path), load(path)
    known = read_overview(directory)
    assert known is not None
    shown, points = screen.Screen(known, known.tally()), Points()
    notices, tracked = [], dict[str, float]()
    for record in events.read(directory.events):
        notices.append(shown.tally.add(record))
        for point in points.add(record):
            tracked |= point.values
    for sample in Samples(directory.telemetry).read():
        shown.tally.sample(sample["device"], sample["at"], sample)
    registry = CollectorRegistry()
    registry.register(RunCollector(directory))
    feed = Feed(path)
    board = Board([feed])
    board.refresh(at_once=True)
    devices = board.tables[0].devices
    cells = [device_cells(rows) for rows in (devices, group_rows(devices))]
    console = Console(width=120)
    with console.capture() as end:
        console.print(live.render_summary(run))
    found = {
        "tables": {name: len(run.more[name]) for name in ("heat", "throttled")},
        "columns": [*COLUMNS["throttled"]],
        "files": sorted(file.stem for file in run.export("tables", "csv")),
        "notice": [one.what for one in notices if one is not None][-1],
        "terminal": [line.plain for line in shown.frame(6.0, 150, 24)],
        "prometheus": generate_latest(registry).decode(),
        "tracked": tracked,
        "page": [dict(zip(names, own[0], strict=True)) for names, own in cells],
        "orders": [*sorts(features.parts_of_run(run.manifest))],
        "panels": [panel.name for panel in board.panels],
        "header": header(feed),
        "report": report.html([run]),
        "summary": summary.groups(summary.devices(run))["hottest"].tolist(),
        "end": end.get(),
        "cost": metrics.observed(run).others["heat"] > 0,
        "compared": comparison.texts(comparison.compare([run], 0.1))[0],
        "charts": [name for name in CHARTS if "heat" in name],
        "trace": [one["name"] for one in export.trace_events(run) if "heat" in one["name"]],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
