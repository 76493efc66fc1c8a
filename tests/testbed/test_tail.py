from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents import events
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import RecordFollower, Samples
from tests.testbed.record_factories import STARTED


def test_follower_reads_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = RecordFollower(path)
    assert follower.read() == []  # not there yet
    first, second, third = STARTED, events.Note(1.0, "härter"), events.VersionMade(2.0, 1, 3)
    line = events.to_line(second)
    with path.open("a", encoding="utf-8") as file:
        file.write(events.to_line(first) + line[:9])
        file.flush()
        assert follower.read() == [first]
        assert follower.read() == []
        file.write(line[9:] + '{"event":"from a later version"}\n' + events.to_line(third))
        file.flush()
        assert follower.read() == [second, third]
        file.write("no record\n")
    with pytest.raises(ValueError, match=r"events\.jsonl: "):
        follower.read()


def test_follower_reads_a_long_file_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    records = [events.Note(float(k), "härter") for k in range(10)]
    path.write_text("".join(map(events.to_line, records)), encoding="utf-8")
    follower, pieces = RecordFollower(path), []
    while piece := follower.read(150):
        pieces.append(piece)
    assert len(pieces) > 2
    assert [record for piece in pieces for record in piece] == records


def test_samples_use_the_clock_of_the_newest_segment(tmp_path: Path) -> None:
    """A run was resumed 1000 s later, after a reboot."""
    directory = RunDirectory(tmp_path)
    directory.write_manifest(monotonic_zero=1.7e9)
    directory.begin_telemetry()
    with directory.telemetry.open("a") as file:
        file.write('{"device": "pi-1", "at": 500}\n{"device": "pi-1", "at')
    directory.write_manifest(monotonic_zero=1.7e9 + 1400)
    directory.begin_telemetry()
    with directory.telemetry.open("a") as file:
        file.write('{"device": "pi-1", "at": 100}\n')
    assert [sample["at"] for sample in Samples(directory.telemetry).read()] == [-900, 100]


def test_telemetry_is_read_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    lines = [json.dumps({"device": "pi-1", "at": at, "cpu": 0.5}) + "\n" for at in range(100)]
    path.write_text("".join(lines))
    samples = Samples(path, last=3 * len(lines[-1]) - 1)
    assert [sample["at"] for sample in samples.read()] == [98, 99]  # the third is torn
    with path.open("a") as file:
        file.write('nonsense\n[1]\n{"at": 100}\n{"device": "pi-1", "at": "late"}\n')
        file.write(lines[99] + '{"at"')
    assert samples.read() == [json.loads(lines[99])]
    for everything in (Samples(path, last=10**6), Samples(path)):
        assert len(everything.read()) == 101
