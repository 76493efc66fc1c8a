"""Models and updates as bytes: safetensors payloads with metadata in the header. Nothing is unpickled.

A payload has a map of strings and one float32 vector of shape (d,) called `w`, or the arrays of an
update that a step of `agents.pipeline` has encoded. The layout is that of safetensors: 8 bytes with the
header's length (little endian), the header in JSON, the bytes of the arrays. The rule's own vectors
follow as `vector/NAME`, then the model's buffers as `floats` and `integers` (`agents.models.vectors`).
This module reads and writes the layout itself, because the library would copy the vector: decoding
returns a view of the received bytes. A test compares both with the library.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

from agents.models.vectors import NONE, Buffers, Vector
from agents.texts import describe_value
from agents.timing.nanoseconds import Nanoseconds

PROTOCOL = 2
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 64 * 1024
_NOTHING = np.zeros(0, np.float32)
_BUFFERS = ("floats", "integers")
"""Tensors with a model's buffers, at the end of the payload."""
_JSON = json.JSONEncoder(separators=(",", ":"))
_TENSORS = ("vector", "encoded", "buffers", "vectors")
"""Fields that are not in the header."""
_OWN = "vector/"
"""Begins the names of the rule's own vectors. Arrays and header fields of an encoded one are called
`vector/NAME/KEY`."""
_KINDS = {"F16": "<f2", "F32": "<f4", "I8": "|i1", "U32": "<u4"}
"""Types of an encoded update's arrays: NumPy's name, by that in safetensors."""
_NAMES = {np.dtype(kind): name for name, kind in (*_KINDS.items(), ("I64", "<i8"))}
Pieces = tuple[bytes, Unpack[tuple[memoryview, ...]]]
"""Header, and views of the arrays."""


class WireError(Exception):
    """The text describes why the bytes are not a valid message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMessage:
    """The global model, sent to one client."""

    run: str
    version: int
    dispatch: int
    """Repeated by the client's update."""
    schema: str
    """Hash of the names and shapes of parameters and buffers; an update with another one is rejected."""
    vector: Vector
    """Shape (d,), float32."""
    lr: float | None = None
    """Step size that the rule assigns; None for that in the client's settings."""
    acknowledged: int = 0
    """Sequence number of the client's last update that was passed to the rule; 0 if there is none."""
    waiting: tuple[int, ...] = ()
    """Dispatches whose updates wait to be summed. Empty unless the server learns only sums and the
    client remembers what it sent."""
    lost: tuple[int, ...] = ()
    """Dispatches whose updates were discarded because their sum was lost. Empty unless the server
    learns only sums and the client remembers what it sent."""
    buffers: Buffers = NONE
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    """The rule's own, each of shape (n,), float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Encoded by a step of `agents.pipeline`, in place of one float32 vector; for an update of kind
    `model`, the difference to the model that training started from."""

    fields: Mapping[str, str]
    """Additional header fields. The name of one identifies the step."""
    arrays: Mapping[str, NDArray[Any]]
    """One-dimensional, in order. In a received update they are views of the payload."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


FAREWELL = "farewell"
"""Message with which a client leaves and returns the vector that it remembers. `sequence`: update after
which that was saved. If no update of the client was applied, `sequence` is 0 and `vector` is empty."""


@dataclass(slots=True, kw_only=True)  # a frozen object takes 1 µs longer to make
class UpdateMessage:
    """Times are in nanoseconds on the client's monotonic clock."""

    run: str
    client: str
    sequence: int
    """Number 1, 2, … of the client's update, also over restarts. That of a training whose update was
    never sent is missing."""
    dispatch: int
    base_version: int
    """Version that the update was trained from."""
    schema: str
    """Copied from the dispatch."""
    kind: str
    """One of `agents.rules.interface.Kind`, or FAREWELL."""
    samples: int
    """Training samples."""
    steps: int
    effective_steps: float
    """Local steps from which the server computes τ_eff (FedNova); 1 without FedNova."""
    loss: float
    """Mean over the steps; NaN if there is none, or if the server must not learn it."""
    downloaded: Nanoseconds
    """The whole model had arrived."""
    train_start: Nanoseconds
    train_end: Nanoseconds
    sent: Nanoseconds
    vector: Vector
    """Shape (d,), float32; empty if `encoded` is set."""
    encoded: Encoded | None = None
    """The update as encoded by a step of `agents.pipeline`; None if the update is sent as `vector`."""
    buffers: Buffers = NONE
    """Buffers of the model after the training."""
    vectors: Mapping[str, Vector | Encoded] = field(default_factory=dict)
    """The rule's own, each of shape (n,), float32, or as encoded by a step."""


def _readers(cls: type[Any]) -> dict[str, Callable[[str], Any]]:
    """Parsers of the fields that are in the header."""
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
    return b"".join(lay_out(message))


def lay_out(message: ModelMessage | UpdateMessage) -> Pieces:
    """Header, and views of the arrays."""
    metadata = {"protocol": str(PROTOCOL)}
    for name in _READERS[type(message)]:
        value = getattr(message, name)
        metadata[name] = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    arrays = {"w": np.ascontiguousarray(message.vector, dtype="<f4")}
    if isinstance(message, UpdateMessage) and message.encoded is not None:
        metadata |= message.encoded.fields
        arrays = {name: np.ascontiguousarray(a) for name, a in message.encoded.arrays.items()}
    for name, vector in message.vectors.items():
        own = f"{_OWN}{name}"
        if isinstance(vector, Encoded):
            metadata |= {f"{own}/{key}": text for key, text in vector.fields.items()}
            arrays |= {f"{own}/{key}": np.ascontiguousarray(a) for key, a in vector.arrays.items()}
        else:
            arrays[own] = np.ascontiguousarray(vector, dtype="<f4")
    return _pack(arrays, metadata, message.buffers)


def largest_model(parameters: int, buffers: int, own: int = 0) -> int:
    """Maximum payload bytes of a model with `buffers` numbers in its buffers and `own` elements in the
    rule's own vectors."""
    return _LENGTH.size + _MAX_HEADER + 4 * (parameters + own) + 8 * buffers


def plain_size(message: UpdateMessage, parameters: int, sizes: Mapping[str, int] | None = None) -> int:
    """Payload bytes that `message` would have with a float32 vector of `parameters` parameters and with
    the rule's own vectors, of these `sizes`, as float32."""
    vectors = {name: np.empty(size, "<f4") for name, size in (sizes or {}).items()}  # never touched
    whole = np.empty(parameters, "<f4")
    plain = dataclasses.replace(message, vector=whole, encoded=None, vectors=vectors)
    return sum(map(len, lay_out(plain)))


def decode_model(payload: bytes | bytearray) -> ModelMessage:
    """Raises WireError."""
    header, metadata, body, buffers = _split(payload)
    vectors: dict[str, Vector] = {}
    if len(header) > 1 and any(name.startswith(_OWN) for name in header):
        arrays, own = _separate(_arrays(header, body))
        if [*arrays] != ["w"] or any("/" in name or a.dtype != "<f4" for name, a in own.items()):
            raise WireError(f"expected float32 vectors, found {', '.join(header):.100}")
        vector, vectors = arrays["w"], own
    else:
        vector = _only_vector(header, body)
    fields = _fields(ModelMessage, metadata)
    return ModelMessage(**fields, vector=vector, buffers=buffers, vectors=vectors)


def decode_update(payload: bytes | bytearray) -> UpdateMessage:
    """Raises WireError."""
    header, metadata, body, buffers = _split(payload)
    fields = _fields(UpdateMessage, metadata)
    if len(header) > 1 and any(name.startswith(_OWN) for name in header):
        return _with_vectors(fields, metadata, _arrays(header, body), buffers)
    if len(metadata) > len(fields) + 1:  # more than the fields and `protocol`
        known = {"protocol", *fields}
        more = {name: text for name, text in metadata.items() if name not in known}
        encoded = Encoded(more, _arrays(header, body))
        return UpdateMessage(**fields, vector=_NOTHING, encoded=encoded, buffers=buffers)
    vector = _only_vector(header, body)
    return UpdateMessage(**fields, vector=vector, buffers=buffers)


def _with_vectors(
    fields: dict[str, Any],
    metadata: Mapping[str, str],
    arrays: Mapping[str, NDArray[Any]],
    buffers: Buffers,
) -> UpdateMessage:
    """`fields`: decoded header fields. `metadata`: all header fields as text. Raises WireError."""
    known = {"protocol", *fields}
    more, own_fields = _separate({name: text for name, text in metadata.items() if name not in known})
    arrays, own = _separate(arrays)
    parts, texts = _by_vector(own), _by_vector(own_fields)
    vectors: dict[str, Vector | Encoded] = {}
    for name, found in parts.items():
        if "" not in found:
            vectors[name] = Encoded(texts.get(name, {}), found)
        elif len(found) == 1 and found[""].dtype == "<f4":
            vectors[name] = found[""]
        else:
            raise WireError(f"vector {name:.40}: expected float32 numbers, or an encoded vector")
    if more:
        encoded = Encoded(more, arrays)
        return UpdateMessage(
            **fields, vector=_NOTHING, encoded=encoded, buffers=buffers, vectors=vectors
        )
    if [*arrays] != ["w"] or arrays["w"].dtype != "<f4":
        raise WireError(f"expected one float32 vector `w`, found {', '.join(arrays):.100}")
    return UpdateMessage(**fields, vector=arrays["w"], buffers=buffers, vectors=vectors)


T = TypeVar("T")


def _separate(items: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Items of `w` or of an encoded update, and those of the rule's own vectors, whose names no longer
    begin with `_OWN`."""
    rest = {name: item for name, item in items.items() if not name.startswith(_OWN)}
    own = {name.removeprefix(_OWN): item for name, item in items.items() if name.startswith(_OWN)}
    return rest, own


def _by_vector(items: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Items of the rule's own vectors: vector -> key -> item. An item of an encoded vector is called
    `NAME/KEY`; else it is `NAME`, and the key is empty."""
    found: dict[str, dict[str, T]] = {}
    for key, item in items.items():
        name, _, part = key.partition("/")
        found.setdefault(name, {})[part] = item
    return found


def pack(vector: Vector, metadata: dict[str, str], buffers: Buffers = NONE) -> Pieces:
    """Pieces of a safetensors file with `vector` (contiguous, shape (d,)) as the float32 tensor `w`,
    then `buffers` unless they are empty."""
    return _pack({"w": vector}, metadata, buffers)


def _pack(arrays: dict[str, NDArray[Any]], metadata: dict[str, str], buffers: Buffers) -> Pieces:
    if buffers.nbytes:
        arrays = {**arrays, "floats": buffers.floats, "integers": buffers.integers}
    text = _JSON.encode({"__metadata__": metadata, **_tensors(arrays)}).encode()
    text += b" " * (-len(text) % 8)  # aligned data, as the format asks
    views = (array.data.cast("B") for array in arrays.values() if array.size)
    return _LENGTH.pack(len(text)) + text, *views


def _tensors(arrays: Mapping[str, NDArray[Any]], at: int = 0) -> dict[str, Any]:
    """Header's entries for `arrays`, one after the other from byte `at` on."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        end = at + array.nbytes
        found[name] = {"dtype": _NAMES[array.dtype], "shape": [array.size], "data_offsets": [at, end]}
        at = end
    return found


def _arrays(header: Mapping[str, Any], body: memoryview) -> dict[str, NDArray[Any]]:
    """Views of `body`. Raises WireError."""
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
    """Vector (a read-only view), metadata and buffers. Raises WireError."""
    header, metadata, body, buffers = _split(payload)
    return _only_vector(header, body), metadata, buffers


def _split(payload: bytes | bytearray) -> tuple[dict[str, Any], dict[str, str], memoryview, Buffers]:
    """Header's entries and bytes of all tensors except buffers, the metadata between them, and the
    buffers. Raises WireError."""
    if len(payload) < _LENGTH.size:
        raise WireError(f"payload has {len(payload)} bytes: shorter than a header")
    (length,) = _LENGTH.unpack_from(payload)
    start = _LENGTH.size + length
    if length > _MAX_HEADER:
        raise WireError(f"header of {length} bytes, expected at most {_MAX_HEADER}")
    if start > len(payload):
        raise WireError(f"header of {length} bytes, but the payload has only {len(payload)}")
    try:
        header = json.loads(str(payload[_LENGTH.size : start], "utf-8"))
        metadata = header.pop("__metadata__")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"unreadable header: {error!r:.80}") from error
    if not isinstance(metadata, dict) or not set(map(type, metadata.values())) <= {str}:
        raise WireError("invalid metadata: expected a map of strings to strings")
    body = memoryview(payload).toreadonly()[start:]
    if header.keys().isdisjoint(_BUFFERS):
        return header, metadata, body, NONE
    return header, metadata, *_split_buffers(header, body)


def _split_buffers(header: dict[str, Any], body: memoryview) -> tuple[memoryview, Buffers]:
    """Part before the buffers, and buffers, whose entries are removed from `header`. Raises
    WireError."""
    try:
        floats, integers = (header[name]["shape"][0] for name in _BUFFERS)
    except (LookupError, TypeError) as error:
        raise WireError(f"buffers without a shape: {error!r:.80}") from error
    size = len(body)
    if not all(type(count) is int and 0 <= count <= size for count in (floats, integers)):
        raise WireError(
            f"invalid buffers: {floats!r:.20} floats and {integers!r:.20} integers in {size} bytes"
        )
    middle = size - 8 * integers
    begin = middle - 4 * floats
    if begin < 0:
        raise WireError(f"invalid buffers: {floats} floats and {integers} integers in {size} bytes")
    # Copies, because they are kept longer than the payload.
    found = Buffers(
        np.frombuffer(body[begin:middle], "<f4").copy(), np.frombuffer(body[middle:], "<i8").copy()
    )
    expected = _tensors({"floats": found.floats, "integers": found.integers}, begin)
    if {name: header.pop(name) for name in _BUFFERS} != expected:
        raise WireError("invalid header of buffers: it does not match their position")
    return body[:begin], found


def _only_vector(header: dict[str, Any], body: memoryview) -> Vector:
    vector: Vector = np.frombuffer(body[: len(body) // 4 * 4], dtype="<f4")
    if len(body) % 4 or header != _tensors({"w": vector}):
        raise WireError(f"expected one float32 vector `w` of {len(body)} bytes, found {header!r:.100}")
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
