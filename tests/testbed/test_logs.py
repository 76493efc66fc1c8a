"""What containers wrote, as it is quoted: harmless to a terminal, and short."""

from __future__ import annotations

from pathlib import Path

from testbed.run import logs
from testbed.rundir.directory import RunDirectory

WRITTEN = b"first\n\x1b]0;title\x07\tred \x1b[31m\xe2\x80\xae\xff\n"
SHOWN = "\\x1b]0;title\\x07\tred \\x1b[31m\\u202e\N{REPLACEMENT CHARACTER}"


def test_the_log_of_a_device_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    directory.write_manifest(run="r")
    (directory.logs / "d-1.log").write_bytes(b"x" * 10**6 + b"\n" + WRITTEN)
    assert list(logs.read(directory, "d-1", tail=2)) == [("d-1", f"first\n{SHOWN}")]
    assert directory.last_words("d-1", lines=2).splitlines()[2:] == ["    first", f"    {SHOWN}"]
    (directory.logs / "d-1.log").write_bytes(b"x" * 10**6)
    assert len(directory.last_words("d-1")) < 13_000
