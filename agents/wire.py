"""Messages on the wire: safetensors payloads, metadata in the header. Nothing is ever unpickled.

A payload is one float32 vector of shape (d,) called `w` and a map of strings, laid out as safetensors
has it: 8 bytes with the header's length (little endian), the header in JSON, the vector's bytes. Of a
model with buffers these follow, as `floats` and `integers` (`agents.buffers`). We read and write that
layout ourselves because the library copies the vector on the way in: decoding here gives a view of the
received bytes. A test holds both against the library.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.buffers import NONE, Buffers
from agents.nanoseconds import Nanoseconds
from agents.texts import shown
from agents.vectors import Vector

PROTOCOL = 2
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 64 * 1024
_KINDS = {"w": ("F32", 4), "floats": ("F32", 4), "integers": ("I64", 8)}
"""Type and bytes of an element of each tensor that a payload may have."""
_BUFFERS = ("floats", "integers")
_JSON = json.JSONEncoder(separators=(",", ":"))
_TENSORS = ("vector", "buffers")
"""Fields of a message that its header does not carry."""


class WireError(Exception):
    """The peer sent bytes that are not a message of this protocol; the text describes the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMessage:
    """A dispatch: the global model, for one client."""

    run: str
    version: int
    dispatch: int
    """Number of the aggregator's dispatch; the update names the dispatch that it answers."""
    schema: str
    vector: Vector
    lr: float | None = None
    """Step size that the rule assigns to this training."""
    acknowledged: int = 0
    """Sequence number of the client's last update that the rule was given."""
    buffers: Buffers = NONE


FAREWELL = "farewell"
"""The kind of message by which a client says goodbye and hands in what it remembers: `sequence` is that
of the update after which it did, `vector` its memory; 0 and none, where no update of it was applied."""


@dataclass(slots=True, kw_only=True)  # frozen, each would take the aggregator 1 µs more
class UpdateMessage:
    """What a client made of a dispatch. Times are those of its monotonic clock."""

    run: str
    client: str
    sequence: int
    """1, 2, … since the client joined; with gaps, where a finished training was never sent."""
    dispatch: int
    base_version: int
    schema: str
    kind: str
    """One of `agents.rules.interface.Kind`, or FAREWELL."""
    samples: int
    steps: int
    effective_steps: float
    """FedNova: what the server's τ_eff counts this update for; else 1."""
    loss: float
    downloaded: Nanoseconds
    train_start: Nanoseconds
    train_end: Nanoseconds
    sent: Nanoseconds
    vector: Vector
    buffers: Buffers = NONE
    """As they are at the end of the training."""


def _readers(cls: type[Any]) -> dict[str, Callable[[str], Any]]:
    """What makes each field of `cls` that the header carries from its text."""
    types: dict[str, Callable[[str], Any]] = {
        "int": int,
        "Nanoseconds": int,
        "float": float,
        "str": str,
        "float | None": _optional_float,
    }
    return {f.name: types[str(f.type)] for f in dataclasses.fields(cls) if f.name not in _TENSORS}


def _optional_float(text: str) -> float | None:
    return None if text == "None" else float(text)


_READERS = {cls: _readers(cls) for cls in (ModelMessage, UpdateMessage)}


def encode(message: ModelMessage | UpdateMessage) -> bytes:
    """The payload of `message`."""
    return b"".join(parts(message))


def parts(message: ModelMessage | UpdateMessage) -> tuple[bytes | memoryview, ...]:
    """The payload of `message` in parts: the header, and views of what it describes."""
    metadata = {"protocol": str(PROTOCOL)}
    for name in _READERS[type(message)]:
        metadata[name] = str(getattr(message, name))
    vector = np.ascontiguousarray(message.vector, dtype="<f4")
    return _laid_out(vector, message.buffers, metadata)


def decode_model(payload: bytes) -> ModelMessage:
    """Raises WireError."""
    vector, metadata, buffers = unpack(payload)
    return ModelMessage(**_fields(ModelMessage, metadata), vector=vector, buffers=buffers)


def decode_update(payload: bytes) -> UpdateMessage:
    """Raises WireError."""
    vector, metadata, buffers = unpack(payload)
    return UpdateMessage(**_fields(UpdateMessage, metadata), vector=vector, buffers=buffers)


def pack(vector: Vector, metadata: dict[str, str], buffers: Buffers = NONE) -> bytes:
    """A safetensors payload with the float32 tensor `w` and, where there are any, `buffers`; `vector` is
    contiguous, shape (d,)."""
    return b"".join(_laid_out(vector, buffers, metadata))


def _laid_out(
    vector: Vector, buffers: Buffers, metadata: Mapping[str, str]
) -> tuple[bytes | memoryview, ...]:
    tensors: dict[str, NDArray[Any]] = {"w": vector}
    if buffers:
        tensors |= {"floats": buffers.floats, "integers": buffers.integers}
    described = _described({name: tensor.size for name, tensor in tensors.items()})
    text = _JSON.encode({"__metadata__": metadata, **described}).encode()
    text += b" " * (-len(text) % 8)  # aligned data, as the format asks
    return _LENGTH.pack(len(text)) + text, *(each.data.cast("B") for each in tensors.values())


def _described(sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a header says of tensors of these sizes, in their order."""
    described, end = {}, 0
    for name, size in sizes.items():
        kind, width = _KINDS[name]
        begin, end = end, end + width * size
        described[name] = {"dtype": kind, "shape": [size], "data_offsets": [begin, end]}
    return described


def unpack(payload: bytes) -> tuple[Vector, dict[str, str], Buffers]:
    """The vector (a read-only view of `payload`), the metadata and the buffers. Raises WireError."""
    if len(payload) < _LENGTH.size:
        raise WireError("shorter than a header")
    (length,) = _LENGTH.unpack_from(payload)
    start = _LENGTH.size + length
    if length > _MAX_HEADER or start > len(payload):
        raise WireError(f"header of {length} bytes in a payload of {len(payload)}")
    try:
        header = json.loads(str(payload[_LENGTH.size : start], "utf-8"))
        metadata = header.pop("__metadata__")
        floats, integers = (header[name]["shape"][0] if name in header else 0 for name in _BUFFERS)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"unreadable header: {error!r:.80}") from error
    size = len(payload) - start
    if not all(type(count) is int and 0 <= count <= size for count in (floats, integers)):
        raise WireError(f"buffers of {floats!r:.20} and {integers!r:.20} numbers in {size} bytes")
    count, rest = divmod(size - 4 * floats - 8 * integers, 4)
    sizes = {"w": count} | ({"floats": floats, "integers": integers} if len(header) > 1 else {})
    if rest or count < 0 or header != _described(sizes):
        found = payload[_LENGTH.size : start][-80:]
        raise WireError(f"expected one float32 vector `w` of {size} bytes, found {found!r:.100}")
    if not isinstance(metadata, dict) or not set(map(type, metadata.values())) <= {str}:
        raise WireError("metadata is no map of strings")
    vector: Vector = np.frombuffer(payload, "<f4", count, start)
    if len(sizes) == 1:
        return vector, metadata, NONE
    begin = start + vector.nbytes
    # Copies: they are kept for longer than the payload.
    found_floats = np.frombuffer(payload, "<f4", floats, begin).copy()
    found_integers = np.frombuffer(payload, "<i8", integers, begin + 4 * floats).copy()
    return vector, metadata, Buffers(found_floats, found_integers)


def _fields(cls: type[Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    protocol = metadata.get("protocol")
    if protocol != str(PROTOCOL):
        raise WireError(f"protocol {shown(protocol)}, expected {PROTOCOL}")
    fields: dict[str, Any] = {}
    name = ""
    try:
        for name, read in _READERS[cls].items():
            fields[name] = read(metadata[name])
    except (KeyError, ValueError) as error:
        raise WireError(f"field {name}: {error!r:.80}") from error
    return fields
