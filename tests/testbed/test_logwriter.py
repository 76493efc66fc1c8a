"""Output of local processes is kept, up to a limit, whichever process prints and however much."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.errors import from_os_error
from testbed.runtimes.process import log_writer
from testbed.runtimes.process.log_writer import CUT, LogWriter

MANY = "for number in range(20_000): print(f'{number:049}')"
"""A megabyte."""


def printing(writer: LogWriter, path: Path, code: str) -> None:
    descriptor = writer.pipe(path)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=descriptor, timeout=120, check=True)
    finally:
        os.close(descriptor)
    assert done.returncode == 0


def test_log_is_complete_up_to_its_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "LOG_BYTES", 100_000)
    writer, path = LogWriter(), tmp_path / "d-1.log"
    path.write_text("of an earlier leg\n")
    printing(writer, path, "print('begun')")
    writer.catch_up()
    assert path.read_text() == "of an earlier leg\nbegun\n"
    printing(writer, path, MANY)
    printing(writer, path, "print('ended')")
    assert writer.close() == []
    first, *rest, before, last = path.read_bytes().splitlines(keepends=True)
    assert (first, before, last) == (CUT, b"%049d\n" % 19_999, b"ended\n")
    assert rest == [b"%049d\n" % number for number in range(19_999 - len(rest), 19_999)]
    assert 100_000 < path.stat().st_size < 300_000


def test_full_disk_does_not_block_the_process_and_is_reported() -> None:
    writer = LogWriter()
    printing(writer, Path("/dev/full"), MANY)
    (failure,) = writer.close()
    assert str(from_os_error(failure)).startswith("/dev/full: No space left on device (")


def test_output_during_a_full_disk_is_written_later_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "LOG_BYTES", 1000)

    def printed(code: str) -> None:
        writer = LogWriter()
        path.symlink_to("/dev/full")
        printing(writer, path, code)
        writer.catch_up()
        path.unlink()
        assert writer.close() == []

    path = tmp_path / "d-1.log"
    printed("print('the disk is full')")
    assert path.read_text() == "the disk is full\n"
    path.unlink()
    printed(MANY)
    first, *_, last = path.read_bytes().splitlines(keepends=True)
    assert (first, last) == (CUT, b"%049d\n" % 19_999)
    assert path.stat().st_size < 2000
