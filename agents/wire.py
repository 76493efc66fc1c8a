"""Messages on the wire: safetensors payloads, metadata in the header. Nothing is ever unpickled.

A payload is one float32 vector of shape (d,) called `w` and a map of strings, laid out as safetensors
has it: 8 bytes with the header's length (little endian), the header in JSON, the vector's bytes. We read
and write that layout ourselves because the library copies the vector on the way in: decoding here gives
a view of the received bytes. A test holds both against the library.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents import compression
from agents.compression import Compressed
from agents.nanoseconds import Nanoseconds
from agents.texts import shown
from agents.vectors import Vector

PROTOCOL = 2
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 64 * 1024
_NOTHING = np.zeros(0, np.float32)
_JSON = json.JSONEncoder(separators=(",", ":"))


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
    """Empty where it is `compressed`."""
    compressed: Compressed | None = None
    """The vector or, of a `model`, its difference to the one that it was trained from."""


def _readers(cls: type[Any]) -> dict[str, Callable[[str], Any]]:
    """What makes each field of `cls` that the header carries from its text."""
    types: dict[str, Callable[[str], Any]] = {
        "int": int,
        "Nanoseconds": int,
        "float": float,
        "str": str,
        "float | None": _optional_float,
    }
    return {
        f.name: types[str(f.type)]
        for f in dataclasses.fields(cls)
        if f.name not in ("vector", "compressed")
    }


def _optional_float(text: str) -> float | None:
    return None if text == "None" else float(text)


_READERS = {cls: _readers(cls) for cls in (ModelMessage, UpdateMessage)}


def encode(message: ModelMessage | UpdateMessage) -> bytes:
    """The payload of `message`."""
    return b"".join(parts(message))


def parts(message: ModelMessage | UpdateMessage) -> tuple[bytes, memoryview]:
    """The payload of `message` in two: all that comes before the vector, and a view of the vector."""
    metadata = _metadata(message)
    if isinstance(message, UpdateMessage) and message.compressed is not None:
        return _compressed_parts(message.compressed, metadata)
    vector = np.ascontiguousarray(message.vector, dtype="<f4")
    return _header(vector.size, metadata), vector.data.cast("B")


def plain_size(message: UpdateMessage, parameters: int) -> int:
    """Bytes of the payload of `message`, had it a float32 vector of so many parameters."""
    return len(_header(parameters, _metadata(message))) + 4 * parameters


def _metadata(message: ModelMessage | UpdateMessage) -> dict[str, str]:
    metadata = {"protocol": str(PROTOCOL)}
    for name in _READERS[type(message)]:
        metadata[name] = str(getattr(message, name))
    return metadata


def decode_model(payload: bytes) -> ModelMessage:
    """Raises WireError."""
    vector, metadata = unpack(payload)
    return ModelMessage(**_fields(ModelMessage, metadata), vector=vector)


def decode_update(payload: bytes) -> UpdateMessage:
    """Raises WireError."""
    header, metadata, body = _split(payload)
    if "compression" in metadata:
        compressed = _compressed(header, metadata, body)
        fields = _fields(UpdateMessage, metadata)
        return UpdateMessage(**fields, vector=_NOTHING, compressed=compressed)
    vector = _only_vector(payload, header, body)
    return UpdateMessage(**_fields(UpdateMessage, metadata), vector=vector)


def pack(vector: Vector, metadata: dict[str, str]) -> bytes:
    """A safetensors payload with the one float32 tensor `w`; `vector` is contiguous, shape (d,)."""
    return b"".join((_header(vector.size, metadata), vector.data))


def _header(parameters: int, metadata: dict[str, str]) -> bytes:
    tensor = f'"dtype":"F32","shape":[{parameters}],"data_offsets":[0,{4 * parameters}]'
    return _framed(f'{{"__metadata__":{_JSON.encode(metadata)},"w":{{{tensor}}}}}'.encode())


def _framed(text: bytes) -> bytes:
    """The header `text` with its length before it."""
    text += b" " * (-len(text) % 8)  # aligned data, as the format asks
    return _LENGTH.pack(len(text)) + text


def _compressed_parts(compressed: Compressed, metadata: dict[str, str]) -> tuple[bytes, memoryview]:
    metadata["compression"] = compressed.method
    metadata["parameters"] = str(compressed.size)
    metadata["chunk"] = str(compressed.chunk)
    header = {"__metadata__": metadata, **_tensors(compressed)}
    body = b"".join(np.ascontiguousarray(array).data for array in compressed.arrays.values())
    return _framed(_JSON.encode(header).encode()), memoryview(body)


def _tensors(compressed: Compressed) -> dict[str, Any]:
    """What the header says of the arrays, which follow one another."""
    found: dict[str, Any] = {}
    at = 0
    kinds = compression.layout(compressed.method, compressed.size, compressed.chunk, compressed.nbytes)
    for name, (kind, count) in kinds.items():
        end = at + compressed.arrays[name].nbytes
        found[name] = {"dtype": kind, "shape": [count], "data_offsets": [at, end]}
        at = end
    return found


def _compressed(header: dict[str, Any], metadata: dict[str, str], body: memoryview) -> Compressed:
    """Views of `body`; nothing is expanded."""
    try:
        size, chunk = (int(metadata[name]) for name in ("parameters", "chunk"))
        compressed = compression.read(metadata["compression"], size, chunk, body)
    except (KeyError, ValueError) as error:
        raise WireError(f"a compressed update: {error!s:.80}") from error
    if {name: value for name, value in header.items() if name != "__metadata__"} != _tensors(compressed):
        raise WireError("a compressed update whose header is not that of its arrays")
    return compressed


def unpack(payload: bytes) -> tuple[Vector, dict[str, str]]:
    """The vector (a read-only view of `payload`) and the metadata. Raises WireError."""
    header, metadata, body = _split(payload)
    return _only_vector(payload, header, body), metadata


def _split(payload: bytes) -> tuple[dict[str, Any], dict[str, str], memoryview]:
    """Header, metadata and what follows. Raises WireError."""
    if len(payload) < _LENGTH.size:
        raise WireError("shorter than a header")
    (length,) = _LENGTH.unpack_from(payload)
    start = _LENGTH.size + length
    if length > _MAX_HEADER or start > len(payload):
        raise WireError(f"header of {length} bytes in a payload of {len(payload)}")
    try:
        header = json.loads(str(payload[_LENGTH.size : start], "utf-8"))
        metadata = header["__metadata__"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise WireError(f"unreadable header: {error!r:.80}") from error
    if not isinstance(metadata, dict) or not set(map(type, metadata.values())) <= {str}:
        raise WireError("metadata is no map of strings")
    return header, metadata, memoryview(payload)[start:]


def _only_vector(payload: bytes, header: dict[str, Any], body: memoryview) -> Vector:
    size = len(body)
    start = len(payload) - size
    expected = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    if size % 4 or header.get("w") != expected or len(header) != 2:
        found = payload[_LENGTH.size : start][-80:]
        raise WireError(f"expected one float32 vector `w` of {size} bytes, found {found!r:.100}")
    vector: Vector = np.frombuffer(payload, dtype="<f4", offset=start)
    return vector


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
