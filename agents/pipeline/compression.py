"""Compression of updates on their way from client to aggregator: float32 vectors of shape (d,) are
converted to fewer bytes, and back. No I/O and no clock.

`METHODS` are the methods that a topology may choose. Each method makes a `Compressed`. Its arrays are
sent unchanged (`agents.wire.payloads.Encoded`), and their size in bytes depends only on d. Received
arrays are views of the payload. Only `dense` checks their values and allocates memory for d floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.checks import at_least
from agents.models.vectors import Vector
from agents.pipeline.interface import ClientContext, ClientStep, ServerStep, UpdateStep
from agents.wire.payloads import Encoded

Array = NDArray[Any]
_BLOCK = 1 << 15
"""Elements processed at once, which stay in the processor's cache."""
_LEVELS = np.float32(127)
_NORMAL = np.float32(np.finfo(np.float32).tiny)
_MAX_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    method: str
    size: int
    """d, number of parameters."""
    chunk: int
    """Parameters that share one scale; 0 without scales."""
    arrays: Mapping[str, Array]
    """Arrays by name, with the types and lengths that `Method.arrays` returns."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def dense(self) -> Vector:
        """Shape (d,), float32. Raises ValueError for values that the method cannot produce."""
        vector: Vector = METHODS[self.method].expand(self)
        return vector

    @property
    def encoded(self) -> Encoded:
        """Header fields and arrays, as they are sent."""
        fields = {"compression": self.method, "parameters": str(self.size), "chunk": str(self.chunk)}
        return Encoded(fields, self.arrays)

    @classmethod
    def from_encoded(cls, encoded: Encoded) -> Compressed:
        """Raises ValueError if a header field is invalid, or the arrays do not have the types and
        lengths that the method produces."""
        fields, arrays = encoded.fields, encoded.arrays
        method = fields["compression"]
        if method not in METHODS:
            raise ValueError(f"compression {method!r:.40}, expected one of {', '.join(METHODS)}")
        if fields.keys() != {"compression", "parameters", "chunk"}:
            raise ValueError(f"fields {', '.join(fields):.80}, expected compression, parameters, chunk")
        size, chunk = int(fields["parameters"]), int(fields["chunk"])
        if not 0 < size < 1 << 40 or not 0 <= chunk <= _MAX_CHUNK:
            raise ValueError(f"{size} parameters in chunks of {chunk}: out of range")
        expected = METHODS[method].arrays(size, chunk, encoded.nbytes)
        found = [(name, array.dtype.str, array.size) for name, array in arrays.items()]
        if found != [(name, np.dtype(kind).str, count) for name, (kind, count) in expected.items()]:
            raise ValueError(f"arrays are not those of {method} for {size} parameters")
        return cls(method, size, chunk, arrays)


class Method(Protocol):
    """A frozen dataclass whose fields are the keys that a topology may set."""

    keeps_error: ClassVar[bool] = False
    """The compression error of an update is added to the client's next one (error feedback)."""

    def compress(self, vector: Vector) -> Compressed:
        """Compress `vector`, shape (d,), float32."""
        ...

    @staticmethod
    def expand(compressed: Compressed) -> Vector:
        """Return the decompressed vector, shape (d,), float32."""
        ...

    @staticmethod
    def arrays(size: int, chunk: int, nbytes: int) -> dict[str, tuple[str, int]]:
        """Return the type and the length of each array, in order, for an update of `size` parameters
        that has `nbytes` bytes in all."""
        ...


@dataclass(frozen=True)
class Fp16(Method):
    """Half precision: 2 bytes per parameter. The range is ±65,504; an update with a larger value is
    rejected as diverged."""

    def compress(self, vector: Vector) -> Compressed:
        with np.errstate(over="ignore"):
            return Compressed("fp16", vector.size, 0, {"w": vector.astype("<f2")})

    @staticmethod
    def expand(compressed: Compressed) -> Vector:
        return compressed.arrays["w"].astype(np.float32)

    @staticmethod
    def arrays(size: int, chunk: int, nbytes: int) -> dict[str, tuple[str, int]]:
        return {"w": ("<f2", size)}


@dataclass(frozen=True)
class Int8(Method):
    """8 bits per parameter, rounded to nearest, and one float32 scale per chunk c of parameters:

    q_j = round(v_j/s_c),   s_c = max_{j∈c} |v_j| / 127
    """

    chunk: Annotated[int, "count"] = 1024
    """Parameters that share one scale."""

    def __post_init__(self) -> None:
        at_least("chunk", self.chunk, 16)
        if self.chunk > _MAX_CHUNK:
            raise ValueError(f"chunk is {self.chunk}, expected at most {_MAX_CHUNK}")

    def compress(self, vector: Vector) -> Compressed:
        size, chunk = vector.size, self.chunk
        q = np.empty(size, np.int8)
        scales = np.empty(-(-size // chunk), "<f4")
        for first, part, values in _chunks(vector, chunk):
            scale = np.abs(values).max(axis=1) / _LEVELS
            scale[scale < _NORMAL] = 0  # a subnormal scale could give quotients above 127
            scales[first : first + len(scale)] = scale
            with np.errstate(invalid="ignore"):
                steps = np.rint(values / np.where(scale, scale, np.float32(1))[:, None])
                q[part] = steps.astype(np.int8).reshape(-1)
        return Compressed("int8", size, chunk, {"scales": scales, "w": q})

    @staticmethod
    def expand(compressed: Compressed) -> Vector:
        scales, q = compressed.arrays["scales"], compressed.arrays["w"]
        vector = np.empty(compressed.size, np.float32)
        for first, part, values in _chunks(q, compressed.chunk):
            scale = scales[first : first + len(values), None]
            with np.errstate(invalid="ignore", over="ignore"):  # a forged scale may overflow
                np.multiply(values, scale, out=vector[part].reshape(values.shape))
        return vector

    @staticmethod
    def arrays(size: int, chunk: int, nbytes: int) -> dict[str, tuple[str, int]]:
        if chunk < 16:
            raise ValueError(f"chunks of {chunk} parameters, expected at least 16")
        return {"scales": ("<f4", -(-size // chunk)), "w": ("i1", size)}


@dataclass(frozen=True)
class TopK(Method):
    """The k parameters of largest magnitude, 8 bytes each, with error feedback (Stich, Cordonnier, Jaggi
    2018, arXiv 1809.07599): top_k(u) with u = Δ + e is sent, and the error e ← u − top_k(u) is kept for
    the next update. e = 0 when the client's process starts. Among equal magnitudes the first ones are
    sent."""

    keeps_error: ClassVar[bool] = True
    share: Annotated[float, "share above 0"] = 0.01
    """k/d, share of the parameters that are sent."""

    def compress(self, vector: Vector) -> Compressed:
        size = vector.size
        k = min(size, max(1, round(self.share * size)))
        magnitude = np.abs(vector)
        magnitude[np.isnan(magnitude)] = np.inf  # NaN is sent, so that divergence is noticed
        least = np.partition(magnitude, size - k)[size - k]
        larger = np.flatnonzero(magnitude > least)
        equal = np.flatnonzero(magnitude == least)[: k - len(larger)]
        indices = np.sort(np.concatenate((larger, equal))).astype("<u4")
        return Compressed("topk", size, 0, {"values": vector[indices], "indices": indices})

    @staticmethod
    def expand(compressed: Compressed) -> Vector:
        values, indices = compressed.arrays["values"], compressed.arrays["indices"]
        if indices[-1] >= compressed.size or (indices[1:] <= indices[:-1]).any():
            raise ValueError(f"top-k indices must ascend and be below {compressed.size}")
        vector = np.zeros(compressed.size, np.float32)
        vector[indices] = values
        return vector

    @staticmethod
    def arrays(size: int, chunk: int, nbytes: int) -> dict[str, tuple[str, int]]:
        if not 0 < nbytes // 8 <= size < 1 << 32:
            raise ValueError(f"top-k payload has {nbytes // 8} values, expected 1 to {size}")
        return {"values": ("<f4", nbytes // 8), "indices": ("<u4", nbytes // 8)}


METHODS: dict[str, type[Method]] = {"fp16": Fp16, "int8": Int8, "topk": TopK}


@dataclass(frozen=True)
class CompressionStep(UpdateStep):
    """Step that compresses a client's updates."""

    field: ClassVar[str | None] = "compression"
    kind: str
    """Name in METHODS."""
    params: Mapping[str, Any]
    """Values of the fields of the method's dataclass."""

    def at_client(self, client: ClientContext) -> Compressor:
        return Compressor(METHODS[self.kind](**self.params))

    def at_server(self, parameters: int) -> Expander:
        return Expander(parameters)


class Compressor(ClientStep):
    """Compression of one client's updates. For error feedback, it keeps the error that is added to the
    next update."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._error: Vector | None = None

    def apply(self, progress: Vector, sequence: int, dispatch: int) -> Encoded:
        return self.compress(progress).encoded

    def for_vector(self, size: int) -> Compressor:
        return Compressor(self._method)  # with an error of its own

    def compress(self, vector: Vector) -> Compressed:
        """An update, shape (d,), float32. Keep the error for error feedback."""
        if not self._method.keeps_error:
            return self._method.compress(vector)
        if self._error is not None:
            vector = vector + self._error
        compressed = self._method.compress(vector)
        with np.errstate(invalid="ignore", over="ignore"):
            left = vector - compressed.dense()
            if math.isfinite(float(left.sum())):  # a diverged update is rejected: drop its error
                self._error = left
        return compressed


class Expander(ServerStep):
    """Decodes the updates of all METHODS to vectors of shape (parameters,)."""

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters

    def for_vector(self, size: int) -> Expander:
        return Expander(size)

    def decode(self, encoded: Encoded) -> Vector:
        """This allocates memory for at most one model."""
        compressed = Compressed.from_encoded(encoded)
        if compressed.size != self._parameters:
            raise ValueError(f"another model: {compressed.size} parameters, expected {self._parameters}")
        return compressed.dense()


def _chunks(vector: Array, chunk: int) -> Iterator[tuple[int, slice, Array]]:
    """Blocks of chunks: number of the first chunk, slice of `vector`, and values, shape (chunks, chunk).
    A shorter last chunk is a block of its own."""
    rows = max(1, _BLOCK // chunk)
    whole = vector.size // chunk
    for first in range(0, whole, rows):
        part = slice(first * chunk, min(whole, first + rows) * chunk)
        yield first, part, vector[part].reshape(-1, chunk)
    if whole * chunk < vector.size:
        part = slice(whole * chunk, vector.size)
        yield whole, part, vector[part].reshape(1, -1)
