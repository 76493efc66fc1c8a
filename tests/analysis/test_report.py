"""The report: one page that holds all it needs, and takes nothing from a file for markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agents import events
from analysis import report
from analysis.charts import paper, story
from analysis.load import load
from tests.analysis.conftest import EVENTS, MANIFEST, write_run

_EVIL = "<script>alert('gotcha')</script>"


class _Tags(HTMLParser):
    """Tags with their attributes, and the text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.found or self.found[-1][0] not in ("script", "style"):
            self.text += data


def _evil_run(folder: Path) -> Path:
    """A run whose every word is somebody's who means no good."""
    fast, *others = MANIFEST["devices"].items()
    devices = {_EVIL: fast[1] | {"group": _EVIL, "profile": _EVIL}, **dict(others)}
    manifest = MANIFEST | {
        "devices": devices,
        "label": _EVIL,
        "task": _EVIL,
        "error": _EVIL,
        "validity": {"valid": False, "reasons": [_EVIL]},
    }
    lines = [line.replace('"fast"', json.dumps(_EVIL)) for line in EVENTS]
    topology = f"name: {json.dumps(_EVIL)}\nrule: {{name: {json.dumps(_EVIL)}}}\n"
    return write_run(folder, lines, topology, manifest)


def test_report_is_self_contained_and_shows_device_time_in_five_shares(directory: Path) -> None:
    page = report.html([load(directory)])
    tags = _Tags(page)
    for tag, attributes in tags.found:
        assert "src" not in attributes, tag
        assert tag not in ("link", "iframe", "img")
    assert len(page) < 3_000_000
    for words in (
        "effective participants",
        "Topology",
        "buffer_size: 1",
        "Manifest",
        '"monotonic_zero"',
        "0.5 cpu, 512 MiB",
    ):
        assert words in tags.text
    assert "Comparison" not in tags.text
    shares = r"busy \(%\)\s*transfer \(%\)\s*idle \(%\)\s*paused \(%\)\s*offline \(%\)"
    assert re.search(shares, tags.text)


def test_several_runs_are_compared(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = write_run(
        tmp_path_factory.mktemp("other"), EVENTS, "name: by-hand\nrule: {name: fedavg}\n", MANIFEST
    )
    tags = _Tags(report.html([load(directory), load(other)]))
    assert "Comparison" in tags.text
    assert "Needed to reach a test accuracy of 85%, the highest that all runs reached" in tags.text
    assert "speed-up" in tags.text


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    page = report.html([load(_evil_run(tmp_path))])
    assert _EVIL not in page
    tags = _Tags(page)
    assert tags.text.count(_EVIL) >= 6  # headline, reason, error, table, topology, manifest
    assert re.search(r"</script>alert", page) is None


def test_actions_and_a_good_verdict_are_written_in_words(directory: Path) -> None:
    valid = MANIFEST | {"validity": {"valid": True, "reasons": []}}
    (directory / "manifest.json").write_text(json.dumps(valid))
    change = events.Acted(2.5, "fast", "hand", 0.0, {"action": "set", "link": {"up": 2e4}})
    with (directory / "events.jsonl").open("a") as file:
        file.write(events.to_line(change))
    text = _Tags(report.html([load(directory)])).text
    assert re.search(r"by\s*at \(s\)\s*fast\s*link up 20 kbit/s\s*hand\s*2.5", text)
    assert "Valid: the host kept up" in text


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (
            {"validity": {"valid": None, "reasons": [], "unjudged": ["the load"]}},
            r"Not judged:\s*the load",
        ),
        ({"cpus": {"devices": "1"}}, "Not judged: the run has no verdict"),
    ],
)
def test_unjudged_run_is_not_called_valid(tmp_path: Path, entries: dict[str, object], told: str) -> None:
    run = write_run(tmp_path, EVENTS, "name: a\nrule: {name: fedavg}\n", MANIFEST | entries)
    text = _Tags(report.html([load(run)])).text
    assert re.search(told, text)
    assert "Valid:" not in text
    assert "Not valid" not in text


def test_story_has_a_strip_per_run_on_one_axis(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = write_run(
        tmp_path_factory.mktemp("other"), EVENTS, "name: by-hand\nrule: {name: fedavg}\n", MANIFEST
    )
    curves, *strips = story.story([load(directory), load(other)])
    assert [strip.title for strip in strips] == ["fedbuff", "fedavg"]
    assert {chart.x.limits for chart in (curves, *strips)} == {(0.0, 10.0)}
    (lanes,) = strips[0].layers
    trained = lanes.columns["shade"] == 1.0
    assert lanes.columns["end"][trained].tolist() == [1.5, 4.0, 7.0]
    figure = paper.stack([curves, *strips])
    assert len(figure.axes) == 3
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, 10.0)}
    labels = figure.axes[1].get_yticklabels()
    assert [(label.get_position()[1], label.get_text()) for label in labels] == [
        (0.5, "pi ×2"),
        (2.0, "nano ×1"),
    ]


@pytest.mark.parametrize(
    ("groups", "ticks"),
    [
        ("abc", {0.0: "d0", 1.0: "d1", 2.0: "d2"}),
        ("a" * 50 + "b" * 50, {24.5: "a ×50", 74.5: "b ×50"}),
        ("a" * 98 + "bc", {}),
    ],
    ids=["devices", "groups", "no room"],
)
def test_story_lanes_are_named_if_there_is_room(
    groups: str, ticks: dict[float, str], tmp_path: Path
) -> None:
    devices = {f"d{number}": {"group": group} for number, group in enumerate(groups)}
    run = load(write_run(tmp_path, EVENTS[-1:], "rule: {name: fedavg}\n", {"devices": devices}))
    assert story.story([run])[1].y.ticks == ticks
