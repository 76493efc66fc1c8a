"""Turns of the clients of a host, with real locks and processes."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from agents.device import turns
from tests.waiting import eventually

PATIENCE = 300.0
"""Seconds that no test waits for."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the turns of a host with one core: two."""
    turns.make(tmp_path, 1)
    return tmp_path


def take(folder: Path, seconds: float = 0.01) -> int | None:
    return turns.take(folder, seconds, lambda: False)


def test_next_client_starts_when_another_is_ready(folder: Path) -> None:
    first, second = take(folder), take(folder)
    assert first is not None
    assert second is not None
    assert take(folder) is None
    begin = time.monotonic()
    threading.Timer(0.3, os.close, (first,)).start()
    third = take(folder, PATIENCE)
    assert time.monotonic() - begin >= 0.3
    assert third is not None
    for descriptor in (second, third):
        os.close(descriptor)


def test_turn_ends_when_the_client_is_killed(folder: Path) -> None:
    with ExitStack() as ended:
        clients = []
        for _ in turns.names(1):
            turn = take(folder)
            assert turn is not None
            clients.append(subprocess.Popen(["sleep", "600"], pass_fds=(turn,)))
            ended.callback(clients[-1].wait)
            ended.callback(clients[-1].kill)
            os.close(turn)  # as the init does
        assert take(folder) is None
        clients[0].kill()
        free = eventually(lambda: take(folder))
        os.close(free)


def test_every_init_may_read_the_files(tmp_path: Path) -> None:
    """In a container it is another user than the one of `testbed up`, without the right to read all."""
    before = os.umask(0o077)
    try:
        turns.make(tmp_path, 2)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode)[-3:] for path in tmp_path.iterdir()} == {
        f"turn-{number}": "644" for number in range(4)
    }


def test_clients_start_at_once_where_files_cannot_be_locked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert take(folder, PATIENCE) is None


def test_nobody_waits_without_turns_or_after_sigterm(tmp_path: Path, folder: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert take(empty, PATIENCE) is None
    held = [take(folder), take(folder)]
    assert turns.take(folder, PATIENCE, lambda: True) is None
    for descriptor in filter(None, held):
        os.close(descriptor)
