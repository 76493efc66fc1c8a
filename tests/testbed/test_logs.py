"""Quoted output of containers: harmless to a terminal, and short."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents import events
from testbed.errors import BadInputError
from testbed.run import live_runs, shell
from testbed.rundir.directory import RunDirectory

WRITTEN = b"first\n\x1b]0;title\x07\tred \x1b[31m\xe2\x80\xae\xff\n"
SHOWN = "\\x1b]0;title\\x07\tred \\x1b[31m\\u202e\N{REPLACEMENT CHARACTER}"


def test_control_characters_in_a_device_log_are_removed(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    directory.write_manifest(run="r")
    (directory.logs / "d-1.log").write_bytes(b"x" * 10**6 + b"\n" + WRITTEN)
    assert list(live_runs.read_logs(directory, "d-1", tail=2)) == [("d-1", f"first\n{SHOWN}")]
    assert directory.log_tail("d-1", lines=2).splitlines()[2:] == ["    first", f"    {SHOWN}"]
    (directory.logs / "d-1.log").write_bytes(b"x" * 10**6)
    assert len(directory.log_tail("d-1")) < 13_000


def test_group_name_selects_its_devices(tmp_path: Path) -> None:
    """`testbed logs RUN GROUP` and `testbed shell RUN GROUP`, the latter where it has one device."""
    directory = RunDirectory.create(tmp_path, "r")
    groups = {"pi-1": "pi", "pi-2": "pi", "nano-1": "nano"}
    devices = {name: {"group": group} for name, group in groups.items()}
    directory.write_manifest(run="r", runtime="process", devices=devices)
    for name in groups:
        (directory.logs / f"{name}.log").write_text(f"of {name}\n")
    assert dict(live_runs.read_logs(directory, "pi", tail=2)) == {"pi-1": "of pi-1", "pi-2": "of pi-2"}
    with pytest.raises(BadInputError, match=r"r has no log of tv; it has nano-1, pi-1, pi-2$"):
        list(live_runs.read_logs(directory, "tv", tail=2))
    for name, refusal in {
        "pi": "pi is a group of 2 devices of r: name a device, such as pi-1",
        "nano": "r ran in the process runtime, whose devices have no containers",
        "tv": "r has no device tv; it has pi, nano, pi-1, pi-2, nano-1$",
    }.items():
        with pytest.raises(BadInputError, match=refusal):
            shell.run(directory, name, ["true"])


def test_story_of_a_device_comes_from_the_records(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    directory.write_manifest(run="r", runtime="virtual", devices={"pi-1": {"group": "pi"}})
    assert live_runs.read_story(directory, "pi-1") == ""
    rejected = events.UpdateRejected(2.5, "pi-1", "\x1b[31m", 3)
    directory.events.write_text(events.to_line(rejected))
    assert live_runs.read_story(directory, "pi-1") == (
        "     2.500 s  update that answers dispatch 3 rejected: \\x1b[31m"
    )
    with pytest.raises(BadInputError, match="r has no device pi; it has pi-1"):
        live_runs.read_story(directory, "pi")
