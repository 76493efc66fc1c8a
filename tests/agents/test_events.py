"""Event records on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from agents import events
from agents.energy.messages import RoundEnergy
from agents.events import Record

EXAMPLES: list[Record] = [
    events.RunStarted(0.0, 1_700_000_000.25, ("a", "b"), ("c",)),
    events.ClientStatus(1.5, "a", "ready"),
    events.UpdateClipped(1.5, "a", 12.5),
    events.UpdateApplied(
        client="a",
        sequence=3,
        kind="delta",
        base_version=4,
        applied_version=6,
        staleness=1,
        weight=0.25,
        samples=100,
        steps=20,
        loss=1.75,
        bytes=2600,
        bytes_before=10_240.0,
        dispatched=1.0,
        downloaded=1.1,
        train_start=1.2,
        train_end=1.3,
        sent=1.4,
        arrived=1.5,
        applied=1.6,
        dispatch=17,
    ),
    events.UpdateRejected(2.0, "b", "duplicate: sequence 3", 16),
    events.RoundUnfinished(9.5, "b", 5, 7.25, 9.0, 18),
    events.ClientsDrawn(2.5, 7, 2, 3, "a c", "c", ""),
    events.VersionMade(2.5, 6, 4),
    events.Evaluated(2.5, 6, 0.75, 0.5),
    events.EvaluatedPart(2.5, 6, "class", "3", 20, 0.75, 0.5),
    events.Acted(2.75, "a", "scenario", 0.001, {"action": "set", "link": {"up": 1000000, "rtt": 0.02}}),
    RoundEnergy(2.75, "a", 17, 0.125, "sent", 0.5),
    events.Disrupted(34.0, 12.0, "nothing arrived"),
    events.Note(3.0, "zwei Geräte\nfehlen"),
    events.WrongSum(3.5, ("a", "b"), ("b", "c", "d")),
    events.RunEnded(4.0, "after", 6, 24),
]


def test_every_record_type_has_an_example() -> None:
    assert {type(record) for record in EXAMPLES} == set(events.RECORDS.values())


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record.event)
def test_records_are_written_and_read_back(record: Record) -> None:
    line = events.to_line(record)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert json.loads(line)["event"] == record.event
    assert events.from_line(line) == record


def test_infinite_loss_is_written_and_read_back() -> None:
    line = events.to_line(events.Evaluated(1.0, 2, math.inf, 0.1))
    assert json.loads(line)["loss"] is None
    record = events.from_line(line)
    assert isinstance(record, events.Evaluated)
    assert math.isnan(record.loss)


def test_floats_keep_microseconds_and_small_weights() -> None:
    line = events.to_line(events.Evaluated(1234.123456789, 2, 1 / 3e7, 0.1))
    assert '"at":1234.123457,' in line
    assert '"loss":3.33333e-08,' in line


def test_unknown_fields_and_records_are_skipped() -> None:
    assert events.from_line('{"event":"note","at":1.0,"message":"x","colour":"red"}') == events.Note(
        1.0, "x"
    )
    assert events.from_line('{"event":"invented_later","at":1.0}') is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "3",
        "[" * 60_000,
        '{"event":"note","at":1e999,"message":""}',
        '{"at":1}',
        '{"event":[]}',
        '{"event":null}',
        '{"event":"note","at":1}',
    ],
)
def test_line_that_is_no_record_is_an_error(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the text is json's or ours)
        events.from_line(line)


def _file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_torn_last_line_is_skipped(tmp_path: Path) -> None:
    whole = [events.to_line(record) for record in EXAMPLES]
    for torn in (whole[-1][:20], whole[-1][:-1]):
        path = _file(tmp_path, *whole[:-1], torn)
        assert list(events.read(path)) == EXAMPLES[:-1]


def test_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    good = events.to_line(EXAMPLES[1])
    path = _file(tmp_path, good, good[:20] + "\n", good)
    with pytest.raises(ValueError, match=r"events\.jsonl:2: "):
        list(events.read(path))


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    newer = events.RunStarted(0.0, 1.0, (), (), format=events.FORMAT + 1)
    with pytest.raises(ValueError, match="format 2, but this version reads up to 1"):
        list(events.read(_file(tmp_path, events.to_line(newer))))
