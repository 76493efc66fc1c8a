"""Finished updates stay on the client's disk until the aggregator has acknowledged them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agents.client.files import Outbox, retry_while_disk_full, set_aside


def opened(folder: Path) -> Outbox:
    """An outbox in which nothing is odd."""
    return Outbox(folder, pytest.fail)


def test_unacknowledged_updates_survive_a_restart_in_order(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    for dispatch in (2, 9, 10, 11):
        outbox.put(dispatch, [b"%d" % dispatch])
    outbox.discard(9)
    outbox.discard(9)  # once more, as it was sent once more
    outbox.discard(3)  # of a former process
    (tmp_path / ".12.update.5e1f").write_bytes(b"to")  # a crash in mid-write
    again = opened(tmp_path)
    assert list(again.payloads()) == [b"2", b"10", b"11"]
    for dispatch in (2, 10, 11):
        again.discard(dispatch)
    assert list(opened(tmp_path).payloads()) == []


def test_file_of_an_acknowledged_update_is_reused_for_a_shorter_one(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    outbox.put(1, [b"a long ", b"update"])
    outbox.discard(1)
    assert list(opened(tmp_path).payloads()) == []
    outbox.put(2, [b"short"])
    outbox.put(3, [b"both"])
    assert list(outbox.payloads()) == [b"short", b"both"]
    outbox.discard(2)
    outbox.close()
    assert [path.name for path in tmp_path.iterdir()] == ["3.update"]


def test_dispatch_answered_twice_is_stored_once(tmp_path: Path) -> None:
    """This happens if an aggregator lost its last dispatches and continues from an earlier number."""
    outbox = opened(tmp_path)
    outbox.put(4, [b"of the first"])
    outbox.put(5, [b"between"])
    outbox.put(4, [b"of the second"])
    assert list(outbox.payloads()) == [b"between", b"of the second"]
    outbox.discard(4)
    assert list(outbox.payloads()) == [b"between"]


def odd(folder: Path) -> list[str]:
    """Put invalid files into an outbox; return their names."""
    (folder / "1.update").touch()
    (folder / "3.update").mkdir()
    os.mkfifo(folder / "5.update")
    (folder / "6.update").symlink_to("/etc/passwd")
    (folder / "7.update").symlink_to(folder / "7.update")
    (folder / "8.update").symlink_to("/proc/self/mem")
    (folder / "9.update").symlink_to("/dev/zero")
    (folder / "abc.update").write_bytes(b"an update")
    (folder / "010.update").write_bytes(b"an update")
    (folder / f"{'9' * 5000}"[:200]).with_suffix(".update").write_bytes(b"an update")
    (folder / "\u0663.update").write_bytes(b"an update")
    with (folder / "11.update").open("wb") as sparse:
        sparse.truncate(2**40)
    return sorted(path.name for path in folder.iterdir())


def test_invalid_file_is_set_aside_and_reported_without_blocking_others(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    for dispatch in (2, 4, 12):
        outbox.put(dispatch, [b"%d" % dispatch])
    data = bytearray((tmp_path / "4.update").read_bytes())
    data[0] ^= 1
    (tmp_path / "4.update").write_bytes(data)
    names = [*odd(tmp_path), "4.update"]
    names = sorted({*names} - {"2.update", "12.update"})
    told: list[str] = []
    again = Outbox(tmp_path, told.append)
    assert list(again.payloads()) == [b"2", b"12"]
    assert len(told) == len(names) == 13
    for name in names:
        assert sum(line.startswith(f"{tmp_path / name} is set aside as ") for line in told) == 1
        assert (tmp_path / f"{name}.aside").is_symlink() or (tmp_path / f"{name}.aside").exists()
    damaged = "it cannot be read: its checksum is wrong: it is damaged or incomplete"
    assert f"{tmp_path / '4.update'} is set aside as 4.update.aside: {damaged}" in told
    assert list(opened(tmp_path).payloads()) == [b"2", b"12"]
    again.put(3, [b"3"])  # where the folder was
    again.put(1, [b"1"])
    assert list(again.payloads()) == [b"2", b"12", b"3", b"1"]
    assert set_aside(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_spare_file_that_is_no_regular_file_is_not_written_to(kind: str, tmp_path: Path) -> None:
    spare, other = tmp_path / "spare", tmp_path / "other"
    other.write_bytes(b"somebody else's")
    if kind == "folder":
        spare.mkdir()
    elif kind == "pipe":
        os.mkfifo(spare)
    else:
        spare.symlink_to(other)
    told: list[str] = []
    outbox = Outbox(tmp_path, told.append)
    outbox.put(1, [b"1"])
    assert list(outbox.payloads()) == [b"1"]
    assert told == [f"{spare} is set aside as spare.aside: it is not a regular file"]
    assert other.read_bytes() == b"somebody else's"


def test_other_users_cannot_read_an_update(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    outbox.put(1, [b"1"])
    outbox.discard(1)
    outbox.put(2, [b"2"])
    outbox.put(3, [b"3"])
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_full_disk_is_waited_for_until_the_run_ends() -> None:
    tried: list[float] = []

    def write() -> None:
        if len(tried) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    def wait(seconds: float) -> bool:
        tried.append(seconds)
        return False

    assert retry_while_disk_full(write, wait)
    assert tried == [1.0, 1.0]
    tried.clear()
    assert not retry_while_disk_full(write, lambda _: True)
    with pytest.raises(FileNotFoundError):
        retry_while_disk_full(lambda: Path("/no/such/folder").mkdir(), wait)
