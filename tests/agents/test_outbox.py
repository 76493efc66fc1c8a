"""Finished updates stay on the client's disk until the aggregator has acknowledged them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from agents.client.outbox import Outbox, written


def test_what_is_not_acknowledged_is_there_after_a_restart_in_order(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for dispatch in (2, 9, 10, 11):
        outbox.put(dispatch, [b"%d" % dispatch])
    outbox.acknowledged(9)
    outbox.acknowledged(9)  # once more, as it was sent once more
    outbox.acknowledged(3)  # of a former process
    (tmp_path / ".12.update.5e1f").write_bytes(b"to")  # a crash in mid-write
    again = Outbox(tmp_path)
    assert list(again.payloads()) == [b"2", b"10", b"11"]
    for dispatch in (2, 10, 11):
        again.acknowledged(dispatch)
    assert list(Outbox(tmp_path).payloads()) == []


def test_a_shorter_update_takes_the_file_of_a_longer_one_that_is_acknowledged(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(1, [b"a long ", b"update"])
    outbox.acknowledged(1)
    assert list(Outbox(tmp_path).payloads()) == []
    outbox.put(2, [b"short"])
    outbox.put(3, [b"both"])
    assert list(outbox.payloads()) == [b"short", b"both"]
    outbox.acknowledged(2)
    outbox.close()
    assert [path.name for path in tmp_path.iterdir()] == ["3.update"]


def test_a_dispatch_that_is_answered_twice_is_there_once(tmp_path: Path) -> None:
    """As where an aggregator has forgotten its last dispatches, and counts on from an earlier one."""
    outbox = Outbox(tmp_path)
    outbox.put(4, [b"of the first"])
    outbox.put(5, [b"between"])
    outbox.put(4, [b"of the second"])
    assert list(outbox.payloads()) == [b"between", b"of the second"]
    outbox.acknowledged(4)
    assert list(outbox.payloads()) == [b"between"]


def test_a_full_disk_is_waited_for_until_the_run_ends() -> None:
    tried: list[float] = []

    def write() -> None:
        if len(tried) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    def wait(seconds: float) -> bool:
        tried.append(seconds)
        return False

    assert written(write, wait)
    assert tried == [1.0, 1.0]
    tried.clear()
    assert not written(write, lambda _: True)
    with pytest.raises(FileNotFoundError):
        written(lambda: Path("/no/such/folder").mkdir(), wait)
