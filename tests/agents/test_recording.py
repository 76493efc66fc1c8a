"""`inputs.bin`: what is in it byte by byte, and where its entries end."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from agents.aggregator import recording
from agents.aggregator.core import Setup
from agents.aggregator.inputs import InstantOver, Settings, UpdateArrived
from agents.aggregator.recording import Cut, Extent, Recording, RecordingError, Torn
from agents.config import Named, StopConditions
from agents.rules.interface import ClientSide
from agents.wire import payloads
from tests.agents.helpers import message

MOST = 67_108_864
"""Bytes that a text may have, 64 MiB."""


HEAD = 36
"""Bytes of an entry before its text."""


def entry(text: bytes, payload: bytes = b"", number: int = 1) -> bytes:
    head = struct.pack("<IQQQ", len(text), len(payload), number, xxh3_64_intdigest(text + payload))
    return head + struct.pack("<Q", xxh3_64_intdigest(head)) + text + payload


def begun(path: Path, *, recycled: bool = False) -> Recording:
    settings = Settings(
        run="run",
        schema="s",
        side=ClientSide(),
        importance={"a": 1.0},
        stop=StopConditions(updates=3),
        evaluate_every=1_000_000_000,
    )
    setup = Setup(settings, Named("fedbuff", {"buffer_size": 1}), seed=7)
    return Recording(path, setup, recycled=recycled)


def test_entry_format_of_the_recording(
    tmp_path: Path,
) -> None:
    path = tmp_path / "inputs.bin"
    recorded = begun(path)
    recorded.flush()
    setup = path.read_bytes()
    assert setup.startswith(b"inputs2\n")
    assert setup[8 + HEAD :].startswith(b'{"settings":{"run":"run","importance":')
    told = message("a", 1)
    recorded.write(UpdateArrived(4, "a", 99, 3, told))
    recorded.write(InstantOver(5))
    recorded.flush()
    text = b'["UpdateArrived",{"at":4,"sender":"a","size":99,"arrived":3}]'
    assert path.read_bytes() == (
        setup + entry(text, payloads.encode(told), 1) + entry(b'["InstantOver",{"at":5}]', number=2)
    )
    assert recorded.size == path.stat().st_size
    recorded.close()
    first, update, instant = recording.read(path)
    assert isinstance(first, Setup)
    assert first.seed == 7
    assert isinstance(update, UpdateArrived)
    assert (update.at, update.size, update.message.vector.tolist()) == (4, 99, [1.0])
    assert instant == InstantOver(5)


def test_other_users_cannot_read_a_recording(tmp_path: Path) -> None:
    """This holds for an existing file too, such as one mounted into a container."""
    path = tmp_path / "inputs.bin"
    path.touch(0o644)
    recorded = begun(path, recycled=True)
    assert path.stat().st_mode & 0o777 == 0o600
    recorded.cut()
    assert path.stat().st_mode & 0o777 == 0o600
    recorded.close()


def of_four(path: Path) -> list[bytes]:
    """A recording of a setup and three entries of 60 bytes; its parts."""
    recorded = begun(path)
    for at in (5, 6, 7):
        recorded.write(InstantOver(at))
    recorded.close()
    whole = path.read_bytes()
    return [whole[:-180], whole[-180:-120], whole[-120:-60], whole[-60:]]


@pytest.mark.parametrize("kept", [1, 35, 36, 59])
def test_incomplete_last_entry_is_removed_when_the_file_is_continued(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "inputs.bin"
    setup, *entries = of_four(path)
    begin = len(setup) + 120
    path.write_bytes(setup + entries[0] + entries[1] + entries[2][:kept])
    assert list(recording.read(path))[1:] == [InstantOver(5), InstantOver(6), Torn(begin)]
    extent = recording.check(path)
    assert extent == Extent(first=0, last=2, size=begin)
    assert path.stat().st_size == begin + kept
    recorded = Recording.reopen(path, extent)
    recorded.write(InstantOver(8))
    recorded.close()
    assert path.read_bytes() == setup + entries[0] + entries[1] + entry(
        b'["InstantOver",{"at":8}]', number=3
    )


def test_every_flipped_bit_is_an_error_and_not_taken_for_a_torn_entry(tmp_path: Path) -> None:
    """This includes lengths and numbers: what follows is not taken for the rest of a torn entry."""
    path = tmp_path / "inputs.bin"
    setup, *entries = of_four(path)
    whole, begin = setup + b"".join(entries), len(setup) + 60
    for at in range(begin, begin + 60):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(RecordingError, match=rf"the entry at byte {begin}\b.* is damaged"):
                recording.check(path)
            with pytest.raises(RecordingError, match=rf"the entry at byte {begin}\b.* is damaged"):
                list(recording.read(path))


@pytest.mark.parametrize(
    ("order", "found"),
    [((0, 2, 1, 3), "2 of the run, expected 1"), ((0, 1, 3), "3 of the run, expected 2"),
     ((0, 1, 1, 2, 3), "1 of the run, expected 2"), ((1, 2, 3), "as the first entry")],
    ids=["swapped", "missing", "twice", "without a beginning"],
)  # fmt: skip
def test_missing_and_swapped_entries_are_named(tmp_path: Path, order: list[int], found: str) -> None:
    path = tmp_path / "inputs.bin"
    parts = of_four(path)
    path.write_bytes(b"".join((b"" if 0 in order else b"inputs2\n", *(parts[n] for n in order))))
    with pytest.raises(RecordingError, match=found):
        list(recording.read(path))


def test_empty_file_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "inputs.bin"
    path.touch()
    for read in (recording.check, lambda path: list(recording.read(path))):
        with pytest.raises(RecordingError, match=r"inputs\.bin is empty"):
            read(path)
    path.write_bytes(b"inputs2\n")
    with pytest.raises(RecordingError, match="has no complete entry"):
        recording.check(path)


BLOCK = 4096


def recycled(path: Path) -> Recording:
    """A log in the file of an earlier one: a `Cut`, entry 4, and the earlier log's entry 2."""
    log = begun(path, recycled=True)
    for at in (5, 6):
        log.write(InstantOver(at))
        log.sync()
    log.cut()
    log.write(InstantOver(7))
    log.cut()
    log.write(InstantOver(8))
    log.sync()
    return log


def test_recycled_log_ends_before_older_entries(tmp_path: Path) -> None:
    path = tmp_path / "inputs.bin"
    log = recycled(path)
    whole = path.read_bytes()
    assert [whole[n * BLOCK : n * BLOCK + 8] for n in range(3)] == [b"inputs3\n"] * 3
    assert whole[8 + HEAD :].startswith(b'{"entries":3}   ')
    assert whole[2 * BLOCK + 8 + HEAD :].startswith(b'["InstantOver",{"at":6}]   ')
    assert (log.size, len(whole)) == (2 * BLOCK, 3 * BLOCK)
    assert list(recording.read(path)) == [Cut(3), InstantOver(8), Torn(2 * BLOCK + 8)]
    assert recording.check(path) == Extent(first=3, last=4, size=2 * BLOCK)
    log.close()
    assert [file.name for file in tmp_path.iterdir()] == ["inputs.bin"]
    assert list(recording.read(path)) == [Cut(3), InstantOver(8)]


@pytest.mark.parametrize("lost", [2, 3, 4, 5])
@pytest.mark.parametrize("old", [b"\0" * BLOCK, b"\xff" * BLOCK], ids=["zeros", "ones"])
def test_incomplete_write_is_the_end_of_a_recycled_log(tmp_path: Path, lost: int, old: bytes) -> None:
    """When the power fails, any block of the last write may be missing. If a later write is there, the
    block is damaged."""
    path = tmp_path / "inputs.bin"
    log = recycled(path)
    log.write(InstantOver(9))
    update = replace(message("a", 1), vector=np.ones(3000, np.float32))
    log.write(UpdateArrived(10, "a", 99, 10, update))
    log.write(InstantOver(10))
    log.sync()
    one = bytearray(path.read_bytes())
    log.write(InstantOver(11))
    log.sync()
    log.close()
    two = bytearray(path.read_bytes())
    assert (len(one), len(two)) == (6 * BLOCK, 7 * BLOCK)
    begins = (InstantOver(8),) if lost == 2 else (InstantOver(8), InstantOver(9))
    one[lost * BLOCK : (lost + 1) * BLOCK] = two[lost * BLOCK : (lost + 1) * BLOCK] = old
    path.write_bytes(one)
    first, *entries, torn = recording.read(path)
    assert (first, tuple(entries), type(torn)) == (Cut(3), begins, Torn)
    assert recording.check(path).last == 3 + len(begins)
    path.write_bytes(two)
    for read in (recording.check, lambda path: list(recording.read(path))):
        with pytest.raises(RecordingError, match=r"the entry at byte \d+.* is damaged"):
            read(path)


def test_text_of_64_mib_is_read_and_a_longer_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "inputs.bin"
    begun(path).close()
    setup, text = path.read_bytes(), b'["InstantOver",{"at":5}]'
    path.write_bytes(setup + entry(text.ljust(MOST)))
    assert list(recording.read(path))[1:] == [InstantOver(5)]
    path.write_bytes(setup + entry(text.ljust(MOST + 1)))
    with pytest.raises(RecordingError, match="its text has 67,108,865 bytes"):
        list(recording.read(path))


def test_invalid_entry_is_named_by_its_position(tmp_path: Path) -> None:
    path = tmp_path / "inputs.bin"
    setup, *_ = of_four(path)
    path.write_bytes(setup + entry(b'["InstantOver",{"at":"soon"}]'))
    place = len(setup)
    with pytest.raises(
        RecordingError, match=rf"inputs\.bin, the entry at byte {place}: InstantOver has the wrong"
    ):
        list(recording.read(path))
