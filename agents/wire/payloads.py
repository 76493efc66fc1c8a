"""Models and updates as bytes: safetensors payloads with metadata in the header. Nothing is unpickled.

A payload has one float32 vector of shape (d,) called `w` and a map of strings, in the layout of
safetensors: 8 bytes with the header's length (little endian), the header in JSON, the vector's bytes. If
the model has buffers, they follow as `floats` and `integers` (`agents.models.buffers`). This module
reads and writes the layout itself because the library copies the vector; here, decoding returns a view
of the received bytes. A test compares both directions with the library.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.models.buffers import NONE, Buffers
from agents.models.vectors import Vector
from agents.texts import describe_value
from agents.timing.nanoseconds import Nanoseconds

PROTOCOL = 2
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 64 * 1024
_NOTHING = np.zeros(0, np.float32)
_BUFFERS = ("floats", "integers")
"""Names of the tensors with a model's buffers, at the end of the payload."""
_JSON = json.JSONEncoder(separators=(",", ":"))
_TENSORS = ("vector", "encoded", "buffers")
"""Fields of a message that are not in its header."""
_KINDS = {"F16": "<f2", "F32": "<f4", "I8": "|i1", "U32": "<u4"}
"""Types of the arrays of an encoded update: name in safetensors, name in NumPy."""
_NAMES = {np.dtype(kind): name for name, kind in _KINDS.items()}
Views = Sequence[memoryview]


class WireError(Exception):
    """The received bytes are not a valid message; the text describes the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMessage:
    """A dispatch: the global model, sent to one client."""

    run: str
    version: int
    """Number of the model's version."""
    dispatch: int
    """Number of the dispatch; the client's update names the dispatch that it answers."""
    schema: str
    """Hash of the names and shapes of parameters and buffers; an update with another one is rejected."""
    vector: Vector
    """Parameters, shape (d,), float32."""
    lr: float | None = None
    """Step size that the rule assigns to this training; None: that of the client's settings."""
    acknowledged: int = 0
    """Sequence number of the client's last update that was passed to the rule; 0 for none."""
    waiting: tuple[int, ...] = ()
    """With secure aggregation, for a client that remembers what it sent: dispatches whose updates wait
    to be summed."""
    lost: tuple[int, ...] = ()
    """With secure aggregation, for a client that remembers what it sent: dispatches whose updates were
    lost with their sum."""
    buffers: Buffers = NONE
    """Buffers of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """An update as encoded by a step of `agents.pipeline`, in place of one float32 vector. Of a `model`,
    the difference to the model that it was trained from is encoded."""

    fields: Mapping[str, str]
    """Additional header fields; the name of one of them identifies the step."""
    arrays: Mapping[str, NDArray[Any]]
    """One-dimensional arrays by name, in order. In a received update they are views of the payload."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


FAREWELL = "farewell"
"""Kind of the message with which a client leaves and returns the vector that it remembers. `sequence` is
that of the update after which the vector was saved. If no update of the client was applied, `sequence`
is 0 and `vector` is empty."""


@dataclass(slots=True, kw_only=True)  # frozen, each would take the aggregator 1 µs more
class UpdateMessage:
    """An update: the result of local training. Times are those of the client's monotonic clock."""

    run: str
    client: str
    sequence: int
    """1, 2, …, continued over restarts of the client; a training that was never sent leaves a gap."""
    dispatch: int
    """Dispatch that the update answers."""
    base_version: int
    """Version of the model that it was trained from."""
    schema: str
    """Schema of the model, copied from the dispatch."""
    kind: str
    """One of `agents.rules.interface.Kind`, or FAREWELL."""
    samples: int
    """Number of the client's training samples."""
    steps: int
    """Local steps that were done."""
    effective_steps: float
    """FedNova: number of steps that the update counts for in the server's τ_eff; otherwise 1."""
    loss: float
    """Mean loss over the steps; NaN if there is none, or if the server must not learn it."""
    downloaded: Nanoseconds
    """When the model had arrived completely."""
    train_start: Nanoseconds
    train_end: Nanoseconds
    sent: Nanoseconds
    vector: Vector
    """The update, shape (d,), float32; empty if it is `encoded`."""
    encoded: Encoded | None = None
    """The update as encoded by a step; None if it is sent as `vector`."""
    buffers: Buffers = NONE
    """Buffers of the model after the training."""


def _readers(cls: type[Any]) -> dict[str, Callable[[str], Any]]:
    """Return the parser of each field of `cls` that is in the header."""
    types: dict[str, Callable[[str], Any]] = {
        "int": int,
        "Nanoseconds": int,
        "float": float,
        "str": str,
        "float | None": _optional_float,
        "tuple[int, ...]": _numbers,
    }
    return {f.name: types[str(f.type)] for f in dataclasses.fields(cls) if f.name not in _TENSORS}


def _optional_float(text: str) -> float | None:
    return None if text == "None" else float(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


_READERS = {cls: _readers(cls) for cls in (ModelMessage, UpdateMessage)}


def encode(message: ModelMessage | UpdateMessage) -> bytes:
    """Return the payload of `message`."""
    head, views = lay_out(message)
    return b"".join((head, *views))


def lay_out(message: ModelMessage | UpdateMessage) -> tuple[bytes, Views]:
    """Return the payload of `message` as its header and views of its arrays."""
    metadata = _metadata(message)
    if isinstance(message, UpdateMessage) and message.encoded is not None:
        return _encoded_parts(message.encoded, message.buffers, metadata)
    return _lay_out(np.ascontiguousarray(message.vector, dtype="<f4"), message.buffers, metadata)


def largest_model(parameters: int, buffers: int) -> int:
    """Return the maximum payload size in bytes of a model with `parameters` parameters and `buffers`
    numbers in its buffers."""
    return _LENGTH.size + _MAX_HEADER + 4 * parameters + 8 * buffers


def plain_size(message: UpdateMessage, parameters: int) -> int:
    """Return the payload size in bytes that `message` would have with a float32 vector of `parameters`
    parameters."""
    size, buffers = 4 * parameters, message.buffers
    return len(_header(parameters, buffers, _metadata(message))) + size + buffers.nbytes


def _metadata(message: ModelMessage | UpdateMessage) -> dict[str, str]:
    metadata = {"protocol": str(PROTOCOL)}
    for name in _READERS[type(message)]:
        value = getattr(message, name)
        metadata[name] = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return metadata


def decode_model(payload: bytes | bytearray) -> ModelMessage:
    """Decode a model. Raises WireError."""
    vector, metadata, buffers = unpack(payload)
    return ModelMessage(**_fields(ModelMessage, metadata), vector=vector, buffers=buffers)


def decode_update(payload: bytes | bytearray) -> UpdateMessage:
    """Decode an update. Raises WireError."""
    header, metadata, body = _split(payload)
    body, buffers = _without_buffers(header, body)
    fields = _fields(UpdateMessage, metadata)
    if len(metadata) > len(fields) + 1:  # more than the fields and `protocol`
        known = {"protocol", *fields}
        more = {name: text for name, text in metadata.items() if name not in known}
        encoded = Encoded(more, _arrays(header, body))
        return UpdateMessage(**fields, vector=_NOTHING, encoded=encoded, buffers=buffers)
    vector = _only_vector(header, body)
    return UpdateMessage(**fields, vector=vector, buffers=buffers)


def pack(
    vector: Vector, metadata: dict[str, str], buffers: Buffers = NONE
) -> tuple[bytes | memoryview, ...]:
    """Return the pieces of a safetensors file with the float32 tensor `w` and, if there are any,
    `buffers`. `vector`: contiguous, shape (d,)."""
    head, views = _lay_out(vector, buffers, metadata)
    return head, *views


def _lay_out(vector: Vector, buffers: Buffers, metadata: dict[str, str]) -> tuple[bytes, Views]:
    header = _header(vector.size, buffers, metadata)
    return header, [vector.data.cast("B"), *_views(buffers)]


def _views(buffers: Buffers) -> list[memoryview]:
    return [buffers.floats.data.cast("B"), buffers.integers.data.cast("B")] if buffers else []


def _header(parameters: int, buffers: Buffers, metadata: dict[str, str]) -> bytes:
    size = 4 * parameters
    more = "".join(
        f",{_JSON.encode(name)}:{_JSON.encode(t)}" for name, t in _ends(buffers, size).items()
    )
    tensor = f'"dtype":"F32","shape":[{parameters}],"data_offsets":[0,{size}]'
    return _framed(f'{{"__metadata__":{_JSON.encode(metadata)},"w":{{{tensor}}}{more}}}'.encode())


def _framed(text: bytes) -> bytes:
    """Return the header `text`, padded, with its length in front."""
    text += b" " * (-len(text) % 8)  # aligned data, as the format asks
    return _LENGTH.pack(len(text)) + text


def _tensor(kind: str, count: int, begin: int, end: int) -> dict[str, Any]:
    """Return the header's entry for one tensor."""
    return {"dtype": kind, "shape": [count], "data_offsets": [begin, end]}


def _ends(buffers: Buffers, at: int) -> dict[str, Any]:
    """Return the header's entries for `buffers` that begin at byte `at`."""
    if not buffers:
        return {}
    middle = at + buffers.floats.nbytes
    return {
        "floats": _tensor("F32", buffers.floats.size, at, middle),
        "integers": _tensor("I64", buffers.integers.size, middle, middle + buffers.integers.nbytes),
    }


def _encoded_parts(encoded: Encoded, buffers: Buffers, metadata: dict[str, str]) -> tuple[bytes, Views]:
    header = {"__metadata__": {**metadata, **encoded.fields}, **_tensors(encoded.arrays)}
    header |= _ends(buffers, encoded.nbytes)
    arrays = [np.ascontiguousarray(a).data.cast("B") for a in encoded.arrays.values()]
    return _framed(_JSON.encode(header).encode()), [*arrays, *_views(buffers)]


def _tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the header's entries for `arrays`, one after the other."""
    found: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        end = at + array.nbytes
        found[name] = _tensor(_NAMES[array.dtype], array.size, at, end)
        at = end
    return found


def _arrays(header: Mapping[str, Any], body: memoryview) -> dict[str, NDArray[Any]]:
    """Return the arrays that `header` describes, as views of `body`. Raises WireError."""
    arrays: dict[str, NDArray[Any]] = {}
    try:
        at = 0
        for name, tensor in header.items():
            end = tensor["data_offsets"][1]
            arrays[name] = np.frombuffer(body[at:end], _KINDS[tensor["dtype"]])
            at = end
        fits = at == len(body) and header == _tensors(arrays)
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"invalid header of an encoded update: {error!r:.80}") from error
    if not fits:
        raise WireError("invalid header of an encoded update: it does not match the payload's size")
    return arrays


def unpack(payload: bytes | bytearray) -> tuple[Vector, dict[str, str], Buffers]:
    """Return the vector (a read-only view of `payload`), the metadata and the buffers. Raises
    WireError."""
    header, metadata, body = _split(payload)
    body, buffers = _without_buffers(header, body)
    return _only_vector(header, body), metadata, buffers


def _split(payload: bytes | bytearray) -> tuple[dict[str, Any], dict[str, str], memoryview]:
    """Split a payload into the header's entries for tensors, the metadata, and the bytes that follow.
    Raises WireError."""
    if len(payload) < _LENGTH.size:
        raise WireError(f"payload has {len(payload)} bytes: shorter than a header")
    (length,) = _LENGTH.unpack_from(payload)
    start = _LENGTH.size + length
    if length > _MAX_HEADER or start > len(payload):
        raise WireError(f"header of {length} bytes does not fit a payload of {len(payload)} bytes")
    try:
        header = json.loads(str(payload[_LENGTH.size : start], "utf-8"))
        metadata = header.pop("__metadata__")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"unreadable header: {error!r:.80}") from error
    if not isinstance(metadata, dict) or not set(map(type, metadata.values())) <= {str}:
        raise WireError("metadata: expected a map of strings")
    return header, metadata, memoryview(payload).toreadonly()[start:]


def _without_buffers(header: dict[str, Any], body: memoryview) -> tuple[memoryview, Buffers]:
    """Split `body` into the part before the buffers, and the buffers; remove their entries from
    `header`. Raises WireError."""
    if "floats" not in header and "integers" not in header:
        return body, NONE
    try:
        floats, integers = (header[name]["shape"][0] for name in _BUFFERS)
    except (LookupError, TypeError) as error:
        raise WireError(f"buffers without a shape: {error!r:.80}") from error
    size = len(body)
    if not all(type(count) is int and 0 <= count <= size for count in (floats, integers)):
        raise WireError(
            f"buffers of {floats!r:.20} and {integers!r:.20} numbers do not fit {size} bytes"
        )
    middle = size - 8 * integers
    begin = middle - 4 * floats
    if begin < 0:
        raise WireError(f"buffers of {floats} and {integers} numbers do not fit {size} bytes")
    # Copies, because they are kept longer than the payload.
    found = Buffers(
        np.frombuffer(body[begin:middle], "<f4").copy(), np.frombuffer(body[middle:], "<i8").copy()
    )
    if {name: header.pop(name) for name in _BUFFERS} != _ends(found, begin):
        raise WireError("invalid header of buffers: it does not match their position")
    return body[:begin], found


def _only_vector(header: dict[str, Any], body: memoryview) -> Vector:
    size = len(body)
    if size % 4 or header != {"w": _tensor("F32", size // 4, 0, size)}:
        raise WireError(f"expected one float32 vector `w` of {size} bytes, found {header!r:.100}")
    vector: Vector = np.frombuffer(body, dtype="<f4")
    return vector


def _fields(cls: type[Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    protocol = metadata.get("protocol")
    if protocol != str(PROTOCOL):
        raise WireError(f"protocol {describe_value(protocol)}, expected {PROTOCOL}")
    fields: dict[str, Any] = {}
    name = ""
    try:
        for name, read in _READERS[cls].items():
            fields[name] = read(metadata[name])
    except (KeyError, ValueError) as error:
        raise WireError(f"field {name} is missing or invalid: {error!r:.80}") from error
    return fields
