"""A test that leaves files or sockets to the garbage collector fails itself, and no later one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests import leaks
from tests.running import TOPOLOGIES

ROOT = TOPOLOGIES.parent
FILE = """
import gc
import socket

import pytest


class Peer:
    def __init__(self):
        self.sockets = socket.socketpair()
        self.on_message = lambda: self.sockets

    def __del__(self):  # may come before the sockets', or after
        for each in self.sockets:
            each.close()


@pytest.fixture
def peer():
    return Peer()


def test_before():
    gc.disable()  # as if it came by later


def test_leaks(peer):
    peer.on_message()


def test_after():
    gc.collect()
"""


def test_test_that_leaks_sockets_fails_and_those_beside_it_do_not(tmp_path: Path) -> None:
    (tmp_path / "test_sockets.py").write_text(FILE)
    where = ("--rootdir", str(tmp_path), "-c", str(ROOT / "pyproject.toml"), str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", *where],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert "3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert re.search(r"ERROR \S*test_sockets\.py::test_leaks - Failed: left to the gar", done.stdout)


def test_closed_or_used_files_are_no_leak() -> None:
    before = leaks.open_files()
    one, other = socket.socketpair()
    with one, other:
        assert leaks.left_since(before) == []
        assert one.fileno() in leaks.open_files()
    assert leaks.left_since(before) == []
