"""The journal: in the order written, on the disk at the end, without torn lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agents import events
from agents.aggregator.storage import Journal

FIRST, SECOND = events.Note(1.0, "first"), events.Note(2.0, "second")


def test_flushed_records_are_appended_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(events.to_line(FIRST))
    journal = Journal(path)
    journal.write(SECOND)
    journal.flush()
    assert list(events.read(path)) == [FIRST, SECOND]
    journal.write(FIRST)
    journal.close()
    assert list(events.read(path)) == [FIRST, SECOND, FIRST]


def test_closed_records_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.append(len(list(events.read(path)))))
    journal = Journal(path)
    journal.write(FIRST)
    journal.flush()
    journal.write(events.VersionMade(1.5, 1, 1))
    assert synced == []
    journal.close()
    assert synced == [2]  # records that are in the file by then


@pytest.mark.parametrize("torn", ["", '{"event":"note","at":1.5'])
def test_first_record_after_a_crash_starts_a_new_line(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(events.to_line(FIRST) + torn)
    journal = Journal(path)
    journal.write(SECOND)
    journal.close()
    assert list(events.read(path)) == [FIRST, SECOND]


def test_single_torn_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event"')
    Journal(path).close()
    assert path.read_text() == ""
