"""`inputs.bin`: the log of all inputs of an aggregator's core, in order, with updates, for replay.

The core has no clock, no socket and no random source other than its seed, so its inputs determine its
outputs. The file begins with `_MAGIC`, which identifies the format. An entry is a head (`_HEAD`, little
endian), a JSON text, and a payload. The head has the lengths of text and payload (4 and 8 bytes), the
number of the entry in the run (8 bytes), the checksum of text and payload, and that of the head's
earlier fields. So an incomplete last entry after a crash can be distinguished from a damaged, missing or
misplaced one.

The text is `[name, {field: value, ...}]` with a name in `agents.aggregator.inputs`. For an update or an
answer, the payload is the message as it was sent. The first entry is the core's `Setup`, with
number 0, or, if older entries were removed, a `Cut` with the number of the last of them.

The log is flushed to the operating system before the journal, so the journal never has records whose
inputs the log lacks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agents import config
from agents.aggregator.core import Setup
from agents.aggregator.inputs import INPUTS, Answered, Input, UpdateArrived
from agents.aggregator.storage import BLOCK, AppendedFile
from agents.disk import files
from agents.disk.files import PACKED, Checksum
from agents.wire import payloads

_Bytes = bytes | bytearray | memoryview
_MAGIC = b"inputs2\n"
_WRITE = b"inputs3\n"
"""Magic number of each write of a recycled log. Neither can be the beginning of a head."""
_HEAD = struct.Struct("<IQQQ")
_HEAD_BYTES = _HEAD.size + PACKED.size
_PIECE = 2**20
"""Bytes per read for a checksum."""
_MOST_WAITING = 64 * 1024 * 1024
"""Bytes of entries that wait. `write` writes more than these itself, so that memory is bounded."""
_MAX_TEXT = 64 * 1024 * 1024
_JSON = json.JSONEncoder(separators=(",", ":"))
_TYPES = {"Nanoseconds": int, "int": int, "float": float, "str": str}
_FIELDS: dict[str, dict[str, type]] = {
    name: {f.name: _TYPES[str(f.type)] for f in dataclasses.fields(kind) if f.name != "message"}
    for name, kind in INPUTS.items()
}
"""Fields of each input's text."""


class RecordingError(Exception):
    """The file is not a recording, or is damaged. The message says where."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Marker: the first `entries` entries of the run's log were removed."""

    entries: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Complete entries of a file. An incomplete one at its end does not count."""

    first: int
    """A `Setup` or a `Cut`. The file has all inputs with higher numbers up to `last`."""
    last: int
    size: int
    """Bytes up to the end of the last complete entry."""


@dataclass(slots=True)
class _Entry:
    number: int
    text: bytes
    payload: _Bytes = b""

    @property
    def size(self) -> int:
        return _HEAD_BYTES + len(self.text) + len(self.payload)


class Recording:
    """Writer of the log at `path`, which other users may not read: it contains updates of single
    clients.

    Entries wait in memory until they are flushed or synced; `start_sync` does that in a thread.

    `recycled`: the log is cut from time to time. Then it is written around the page cache, in whole
    blocks, over the blocks of an earlier log, which is the fastest way to the disk. So the file may have
    older entries after the last one.
    """

    def __init__(self, path: Path, begin: Setup, *, recycled: bool = False) -> None:
        """Replace the file by one whose first entry is `begin`."""
        self._open(path, last=0, size=0, recycled=recycled)
        self._append([_Entry(0, _JSON.encode(dataclasses.asdict(begin)).encode())])
        self.is_dirty = True

    @classmethod
    def reopen(cls, path: Path, extent: Extent, *, recycled: bool = False) -> Recording:
        """Append after `extent`, the complete entries; what follows them is removed. A recycled log must
        be cut before the next entry."""
        continued = cls.__new__(cls)
        continued._open(path, extent.last, extent.size, recycled=recycled)
        return continued

    def _open(self, path: Path, last: int, size: int, *, recycled: bool) -> None:
        self._path, self._recycled = path, recycled
        self._spare, self._former = (path.with_name(path.name + end) for end in (".spare", ".former"))
        """The log before this one, whose blocks the next one overwrites; its name while they change."""
        self._remove_spare()
        self._file = AppendedFile(path, size, direct=recycled)
        self._file.truncate()
        self._last = last
        self.size = size
        """Bytes, without entries that wait."""
        self._waiting: list[_Entry] = []
        self._waiting_bytes = 0
        self.is_dirty = False
        """Entries that neither `sync` nor `start_sync` has dealt with."""
        self.has_failed = False
        """An entry could not be written. No later entry is written then."""
        self._thread = ThreadPoolExecutor(1, "log")
        self._writing: Future[None] | None = None
        """Begun by `start_sync`; None if it was waited for."""

    def write(self, event: Input, payload: bytes | bytearray | None = None) -> None:
        """`payload`: the bytes from which an update was decoded, if available. They must not change any
        more."""
        name = type(event).__name__
        text = _JSON.encode((name, {field: getattr(event, field) for field in _FIELDS[name]}))
        message: _Bytes = b""
        if isinstance(event, Answered):
            message = event.message
        elif isinstance(event, UpdateArrived):
            # Without a payload, a copy, because the event's vectors may change until it is written.
            message = b"".join(payloads.lay_out(event.message)) if payload is None else payload
        self._last += 1
        self.is_dirty = True
        entry = _Entry(self._last, text.encode(), message)
        self._waiting.append(entry)
        self._waiting_bytes += entry.size
        if self._waiting_bytes > _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write all entries to the operating system; of a recycled log to the disk, because only then
        may the next write begin."""
        self.join()
        if self._recycled:
            self.sync()
        else:
            self._append(self._take())

    def sync(self) -> None:
        self.join()
        if self.is_dirty:
            self.is_dirty = False
            self._append(self._take(), sync=True)

    def start_sync(self) -> Future[None]:
        """The future is done when the thread has written all entries to the disk."""
        self.join()
        entries, self.is_dirty = self._take(), False
        self._writing = self._thread.submit(self._append, entries, sync=True)
        return self._writing

    def join(self) -> None:
        """Raises OSError if the thread could not write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def cut(self) -> None:
        """Continue in another file that has only a `Cut`. A crash leaves either file at the log's
        path."""
        self.sync()
        self._file.close()
        self._file, self.size = AppendedFile(self._spare, direct=True), 0
        self._append([_Entry(self._last, _JSON.encode(dataclasses.asdict(Cut(self._last))).encode())])
        self._file.sync()
        with suppress(OSError):  # some file systems have no hard links: the next log then has new blocks
            self._former.hardlink_to(self._path)
        self._spare.replace(self._path)
        with suppress(FileNotFoundError):
            self._former.replace(self._spare)
        files.sync_folder(self._path.parent)

    def close(self) -> None:
        try:
            if not self.has_failed:
                self.flush()
        finally:
            self._thread.shutdown()
            self._file.truncate()
            self._file.close()
            self._remove_spare()

    def _remove_spare(self) -> None:
        if self._recycled:
            self._spare.unlink(missing_ok=True)
            self._former.unlink(missing_ok=True)

    def _take(self) -> list[_Entry]:
        entries, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return entries

    def _append(self, entries: Sequence[_Entry], *, sync: bool = False) -> None:
        try:
            with files.errors_name(self._path):
                if entries:
                    magic = _MAGIC if self.size == 0 else b""
                    pieces = _whole_blocks(entries) if self._recycled else [magic, *_pieces(entries)]
                    self._file.write(pieces)
                    self.size += sum(map(len, pieces))
                if sync:
                    self._file.sync()
        except OSError:
            self.has_failed = True
            raise


def _whole_blocks(entries: Sequence[_Entry]) -> list[_Bytes]:
    """Spaces after the last text fill up the last block."""
    size = len(_WRITE) + sum(entry.size for entry in entries)
    entries[-1].text += b" " * (-size % BLOCK)
    return [_WRITE, *_pieces(entries)]


def _pieces(entries: Sequence[_Entry]) -> list[_Bytes]:
    pieces: list[_Bytes] = []
    for entry in entries:
        text, payload = entry.text, entry.payload
        summed = files.checksum_of(text, payload)
        head = _HEAD.pack(len(text), len(payload), entry.number, summed)
        pieces += (head + PACKED.pack(files.checksum_of(head)), text, payload)
    return pieces


@dataclass(frozen=True, slots=True)
class Torn:
    """The entry at byte `at` is incomplete, because the file ends within it."""

    at: int


def check(path: Path) -> Extent:
    """Verify all checksums. Raises OSError, and RecordingError if the file is no recording, or an entry
    is damaged, missing or misplaced."""
    with files.open_regular(path) as file:
        _check_magic(file, path)
        first, last, size = -1, -1, 0
        for head in _heads(file, path):
            if isinstance(head, Torn):
                break
            left, found = head.text + head.payload, Checksum()
            while left and (piece := file.read(min(left, _PIECE))):
                found.update(piece)
                left -= len(piece)
            if left or found.intdigest() != head.summed:
                if _is_end(file, head.at, head.number):
                    break
                raise _damaged(path, head)
            first, last, size = head.number if first < 0 else first, head.number, file.tell()
    if first < 0:
        raise RecordingError(f"{path} has no complete entry")
    return Extent(first, last, size)


def read(path: Path, skip: int = 0) -> Iterator[Setup | Cut | Input | Torn]:
    """Yield the first entry, then those with a number above `skip`. Raises OSError, and RecordingError
    with the byte position if the file is no recording, or an entry is invalid."""
    with files.open_regular(path) as file:
        _check_magic(file, path)
        for count, head in enumerate(_heads(file, path)):
            if isinstance(head, Torn):
                yield head
                return
            if count > 0 and head.number <= skip:
                continue
            text, payload = file.read(head.text), file.read(head.payload)
            if files.checksum_of(text, payload) != head.summed:
                if _is_end(file, head.at, head.number):
                    yield Torn(head.at)
                    return
                raise _damaged(path, head)
            try:
                entry = _entry(text, payload)
                if isinstance(entry, Setup | Cut) != (count == 0):
                    raise ValueError("expected a setup or a cut as the first entry, and only there")
            except (ValueError, TypeError, RecursionError, payloads.WireError) as error:
                raise RecordingError(f"{path}, the entry at byte {head.at}: {error}") from error
            yield entry


@dataclass(frozen=True, slots=True)
class _Head:
    at: int
    """Byte position of the entry."""
    number: int
    text: int
    """Bytes."""
    payload: int
    """Bytes."""
    summed: int
    """Checksum of text and payload."""


def _check_magic(file: BinaryIO, path: Path) -> None:
    """Raise RecordingError if the file does not begin as a recording does."""
    if not os.fstat(file.fileno()).st_size:
        raise RecordingError(f"{path} is empty")
    if not (_begins_with(file, _MAGIC) or _begins_with(file, _WRITE)):
        raise RecordingError(f"{path} is no recording: its first bytes are not {_MAGIC!r}")


def _begins_with(file: BinaryIO, magic: bytes) -> bool:
    file.seek(0)
    return file.read(len(magic)) == magic


def _is_end(file: BinaryIO, at: int, number: int) -> bool:
    """Whether an invalid entry is the end of a recycled log, because the write of entry `number` was not
    completed, or never begun. It is damaged instead if a later write is there, because the next write
    begins when this one is on the disk."""
    if not _begins_with(file, _WRITE):
        return False
    for begin in range(at // BLOCK * BLOCK, os.fstat(file.fileno()).st_size, BLOCK):
        file.seek(begin)
        found = file.read(len(_WRITE) + _HEAD_BYTES)
        if found.startswith(_WRITE):
            packed = found[len(_WRITE) :]
            if _is_head(packed) and _HEAD.unpack(packed[: _HEAD.size])[2] > number:
                return False
    return True


def _is_head(packed: bytes) -> bool:
    return (
        len(packed) == _HEAD_BYTES
        and files.checksum_of(packed[: _HEAD.size]) == PACKED.unpack(packed[_HEAD.size :])[0]
    )


def _heads(file: BinaryIO, path: Path) -> Iterator[_Head | Torn]:
    """Verified. At each yield the file is positioned at the entry's text, and the caller may read from
    it. Raises RecordingError."""
    end, at, expected = os.fstat(file.fileno()).st_size, 0, None
    while at < end:
        file.seek(at)
        packed = file.read(len(_WRITE) + _HEAD_BYTES)
        if packed.startswith((_MAGIC, _WRITE)):
            at, packed = at + len(_WRITE), packed[len(_WRITE) :]
        packed = packed[:_HEAD_BYTES]
        if len(packed) < _HEAD_BYTES:
            if packed:
                yield Torn(at)
            return
        is_valid = _is_head(packed)
        text, payload, number, summed = _HEAD.unpack(packed[: _HEAD.size])
        if not is_valid or number != (number if expected is None else expected):
            if _is_end(file, at, expected or 0):
                yield Torn(at)
                return
            if not is_valid:
                raise RecordingError(
                    f"{path}, the entry at byte {at} of {end:,}, after {_entry_before(expected)}, is "
                    "damaged: the checksum of its head is wrong"
                )
            raise RecordingError(
                f"{path}, the entry at byte {at}: it is number {number} of the run, expected "
                f"{expected}: entries are missing or in the wrong order"
            )
        if text > _MAX_TEXT:
            raise RecordingError(
                f"{path}, the entry at byte {at}: its text has {text:,} bytes, expected at most "
                f"{_MAX_TEXT:,}"
            )
        head = _Head(at, number, text, payload, summed)
        at += _HEAD_BYTES + text + payload
        if at > end:
            yield Torn(head.at)
            return
        file.seek(head.at + _HEAD_BYTES)
        yield head
        expected = number + 1


def _entry_before(expected: int | None) -> str:
    return "none" if expected is None else f"number {expected - 1} of the run"


def _damaged(path: Path, head: _Head) -> RecordingError:
    return RecordingError(
        f"{path}, the entry at byte {head.at}, number {head.number} of the run, is damaged: its "
        "checksum is wrong"
    )


def _entry(text: bytes, payload: bytes) -> Setup | Cut | Input:
    entry = files.from_json(text)
    if isinstance(entry, dict):
        if entry.keys() == {"entries"}:
            return config.from_dict(Cut, entry)
        return config.from_dict(Setup, entry)
    match entry:
        case [str(name), dict(fields)] if name in _FIELDS:
            return _input(name, fields, payload)
    raise ValueError(f"not an input of an aggregator: {text[:80]!r}")


def _input(name: str, fields: dict[str, Any], payload: bytes) -> Input:
    if {field: type(value) for field, value in fields.items()} != _FIELDS[name]:
        raise ValueError(f"{name} has the wrong fields {fields!r:.80}")
    if name == UpdateArrived.__name__:
        return UpdateArrived(**fields, message=payloads.decode_update(payload))
    if name == Answered.__name__:
        return Answered(**fields, message=payload)
    return INPUTS[name](**fields)
