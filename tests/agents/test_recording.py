"""`inputs.bin`: what is in it byte by byte, and where its entries end."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from agents import wire
from agents.aggregator import recording
from agents.aggregator.core import Setup
from agents.aggregator.inputs import InstantOver, Suspended, UpdateArrived
from agents.aggregator.recording import Recording, RecordingError, Torn
from agents.aggregator.settings import Settings
from agents.config import Named, Stop
from agents.rules.interface import ClientSide
from tests.agents.helpers import message

MOST = 67_108_864
"""Bytes that a text may have, 64 MiB."""


def entry(text: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", len(text), len(payload)) + text + payload


def begun(path: Path) -> Recording:
    settings = Settings(
        run="run",
        schema="s",
        side=ClientSide(),
        importance={"a": 1.0},
        stop=Stop(updates=3),
        evaluate_every=1_000_000_000,
    )
    return Recording(path, Setup(settings, Named("fedbuff", {"buffer_size": 1}), seed=7))


def test_an_entry_is_two_lengths_a_compact_text_and_the_message_as_on_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "inputs.bin"
    recorded = begun(path)
    recorded.flush()
    setup = path.read_bytes()
    assert setup[12:].startswith(b'{"settings":{"run":"run","schema":"s",')
    told = message("a", 1)
    recorded.write(UpdateArrived(4, "a", 99, 3, told))
    recorded.write(InstantOver(5))
    recorded.flush()
    assert path.read_bytes() == (
        setup
        + entry(b'["UpdateArrived",{"at":4,"sender":"a","size":99,"arrived":3}]', wire.encode(told))
        + entry(b'["InstantOver",{"at":5}]')
    )
    recorded.close()
    first, update, instant = recording.read(path)
    assert isinstance(first, Setup)
    assert first.seed == 7
    assert isinstance(update, UpdateArrived)
    assert (update.at, update.size, update.message.vector.tolist()) == (4, 99, [1.0])
    assert instant == InstantOver(5)


def test_a_recording_of_0_2_0_is_read(tmp_path: Path) -> None:
    path = tmp_path / "inputs.bin"
    begun(path).close()
    path.write_bytes(path.read_bytes() + entry(b'["Suspended",{"at":9,"part":"2"}]'))
    assert [*recording.read(path)][1:] == [Suspended(9, "2")]


@pytest.mark.parametrize("kept", [1, 11, 12, 35])
def test_an_entry_that_is_not_whole_is_torn_and_cut_off(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "inputs.bin"
    whole = entry(b'["InstantOver",{"at":5}]')  # 36 bytes
    path.write_bytes(whole + whole[:kept])
    assert list(recording.read(path)) == [InstantOver(5), Torn(36)]
    begun(path).close()
    instant, setup = recording.read(path)
    assert instant == InstantOver(5)
    assert isinstance(setup, Setup)


def test_a_text_of_64_mib_is_read_and_a_longer_one_is_none_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "inputs.bin"
    text = b'["InstantOver",{"at":5}]'
    path.write_bytes(entry(text.ljust(MOST)))
    assert list(recording.read(path)) == [InstantOver(5)]
    path.write_bytes(entry(text.ljust(MOST + 1)))
    assert list(recording.read(path)) == [Torn(0)]


def test_what_is_no_entry_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "inputs.bin"
    whole = entry(b'["InstantOver",{"at":5}]')
    path.write_bytes(whole + entry(b'["InstantOver",{"at":"soon"}]'))
    with pytest.raises(RecordingError, match=r"inputs\.bin, the entry at byte 36: InstantOver does not"):
        list(recording.read(path))
