"""Blocks of JSON lines to columns: what loading a run and following one have in common.

A block goes through Arrow's JSON reader, all kinds of record at once, and is then taken apart. Where
Arrow cannot (a line that is none, a newer format), the block is read once more, line by line, which is
slow but knows the line that is wrong. So is a block that does not look like lines of objects: Arrow's
reader ends the process where a line is `null`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta
from pyarrow import json as arrow_json

from agents import events
from agents.disk import files

BLOCK = 1 << 25
"""Bytes that are read at a time: what bounds the memory beside the tables themselves."""
_TEXTS = ("reason", "message", "details")
"""Strings that are seldom the same twice; the others become categoricals."""
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}


def _schema(kind: type[events.Record]) -> pa.Schema:
    return pa.schema([(field.name, _TYPES[str(field.type)]) for field in dataclasses.fields(kind)])


SCHEMAS: Mapping[str, pa.Schema] = {
    kind.event: _schema(kind)
    for kind in (
        events.UpdateApplied,
        events.VersionMade,
        events.Evaluated,
        events.EvaluatedPart,
        events.ClientStatus,
        events.UpdateRejected,
        events.UpdateClipped,
        events.RoundUnfinished,
        events.Note,
    )
}
"""Kinds of record that become tables; of the others there are few, and they have lists and maps."""
ACTIONS = pa.schema(
    dict.fromkeys(("at", "lateness"), _TYPES["float"])
    | dict.fromkeys(("device", "source", "action", "details"), _TYPES["str"])
)
"""Of `events.Acted`: `details` is the whole action as JSON."""
_ALL = pa.unify_schemas([pa.schema([("event", pa.string())]), *SCHEMAS.values()])

_NUMBERS = ("cpu", "periods", "throttled_periods", "throttled", "memory", "received", "sent")
PROBED = ("up", "down", "rtt", "jitter", "loss")
_TAKEN = [("device", pa.string()), ("at", pa.float64()), ("monotonic_zero", pa.float64())]
"""By which device and when, on the host's monotonic clock; and the Unix time at which that showed 0, in
the segment of the run that it was in. A line of its own tells that at the begin of each segment; of
older runs, none does."""
_QUEUES, _CARRIED = {"up": "uplink", "down": "downlink"}, ("busy", "left", "allowed")
"""Fields of a sample that have what a direction of a link carried while packets waited in its queue, and
what these have (`agents.wire.messages.QueueUse`)."""
_SAMPLE = pa.schema(
    _TAKEN
    + [(name, pa.float64()) for name in _NUMBERS]
    + [(name, pa.struct([(one, pa.float64()) for one in _CARRIED])) for name in _QUEUES.values()]
    + [("probe", pa.struct([(name, pa.float64()) for name in PROBED]))]
)
_ODD = re.compile(rb"}(?!\n\{|[},]|\n?\Z)")
"""What lines of objects do not have, but in a text: a closing brace, and then neither the next object
nor the rest of one that is around it."""
SAMPLES = pa.schema(
    _TAKEN
    + [(name, pa.float64()) for name in _NUMBERS]
    + [(f"{way}_{one}", pa.float64()) for way in _QUEUES for one in _CARRIED]
)
PROBES = pa.schema(_TAKEN + [(name, pa.float64()) for name in PROBED])


def _figures(name: str, names: Sequence[str]) -> Any:
    return msgspec.defstruct(name, [(one, _Figure, None) for one in names])


_Figure = Annotated[float, Meta(ge=-events.LARGEST, le=events.LARGEST)] | None
_Sample = msgspec.defstruct(
    "_Sample",
    [
        ("device", str | None, None),
        *((name, _Figure, None) for name in ("at", "monotonic_zero", *_NUMBERS)),
        *((name, _figures(name, _CARRIED) | None, None) for name in _QUEUES.values()),
        ("probe", _figures("probe", PROBED) | None, None),
    ],
)
"""What `_SAMPLE` has; what else there is, is skipped."""
_SAMPLES = msgspec.json.Decoder(_Sample)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """What some lines of `events.jsonl` hold."""

    tables: Mapping[str, pa.Table]
    """By kind of record (`SCHEMAS`); a kind without rows is left out."""
    others: tuple[events.Record, ...]
    """The start, the end and the actions, in order."""


class Tail:
    """Reads a growing file of lines; a line still being written waits for the next call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        """Whole lines read so far."""
        self._offset = 0

    def blocks(self) -> Iterator[bytes]:
        """What is new since the last call, in blocks of whole lines; nothing where there is no file."""
        while block := self._next():
            self._offset += len(block)
            yield block
            self.lines += block.count(b"\n")

    def _next(self) -> bytes:
        size = BLOCK
        try:
            with files.open_regular(self.path) as file:
                while True:
                    file.seek(self._offset)
                    read = file.read(size)
                    if (end := read.rfind(b"\n") + 1) or len(read) < size:
                        return read[:end]
                    size *= 2  # a line longer than the block
        except FileNotFoundError:
            return b""


def parse_events(tail: Tail, block: bytes) -> Block:
    """The records of `block`, which is at `tail`. Raises ValueError, naming the line."""
    try:
        return _fast(block)
    except pa.ArrowInvalid:
        return _by_line(tail, block)


def parse_samples(block: bytes, zero: float | None) -> tuple[pa.Table, pa.Table, float | None]:
    """Telemetry and probes of `block`, where `zero` is the `monotonic_zero` at its begin, and that at
    its end. What is no sample (a crash in mid-write) is left out."""
    try:
        table = _read(block, _SAMPLE)
    except pa.ArrowInvalid:
        table = pa.Table.from_pylist(list(filter(None, map(_sample, block.splitlines()))), _SAMPLE)
    zeros = pc.fill_null_forward(table["monotonic_zero"])
    if zero is not None:
        zeros = pc.fill_null(zeros, zero)
    zero = zeros[-1].as_py() if len(zeros) else zero
    table = table.set_column(table.schema.get_field_index("monotonic_zero"), "monotonic_zero", zeros)
    table = table.filter(pc.and_(table["device"].is_valid(), table["at"].is_valid()))
    probed = table["probe"].is_valid()
    of_cpu = pc.and_(pc.invert(probed), table["cpu"].is_valid())  # others are of GPUs
    samples, probes = table.filter(of_cpu), table.filter(probed)
    flat = {name: pc.struct_field(probes["probe"], name) for name in PROBED}
    taken = {name: probes[name] for name, _ in _TAKEN}
    probe_table = pa.table({**taken, **flat}, schema=PROBES)
    carried = {
        f"{way}_{one}": pc.struct_field(samples[name], one)
        for way, name in _QUEUES.items()
        for one in _CARRIED
    }
    whole = {name: samples[name] for name in SAMPLES.names if name not in carried}
    return _encoded(pa.table({**whole, **carried}, schema=SAMPLES)), _encoded(probe_table), zero


def _sample(line: bytes) -> dict[str, Any] | None:
    """A row of `_SAMPLE`, or None for what is no sample."""
    try:
        return dict(msgspec.to_builtins(_SAMPLES.decode(line)))
    except (ValueError, RecursionError):
        return None


def empty(schema: pa.Schema) -> pa.Table:
    return _encoded(schema.empty_table())


def actions(acted: Sequence[events.Acted]) -> pa.Table:
    rows = [
        {
            "at": one.at,
            "lateness": one.lateness,
            "device": one.device,
            "source": one.source,
            "action": str(one.details.get("action")),
            "details": json.dumps(dict(one.details)),
        }
        for one in acted
    ]
    return _encoded(pa.Table.from_pylist(rows, ACTIONS))


def _fast(block: bytes) -> Block:
    table = _read(block, _ALL)
    if table["event"].null_count:
        raise pa.ArrowInvalid("a line that is no record")
    tables = {}
    for kind, schema in SCHEMAS.items():
        rows = table.select(schema.names).filter(pc.equal(table["event"], kind))
        if any(rows[field.name].null_count for field in schema if field.type != pa.float64()):
            raise pa.ArrowInvalid("an incomplete record")
        if rows.num_rows:
            tables[kind] = _encoded(rows)
    others = pc.is_in(table["event"], pa.array(sorted(events.RECORDS.keys() - SCHEMAS.keys())))
    return Block(tables, tuple(_lines(block, pc.indices_nonzero(others).to_pylist())))


def _lines(block: bytes, numbers: list[int]) -> Iterator[events.Record]:
    lines = block.split(b"\n") if numbers else []
    try:
        records = [events.from_line(lines[number].decode()) for number in numbers]
    except ValueError as error:
        raise pa.ArrowInvalid(str(error)) from error
    return (record for record in records if record is not None)


def _by_line(tail: Tail, block: bytes) -> Block:
    rows: dict[str, list[dict[str, Any]]] = {}
    others: list[events.Record] = []
    for number, line in enumerate(block.splitlines(), start=tail.lines + 1):
        try:
            record = events.from_line(line.decode())
        except ValueError as error:
            raise ValueError(f"{tail.path}:{number}: {error}") from error
        if record is None:
            continue
        if record.event in SCHEMAS:
            rows.setdefault(record.event, []).append(dataclasses.asdict(record))
        else:
            others.append(record)
    try:
        tables = {
            kind: pa.Table.from_pylist(found, schema=SCHEMAS[kind]) for kind, found in rows.items()
        }
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(
            f"{tail.path}: a record of lines {tail.lines + 1} to {number}: {error}"
        ) from error
    return Block({kind: _encoded(table) for kind, table in tables.items()}, tuple(others))


def _read(block: bytes, schema: pa.Schema) -> pa.Table:
    """Raises ArrowInvalid."""
    if not block:
        return schema.empty_table()
    if block[:1] != b"{" or _ODD.search(block):
        raise pa.ArrowInvalid("a line that is no object")
    table = arrow_json.read_json(
        pa.BufferReader(block),
        arrow_json.ReadOptions(block_size=max(1 << 22, block.find(b"\n") + 1)),
        arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    for column in table.flatten().columns:
        if column.type == pa.float64() and column.null_count < len(column):
            least, most = pc.min_max(column).as_py().values()
            if least < -events.LARGEST or most > events.LARGEST:
                raise pa.ArrowInvalid("a number that is too large")
    return table


def _encoded(table: pa.Table) -> pa.Table:
    for index, field in enumerate(table.schema):
        if field.type == pa.string() and field.name not in _TEXTS:
            table = table.set_column(index, field.name, table[index].dictionary_encode())
    return table
