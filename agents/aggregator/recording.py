"""`inputs.bin`: all that an aggregator's core was told, in order, updates included, to tell it again.

The core has no clock, no socket and no random source but its seed, so what went in says exactly what
came out. An entry is two lengths (of its text and of its payload: little endian, 4 and 8 bytes), a JSON
text, and the payload. The text is a `Beginning`, with which a core is made (one per part of a run that
was resumed), or `[method, argument, ...]`: a call of it. An update's message is the payload, as it was
on the wire. A crash can leave the last entry torn.

It is handed to the operating system before the journal is, and not synced: nothing is carried on from
it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agents import config, wire
from agents.aggregator.actions import Actions
from agents.aggregator.beginning import Beginning
from agents.aggregator.core import AggregatorCore, Past

_LENGTHS = struct.Struct("<IQ")
_MOST_TEXT = 64 * 1024 * 1024
_JSON = json.JSONEncoder(separators=(",", ":"))
_CALLS: dict[str, tuple[type, ...]] = {
    "start": (float, float, float, int, int),
    "status": (str, str, float),
    "update": (str, int, float, float),
    "reject": (str, str, float),
    "evaluated": (int, float, float, float),
    "due": (float,),
    "end_of_instant": (float,),
    "end": (str, float),
}
"""Methods of the core, and the types of what is recorded of their arguments."""


class RecordingError(Exception):
    """It is no recording of ours, or a part of it was changed; the text says where."""


class Recording:
    """Appends entries to the file at `path`."""

    def __init__(self, path: Path, beginning: Beginning) -> None:
        _cut_torn_entry(path)
        self._file = path.open("ab")
        self._write(_JSON.encode(dataclasses.asdict(beginning)))

    def call(self, method: str, *arguments: str | float) -> None:
        self._write(_JSON.encode((method, *arguments)))

    def update(self, message: wire.UpdateMessage, *arguments: str | float) -> None:
        """A call of the method `update`."""
        self._write(_JSON.encode(("update", *arguments)), *wire.parts(message))

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


class RecordedCore:
    """A core of which a recording is kept: every input is written down before it is handed on."""

    def __init__(self, core: AggregatorCore, recording: Recording) -> None:
        self._core = core
        self._recording = recording

    @property
    def ready(self) -> Sequence[str]:
        return self._core.ready

    @property
    def next_timer(self) -> float | None:
        return self._core.next_timer

    @property
    def rule_waits(self) -> bool:
        return self._core.rule_waits

    def start(self, wall_clock: float, epoch: float, past: Past | None = None) -> Actions:
        past = past or Past()
        self._recording.call("start", wall_clock, epoch, past.at, past.updates, past.version)
        return self._core.start(wall_clock, epoch, past)

    def status(self, client: str, state: str, at: float) -> Actions:
        self._recording.call("status", client, state, at)
        return self._core.status(client, state, at)

    def update(
        self,
        sender: str,
        message: wire.UpdateMessage,
        size: int,
        at: float,
        arrived: float | None = None,
    ) -> Actions:
        arrived = at if arrived is None else arrived
        self._recording.update(message, sender, size, at, arrived)
        return self._core.update(sender, message, size, at, arrived)

    def reject(self, sender: str, reason: str, at: float) -> Actions:
        self._recording.call("reject", sender, reason, at)
        return self._core.reject(sender, reason, at)

    def evaluated(self, version: int, loss: float, accuracy: float, at: float) -> Actions:
        self._recording.call("evaluated", version, loss, accuracy, at)
        return self._core.evaluated(version, loss, accuracy, at)

    def due(self, at: float) -> Actions:
        if self.next_timer is None or self.next_timer > at:
            return []
        self._recording.call("due", at)
        return self._core.due(at)

    def end_of_instant(self, at: float) -> Actions:
        self._recording.call("end_of_instant", at)
        return self._core.end_of_instant(at)

    def end(self, reason: str, at: float) -> Actions:
        self._recording.call("end", reason, at)
        return self._core.end(reason, at)


@dataclass(frozen=True, slots=True)
class Call:
    """An input of the core."""

    method: str
    arguments: tuple[Any, ...]
    message: wire.UpdateMessage | None = None
    """Of an update."""

    def of(self, core: AggregatorCore) -> Actions:
        """Give it to `core`."""
        match self:
            case Call("start", (wall_clock, epoch, *past)):
                return core.start(wall_clock, epoch, Past(*past))
            case Call("update", (sender, size, at, arrived), wire.UpdateMessage() as message):
                return core.update(sender, message, size, at, arrived)
        done: Actions = getattr(core, self.method)(*self.arguments)
        return done


@dataclass(frozen=True, slots=True)
class Torn:
    """Where the file ends in the middle of an entry, at byte `at`."""

    at: int


def read(path: Path) -> Iterator[Beginning | Call | Torn]:
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
        if following > end or text > _MOST_TEXT:
            yield at, None, 0
            return
        yield at, file.read(text), size
        at = following


def _entry(text: bytes, payload: bytes) -> Beginning | Call:
    told = json.loads(text)
    if isinstance(told, dict):
        return config.from_dict(Beginning, told)
    if not isinstance(told, list) or not told or told[0] not in _CALLS:
        raise ValueError(f"no input of an aggregator: {text[:80]!r}")
    method, *arguments = told
    if [type(argument) for argument in arguments] != list(_CALLS[method]):
        raise ValueError(f"{method} does not take {arguments!r:.80}")
    message = wire.decode_update(payload) if method == "update" else None
    return Call(method, tuple(arguments), message)


def _cut_torn_entry(path: Path) -> None:
    """Take away what a crash left at the end, so that the next entry can be found."""
    if path.exists():
        with path.open("r+b") as file:
            for at, text, _ in _entries(file):
                if text is None:
                    file.truncate(at)
