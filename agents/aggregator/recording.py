"""`inputs.bin`: every input of an aggregator's core, in order, updates included, to hand in again.

The core has no clock, no socket and no random source but its seed, so what went in says exactly what
came out. An entry is two lengths (of its text and of its payload: little endian, 4 and 8 bytes), a JSON
text, and the payload. The text is a `Setup`, with which a core is made (one per part of a run that
was resumed), or `[name, {field: value, ...}]`: one of `agents.aggregator.inputs`. An update's message is
the payload, as it was on the wire. A crash can leave the last entry torn.

It is handed to the operating system before the journal is, and not synced: nothing is carried on from
it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agents import config, wire
from agents.aggregator.core import Setup
from agents.aggregator.inputs import INPUTS, Input, UpdateArrived

_LENGTHS = struct.Struct("<IQ")
_MAX_TEXT = 64 * 1024 * 1024
_JSON = json.JSONEncoder(separators=(",", ":"))
_TYPES = {"Nanoseconds": int, "int": int, "float": float, "str": str}
_FIELDS: dict[str, dict[str, type]] = {
    name: {f.name: _TYPES[str(f.type)] for f in dataclasses.fields(kind) if f.name != "message"}
    for name, kind in INPUTS.items()
}
"""Of each input, the fields that its text has, and their types."""


class RecordingError(Exception):
    """The file is not a recording, or has been changed; the text says where."""


class Recording:
    """Appends entries to the file at `path`."""

    def __init__(self, path: Path, setup: Setup) -> None:
        _cut_torn_entry(path)
        self._file = path.open("ab")
        self._write(_JSON.encode(dataclasses.asdict(setup)))

    def write(self, event: Input) -> None:
        """Append `event`."""
        name = type(event).__name__
        text = _JSON.encode((name, {field: getattr(event, field) for field in _FIELDS[name]}))
        self._write(text, *(wire.parts(event.message) if isinstance(event, UpdateArrived) else ()))

    def flush(self) -> None:
        """Hand all to the operating system."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, text: str, *payload: bytes | memoryview) -> None:
        encoded = text.encode()
        size = sum(len(part) for part in payload)
        self._file.write(_LENGTHS.pack(len(encoded), size) + encoded)
        for part in payload:  # a model's worth of bytes is not copied to be put together
            self._file.write(part)


@dataclass(frozen=True, slots=True)
class Torn:
    """Where the file ends in the middle of an entry, at byte `at`."""

    at: int


def read(path: Path) -> Iterator[Setup | Input | Torn]:
    """The entries in order. Raises RecordingError, naming the byte, for what cannot be one of ours."""
    with path.open("rb") as file:
        for at, text, size in _entries(file):
            if text is None:
                yield Torn(at)
                return
            try:
                yield _entry(text, file.read(size))
            except (ValueError, TypeError, RecursionError, wire.WireError) as error:
                raise RecordingError(f"{path}, the entry at byte {at}: {error}") from error


def _entries(file: BinaryIO) -> Iterator[tuple[int, bytes | None, int]]:
    """Place, text and length of the payload of each entry; text None: what is left is torn.

    The file stands at the payload when it is given, and need not be read on from there.
    """
    end, at = os.fstat(file.fileno()).st_size, 0
    while at < end:
        file.seek(at)
        head = file.read(_LENGTHS.size)
        text, size = _LENGTHS.unpack(head) if len(head) == _LENGTHS.size else (0, end)
        following = at + _LENGTHS.size + text + size
        if following > end or text > _MAX_TEXT:
            yield at, None, 0
            return
        yield at, file.read(text), size
        at = following


def _entry(text: bytes, payload: bytes) -> Setup | Input:
    entry = json.loads(text)
    if isinstance(entry, dict):
        return config.from_dict(Setup, entry)
    match entry:
        case [str(name), dict(fields)] if name in INPUTS:
            return _input(name, fields, payload)
    raise ValueError(f"no input of an aggregator: {text[:80]!r}")


def _input(name: str, fields: dict[str, Any], payload: bytes) -> Input:
    if {field: type(value) for field, value in fields.items()} != _FIELDS[name]:
        raise ValueError(f"{name} does not have {fields!r:.80}")
    if name == UpdateArrived.__name__:
        return UpdateArrived(**fields, message=wire.decode_update(payload))
    return INPUTS[name](**fields)


def _cut_torn_entry(path: Path) -> None:
    """Take away what a crash left at the end, so that the next entry can be found."""
    if path.exists():
        with path.open("r+b") as file:
            for at, text, _ in _entries(file):
                if text is None:
                    file.truncate(at)
