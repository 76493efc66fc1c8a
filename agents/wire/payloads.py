"""Messages on the wire: safetensors payloads, metadata in the header. Nothing is ever unpickled.

A payload is one float32 vector of shape (d,) called `w` and a map of strings, laid out as safetensors
has it: 8 bytes with the header's length (little endian), the header in JSON, the vector's bytes. Of a
model with buffers these follow, as `floats` and `integers` (`agents.models.buffers`). We read and write
that layout ourselves because the library copies the vector on the way in: decoding here gives a view of
the received bytes. A test holds both against the library.
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
"""The tensors that a model with buffers has beside its vector, at the end of the payload."""
_JSON = json.JSONEncoder(separators=(",", ":"))
_TENSORS = ("vector", "encoded", "buffers")
"""Fields of a message that its header does not carry."""
_KINDS = {"F16": "<f2", "F32": "<f4", "I8": "|i1", "U32": "<u4"}
"""Types of the arrays of an encoded update, as safetensors and as NumPy call them."""
_NAMES = {np.dtype(kind): name for name, kind in _KINDS.items()}
Views = Sequence[memoryview]


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
    waiting: tuple[int, ...] = ()
    """With secure aggregation, to a client that remembers: dispatches whose updates wait to be summed
    up."""
    lost: tuple[int, ...] = ()
    """And those whose updates were lost with their sum."""
    buffers: Buffers = NONE


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """An update in another form than one float32 vector: that of a step in `agents.pipeline`. Of a
    `model` it is its difference to the model that was trained from."""

    fields: Mapping[str, str]
    """Further fields of the header; the step is known by the name of one of them."""
    arrays: Mapping[str, NDArray[Any]]
    """By name, in their order; each of one dimension. Those that came in are views of the payload."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


FAREWELL = "farewell"
"""The kind of message by which a client says goodbye and hands in what it remembers: `sequence` is that
of the update after which it did, `vector` its memory; 0 and none, where no update of it was applied."""


@dataclass(slots=True, kw_only=True)  # frozen, each would take the aggregator 1 µs more
class UpdateMessage:
    """What a client made of a dispatch. Times are those of its monotonic clock."""

    run: str
    client: str
    sequence: int
    """1, 2, …, over restarts of the client, too; with gaps, where a finished training was never sent."""
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
    """Empty if the update is `encoded`."""
    encoded: Encoded | None = None
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
        "tuple[int, ...]": _numbers,
    }
    return {f.name: types[str(f.type)] for f in dataclasses.fields(cls) if f.name not in _TENSORS}


def _optional_float(text: str) -> float | None:
    return None if text == "None" else float(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


_READERS = {cls: _readers(cls) for cls in (ModelMessage, UpdateMessage)}


def encode(message: ModelMessage | UpdateMessage) -> bytes:
    """The payload of `message`."""
    head, views = lay_out(message)
    return b"".join((head, *views))


def lay_out(message: ModelMessage | UpdateMessage) -> tuple[bytes, Views]:
    """The payload of `message`: the header, and views of what it describes."""
    metadata = _metadata(message)
    if isinstance(message, UpdateMessage) and message.encoded is not None:
        return _encoded_parts(message.encoded, message.buffers, metadata)
    return _lay_out(np.ascontiguousarray(message.vector, dtype="<f4"), message.buffers, metadata)


def largest_model(parameters: int, buffers: int) -> int:
    """Bytes of the payload of a model with so many parameters, and numbers in buffers, at most."""
    return _LENGTH.size + _MAX_HEADER + 4 * parameters + 8 * buffers


def plain_size(message: UpdateMessage, parameters: int) -> int:
    """Bytes of the payload of `message`, had it a float32 vector of so many parameters."""
    size, buffers = 4 * parameters, message.buffers
    return len(_header(parameters, buffers, _metadata(message))) + size + buffers.nbytes


def _metadata(message: ModelMessage | UpdateMessage) -> dict[str, str]:
    metadata = {"protocol": str(PROTOCOL)}
    for name in _READERS[type(message)]:
        value = getattr(message, name)
        metadata[name] = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return metadata


def decode_model(payload: bytes | bytearray) -> ModelMessage:
    """Raises WireError."""
    vector, metadata, buffers = unpack(payload)
    return ModelMessage(**_fields(ModelMessage, metadata), vector=vector, buffers=buffers)


def decode_update(payload: bytes | bytearray) -> UpdateMessage:
    """Raises WireError."""
    header, metadata, body = _split(payload)
    body, buffers = _without_buffers(header, body)
    fields = _fields(UpdateMessage, metadata)
    if len(metadata) > len(fields) + 1:  # beside the protocol
        known = {"protocol", *fields}
        more = {name: text for name, text in metadata.items() if name not in known}
        encoded = Encoded(more, _arrays(header, body))
        return UpdateMessage(**fields, vector=_NOTHING, encoded=encoded, buffers=buffers)
    vector = _only_vector(header, body)
    return UpdateMessage(**fields, vector=vector, buffers=buffers)


def pack(
    vector: Vector, metadata: dict[str, str], buffers: Buffers = NONE
) -> tuple[bytes | memoryview, ...]:
    """Pieces of a safetensors file with the float32 tensor `w` and, where there are any, `buffers`;
    `vector` is contiguous, shape (d,)."""
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
    """The header `text` with its length before it."""
    text += b" " * (-len(text) % 8)  # aligned data, as the format asks
    return _LENGTH.pack(len(text)) + text


def _tensor(kind: str, count: int, begin: int, end: int) -> dict[str, Any]:
    """What the header says of one."""
    return {"dtype": kind, "shape": [count], "data_offsets": [begin, end]}


def _ends(buffers: Buffers, at: int) -> dict[str, Any]:
    """What the header says of `buffers` that begin at byte `at`."""
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
    """What the header says of `arrays`, which follow one another."""
    found: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        end = at + array.nbytes
        found[name] = _tensor(_NAMES[array.dtype], array.size, at, end)
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
        raise WireError(f"an encoded update: {error!r:.80}") from error
    if not fits:
        raise WireError("an encoded update whose header is not that of its arrays")
    return arrays


def unpack(payload: bytes | bytearray) -> tuple[Vector, dict[str, str], Buffers]:
    """The vector (a read-only view of `payload`), the metadata and the buffers. Raises WireError."""
    header, metadata, body = _split(payload)
    body, buffers = _without_buffers(header, body)
    return _only_vector(header, body), metadata, buffers


def _split(payload: bytes | bytearray) -> tuple[dict[str, Any], dict[str, str], memoryview]:
    """What the header says of tensors, the metadata, and what follows. Raises WireError."""
    if len(payload) < _LENGTH.size:
        raise WireError("shorter than a header")
    (length,) = _LENGTH.unpack_from(payload)
    start = _LENGTH.size + length
    if length > _MAX_HEADER or start > len(payload):
        raise WireError(f"header of {length} bytes in a payload of {len(payload)}")
    try:
        header = json.loads(str(payload[_LENGTH.size : start], "utf-8"))
        metadata = header.pop("__metadata__")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"unreadable header: {error!r:.80}") from error
    if not isinstance(metadata, dict) or not set(map(type, metadata.values())) <= {str}:
        raise WireError("metadata is no map of strings")
    return header, metadata, memoryview(payload).toreadonly()[start:]


def _without_buffers(header: dict[str, Any], body: memoryview) -> tuple[memoryview, Buffers]:
    """What `body` has before the buffers, and these; takes them out of `header`. Raises WireError."""
    if "floats" not in header and "integers" not in header:
        return body, NONE
    try:
        floats, integers = (header[name]["shape"][0] for name in _BUFFERS)
    except (LookupError, TypeError) as error:
        raise WireError(f"buffers without a shape: {error!r:.80}") from error
    size = len(body)
    if not all(type(count) is int and 0 <= count <= size for count in (floats, integers)):
        raise WireError(f"buffers of {floats!r:.20} and {integers!r:.20} numbers in {size} bytes")
    middle = size - 8 * integers
    begin = middle - 4 * floats
    if begin < 0:
        raise WireError(f"buffers of {floats} and {integers} numbers in {size} bytes")
    # Copies: they are kept for longer than the payload.
    found = Buffers(
        np.frombuffer(body[begin:middle], "<f4").copy(), np.frombuffer(body[middle:], "<i8").copy()
    )
    if {name: header.pop(name) for name in _BUFFERS} != _ends(found, begin):
        raise WireError("buffers whose header is not that of their place")
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
        raise WireError(f"field {name}: {error!r:.80}") from error
    return fields
