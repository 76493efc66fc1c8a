"""Conversion of blocks of JSON lines to columns, to load and to follow a run.

Arrow's JSON reader parses a block with all kinds of record, which is then split by kind. If Arrow fails
(invalid line, newer format), the block is parsed line by line. This is slow, but finds the line with the
error. So are blocks that do not look like lines of objects: Arrow's reader crashes the process if a line
is `null`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta
from pyarrow import json as arrow_json

from agents import events
from agents.disk import files
from analysis.features import RECORDS, STREAMS
from analysis.part import SampleTable

BLOCK = 1 << 24
"""Bytes per block, which limit the memory beside the tables."""
_TEXTS = ("reason", "message", "details", "chosen", "added", "removed")
"""Strings that are rarely repeated. Others become categoricals."""
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}


def _schema_of(kinds: Iterable[str]) -> pa.Schema:
    """Kinds that are not in `SCHEMAS` have no columns."""
    schemas = [SCHEMAS[kind] for kind in SCHEMAS if kind in kinds]
    return pa.unify_schemas([pa.schema([("event", pa.string())]), *schemas])


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
        *(one.kind for one in RECORDS),
    )
}
"""Kinds that become tables. Other records are few, and contain lists and maps."""
ACTIONS = pa.schema(
    dict.fromkeys(("at", "lateness"), _TYPES["float"])
    | dict.fromkeys(("device", "source", "action", "details"), _TYPES["str"])
)
"""`details` is the whole action as JSON."""
_KIND = re.compile(rb'{"event":"([a-z_]+)"')
"""Start of a line as the aggregator writes it."""
_PARSED_AT_ONCE = 2
"""Blocks."""

_NUMBERS = ("cpu", "periods", "throttled_periods", "throttled", "memory", "received", "sent")
PROBED = ("up", "down", "rtt", "jitter", "loss")
DURATIONS = ("seconds", "throttled", "up_busy", "down_busy")
"""Columns of `TELEMETRY` with seconds of the host. CPU seconds are the same in device time."""
_NESTED = {"probe": PROBED, **{one.key: tuple(one.own_columns) for one in STREAMS if one.rows is None}}
"""Key of a line with an object of figures -> names of the figures."""
_COMMON = [("device", pa.string()), ("at", pa.float64()), ("monotonic_zero", pa.float64())]
"""Device, time on the host's monotonic clock, and Unix time at which that clock was 0 in the leg of
the run. `monotonic_zero` is on a line of its own at the start of each leg, but not in older runs."""
_QUEUES, _CARRIED = {"up": "uplink", "down": "downlink"}, ("busy", "left", "allowed")
"""`_QUEUES`: direction -> field of a sample with the use of its queue. `_CARRIED`: fields of
`agents.wire.messages.QueueUse`."""
_SAMPLE = pa.schema(
    _COMMON
    + [(name, pa.float64()) for name in _NUMBERS]
    + [(name, pa.struct([(one, pa.float64()) for one in _CARRIED])) for name in _QUEUES.values()]
    + [(key, pa.struct([(name, pa.float64()) for name in names])) for key, names in _NESTED.items()]
)
_ODD = re.compile(rb"}(?!\n\{|[},]|\n?\Z)")
"""Closing brace that neither ends the block, nor is followed by the next object or by the rest of an
outer object. In lines of objects, it occurs only inside strings."""
SAMPLES = pa.schema(
    _COMMON
    + [(name, pa.float64()) for name in _NUMBERS]
    + [(f"{way}_{one}", pa.float64()) for way in _QUEUES for one in _CARRIED]
)
PROBES = pa.schema(_COMMON + [(name, pa.float64()) for name in PROBED])
_STREAMS = {
    one.kind: pa.schema(
        _COMMON
        + [
            (name, pa.float64() if about.unit else pa.string())
            for name, about in one.own_columns.items()
        ]
    )
    for one in STREAMS
}
TELEMETRY: Mapping[str, pa.Schema] = {"telemetry": SAMPLES, "probe": PROBES, **_STREAMS}
"""Kinds of line in `telemetry.jsonl` that become tables."""


def _figures(name: str, names: Sequence[str]) -> Any:
    return msgspec.defstruct(name, [(one, _Figure, None) for one in names])


_Figure = Annotated[float, Meta(ge=-events.LARGEST, le=events.LARGEST)] | None
_Sample = msgspec.defstruct(
    "_Sample",
    [
        ("device", str | None, None),
        *((name, _Figure, None) for name in ("at", "monotonic_zero", *_NUMBERS)),
        *((name, _figures(name, _CARRIED) | None, None) for name in _QUEUES.values()),
        *((key, _figures(key, names) | None, None) for key, names in _NESTED.items()),
    ],
)
"""Fields of `_SAMPLE`; others are ignored."""
_SAMPLES = msgspec.json.Decoder(_Sample)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Some lines of `events.jsonl`."""

    tables: Mapping[str, pa.Table]
    """Tables by kind of record (`SCHEMAS`). Kinds without rows are left out."""
    others: tuple[events.Record, ...]
    """Other kinds (starts, end, actions), in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Complete lines."""

    text: bytes
    before: int = 0
    """Lines of the file that come before."""


class Tail:
    """Reader of lines of a growing file. An incomplete last line is left to a later call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = 0
        self._offset = 0

    def blocks(self) -> Iterator[Lines]:
        """Lines that were completed since the last call; nothing if there is no file."""
        while block := self._next():
            lines = Lines(block, self._lines)
            self._offset += len(block)
            self._lines += block.count(b"\n")
            yield lines

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


def read_events(tail: Tail) -> Iterator[Block]:
    """Two blocks are parsed at the same time, because a part of the work on each is done by one core.
    Raises the errors of `parse_events`."""
    parsed: deque[Future[Block]] = deque()
    with ThreadPoolExecutor(_PARSED_AT_ONCE) as pool:
        for lines in tail.blocks():
            parsed.append(pool.submit(parse_events, tail.path, lines))
            if len(parsed) > _PARSED_AT_ONCE:
                yield parsed.popleft().result()
        while parsed:
            yield parsed.popleft().result()


def parse_events(path: Path, lines: Lines) -> Block:
    """Raises ValueError that names the line of `path` if a record is invalid."""
    try:
        return _fast(lines.text)
    except pa.ArrowInvalid:
        return _by_line(path, lines)


def parse_samples(block: bytes, zero: float | None) -> tuple[dict[str, pa.Table], float | None]:
    """Return the tables by kind (`TELEMETRY`), and `monotonic_zero` at the end of the block; `zero` is
    that at its start. Lines that are no samples, as a crash can leave, are ignored."""
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
    tables = {"probe": _nested(table, "probe", PROBES)}
    # Lines of other kinds have no CPU time.
    samples = table.filter(pc.and_(table["probe"].is_null(), table["cpu"].is_valid()))
    carried = {
        f"{way}_{one}": pc.struct_field(samples[name], one)
        for way, name in _QUEUES.items()
        for one in _CARRIED
    }
    plain = {name: samples[name] for name in SAMPLES.names if name not in carried}
    tables["telemetry"] = _encoded(pa.table({**plain, **carried}, schema=SAMPLES))
    for stream in STREAMS:
        schema = _STREAMS[stream.kind]
        if stream.rows is None:
            tables[stream.kind] = _nested(table, stream.key, schema)
        else:
            tables[stream.kind] = _encoded(pa.Table.from_pylist([*_rows(stream, block, zero)], schema))
    return tables, zero


def _rows(stream: SampleTable, block: bytes, zero: float | None) -> Iterator[Mapping[str, Any]]:
    """`zero`: `monotonic_zero`, if known. Lines of another kind, or damaged by a crash, are left out."""
    if stream.rows is None or (key := f'"{stream.key}"'.encode()) not in block:
        return
    for line in block.splitlines():
        if key in line:
            with suppress(ValueError, RecursionError):
                yield from [{**row, "monotonic_zero": zero} for row in stream.rows(line)]


def _nested(table: pa.Table, name: str, schema: pa.Schema) -> pa.Table:
    """Rows with a struct in the column `name`, with its fields as columns."""
    rows = table.filter(table[name].is_valid())
    common = {column: rows[column] for column, _ in _COMMON}
    own = {
        column: pc.struct_field(rows[name], column) for column in schema.names if column not in common
    }
    return _encoded(pa.table({**common, **own}, schema=schema))


def _sample(line: bytes) -> dict[str, Any] | None:
    """Row of `_SAMPLE`; None if the line is no sample."""
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
    # Columns that no line of the block needs would take a third of the time.
    kinds = {kind.decode() for kind in _KIND.findall(block)}
    table = _read(block, _schema_of(kinds))
    if table["event"].null_count:
        raise pa.ArrowInvalid("a line is not a record")
    if not kinds.issuperset(table["event"].unique().to_pylist()):  # written in another way
        kinds, table = {*SCHEMAS}, _read(block, _schema_of(SCHEMAS))
    tables = {}
    for kind, schema in SCHEMAS.items():
        if kind not in kinds:
            continue
        rows = table.select(schema.names).filter(pc.equal(table["event"], kind))
        if any(rows[field.name].null_count for field in schema if field.type != pa.float64()):
            raise pa.ArrowInvalid("a record is incomplete")
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


def _by_line(path: Path, block: Lines) -> Block:
    rows: dict[str, list[dict[str, Any]]] = {}
    others: list[events.Record] = []
    for number, line in enumerate(block.text.splitlines(), start=block.before + 1):
        try:
            record = events.from_line(line.decode())
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
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
            f"{path}: invalid record in lines {block.before + 1} to {number}: {error}"
        ) from error
    return Block({kind: _encoded(table) for kind, table in tables.items()}, tuple(others))


def _read(block: bytes, schema: pa.Schema) -> pa.Table:
    """Parse `block` with Arrow. Raises ArrowInvalid if Arrow cannot parse it."""
    if not block:
        return schema.empty_table()
    if block[:1] != b"{" or _ODD.search(block):
        raise pa.ArrowInvalid("a line is not an object")
    table = arrow_json.read_json(
        pa.BufferReader(block),
        arrow_json.ReadOptions(block_size=max(1 << 22, block.find(b"\n") + 1)),
        arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    for column in table.flatten().columns:
        if column.type == pa.float64() and column.null_count < len(column):
            least, most = pc.min_max(column).as_py().values()
            if least < -events.LARGEST or most > events.LARGEST:
                raise pa.ArrowInvalid("a number is too large")
    return table


def _encoded(table: pa.Table) -> pa.Table:
    for index, field in enumerate(table.schema):
        if field.type == pa.string() and field.name not in _TEXTS:
            table = table.set_column(index, field.name, table[index].dictionary_encode())
    return table
