"""`inputs.bin`: every input of an aggregator's core, in order, updates included, to hand in again.

The core has no clock, no socket and no random source but its seed, so what went in says exactly what
came out. An entry is two lengths (of its text and of its payload: little endian, 4 and 8 bytes), a JSON
text, and the payload. The text is `[name, {field: value, ...}]`: one of `agents.aggregator.inputs`, or
a `Written` record. The message of an update, or of
a sum of shares, is the payload, as it was on the wire. The first entry is what
the others came after: the `Setup` that the core was made of or, where older entries were cut away, a
`Cut`. A crash can leave the last entry torn.

It is handed to the operating system before the journal is, so the journal never has more than follows
from it.
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

from agents import config, files, wire
from agents.aggregator.core import Setup
from agents.aggregator.inputs import INPUTS, Input, SharesSum, SharesSummed, Suspended, UpdateArrived
from agents.secure import wire as secure_wire


@dataclass(frozen=True, slots=True)
class Written:
    """A record that was written to the journal here, and does not come from the core."""

    line: str


_LENGTHS = struct.Struct("<IQ")
_MAX_TEXT = 64 * 1024 * 1024
_JSON = json.JSONEncoder(separators=(",", ":"))
_TYPES = {"Nanoseconds": int, "int": int, "float": float, "str": str}
_FIELDS: dict[str, dict[str, type]] = {
    name: {f.name: _TYPES[str(f.type)] for f in dataclasses.fields(kind) if f.name != "message"}
    for name, kind in (INPUTS | {"Written": Written}).items()
}
"""Of each input, the fields that its text has, and their types."""


class RecordingError(Exception):
    """The file is not a recording, or has been changed; the text says where."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The first so many entries, beside the one that says so, were cut away."""

    entries: int


class Recording:
    """Appends entries to the file at `path`, `begin` first."""

    def __init__(self, path: Path, begin: Setup | Cut | None) -> None:
        _cut_torn_entry(path)
        self._file = path.open("ab")
        self.size = self._file.tell()
        """Bytes of the file."""
        if begin is not None:
            self._write(_JSON.encode(dataclasses.asdict(begin)))

    def write(self, event: Input | Written, payload: bytes | bytearray | None = None) -> None:
        """Append `event`; of an update, `payload` is what it was decoded of, where that is at hand."""
        name = type(event).__name__
        text = _JSON.encode((name, {field: getattr(event, field) for field in _FIELDS[name]}))
        if isinstance(event, UpdateArrived | SharesSummed):
            self._write(text, *(_laid_out(event) if payload is None else (payload,)))
        else:
            self._write(text)

    def flush(self) -> None:
        """Hand all to the operating system."""
        self._file.flush()

    def sync(self) -> None:
        """Put all on the disk."""
        self.flush()
        os.fdatasync(self._file.fileno())

    def cut(self, entries: int) -> None:
        """Take away all, of which there were so many in the run: they are not needed any more."""
        self.flush()
        self._file.truncate(0)
        self.size = 0
        self._write(_JSON.encode(dataclasses.asdict(Cut(entries))))
        self.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, text: str, *payload: bytes | bytearray | memoryview) -> None:
        encoded = text.encode()
        size = sum(len(chunk) for chunk in payload)
        self.size += _LENGTHS.size + len(encoded) + size
        self._file.write(_LENGTHS.pack(len(encoded), size) + encoded)
        for chunk in payload:  # a model's worth of bytes is not copied to be put together
            self._file.write(chunk)


def _laid_out(event: UpdateArrived | SharesSummed) -> tuple[bytes | memoryview, ...]:
    if isinstance(event, SharesSummed):
        return (secure_wire.encode_sum(event.message.number, event.message.words),)
    head, views = wire.laid_out(event.message)
    return head, *views


@dataclass(frozen=True, slots=True)
class Torn:
    """Where the file ends in the middle of an entry, at byte `at`."""

    at: int


def read(path: Path, skip: int = 0) -> Iterator[Setup | Cut | Input | Written | Torn]:
    """The entries in order, after the first without the first `skip` of the run. Raises RecordingError,
    naming the byte, for what cannot be one of ours."""
    with files.open_regular(path) as file:
        for number, (at, text, size) in enumerate(_entries(file)):
            if text is None:
                yield Torn(at)
                return
            if 0 < number <= skip:
                continue
            try:
                entry = _entry(text, file.read(size))
            except (
                *(ValueError, TypeError, RecursionError, wire.WireError),
                secure_wire.SecureWireError,
            ) as error:
                raise RecordingError(f"{path}, the entry at byte {at}: {error}") from error
            if isinstance(entry, Cut):
                skip -= entry.entries
            yield entry


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


def _entry(text: bytes, payload: bytes) -> Setup | Cut | Input | Written:
    entry = files.from_json(text)
    if isinstance(entry, dict):
        is_cut = entry.keys() == {"entries"}
        return config.from_dict(Cut, entry) if is_cut else config.from_dict(Setup, entry)
    match entry:
        case [str(name), dict(fields)] if name in _FIELDS:
            return _input(name, fields, payload)
    raise ValueError(f"no input of an aggregator: {text[:80]!r}")


def _input(name: str, fields: dict[str, Any], payload: bytes) -> Input | Written:
    if name == Suspended.__name__ and "part" in fields:  # of 0.2.0
        fields["segment"] = fields.pop("part")
    if {field: type(value) for field, value in fields.items()} != _FIELDS[name]:
        raise ValueError(f"{name} does not have {fields!r:.80}")
    if name == UpdateArrived.__name__:
        return UpdateArrived(**fields, message=wire.decode_update(payload))
    if name == SharesSummed.__name__:
        return SharesSummed(**fields, message=SharesSum(*secure_wire.decode_sum(payload)))
    return Written(**fields) if name == Written.__name__ else INPUTS[name](**fields)


def _cut_torn_entry(path: Path) -> None:
    """Take away what a crash left at the end, so that the next entry can be found."""
    if path.exists():
        with path.open("r+b") as file:
            for at, text, _ in _entries(file):
                if text is None:
                    file.truncate(at)
