"""The records of `events.jsonl`: what happened in a run, and when.

One JSON object per line; `"event"` names the record, the other keys are its fields. Every time is in
seconds of device time since the run clock started, unless the field says otherwise. Readers skip
unknown fields and records, and tolerate a torn last line (a crash in mid-write).
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from agents.device_actions import Action, from_json
from agents.disk import files

FORMAT = 1
"""Version of the run directory's format; a reader refuses a larger one."""

_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run clock starts: every client of `clients` is ready and under its CPU limit."""

    event: ClassVar[str] = "run_started"
    at: float
    wall_clock: float
    """Unix time in seconds."""
    clients: tuple[str, ...]
    missing: tuple[str, ...]
    """Clients that are not there: not ready in time (quorum), or to join later (scenario)."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """A client reported its state, or its last will did (`offline`)."""

    event: ClassVar[str] = "status"
    at: float
    client: str
    state: str
    """`joining`, `ready` or `offline`."""


@dataclass(slots=True, kw_only=True)  # frozen, each would take the aggregator 1 µs more
class UpdateApplied:
    """One update went into the global model."""

    event: ClassVar[str] = "update"
    client: str
    sequence: int
    kind: str
    base_version: int
    applied_version: int
    """The version that this update became part of."""
    staleness: int
    """Version at application (before it) − base version: applied_version − 1 − base_version."""
    weight: float
    """What the rule multiplied it with."""
    samples: int
    """Training samples of the client's shard."""
    steps: int
    loss: float
    """Mean local training loss over the steps."""
    bytes: int
    """Payload size of the update on the wire."""
    dispatched: float
    """Aggregator took the model that it then sent."""
    downloaded: float
    """Client had received all of it."""
    train_start: float
    train_end: float
    sent: float
    """Client began the upload (after think time)."""
    arrived: float
    """Aggregator had received all of it: the end of the upload."""
    applied: float
    dispatch: int = 0
    """Number of the dispatch that it answers, counted through the run: with `client` it names the
    update. 0 in runs of before."""
    bytes_before: float = math.nan
    """What the payload would be with the vector as float32; NaN in runs of before it was recorded."""
    masking: float = 0.0
    """Seconds before `train_start` in which the client made a mask and its shares (secure
    aggregation)."""
    outside: int = 0
    """Coordinates outside of the range of secure aggregation, which were cut to it."""

    @property
    def at(self) -> float:
        """When it was applied, as every record has an `at`; not stored."""
        return self.applied


@dataclass(frozen=True, slots=True)
class UpdateRejected:
    """An update was counted and dropped; the run goes on."""

    event: ClassVar[str] = "rejected"
    at: float
    client: str
    reason: str
    dispatch: int = 0
    """Number of the dispatch that it answers, as it says; 0 where it is none, and in runs of before."""


@dataclass(frozen=True, slots=True)
class UpdateClipped:
    """An update was over the bound of the norm, and was shortened to it before the rule was given it."""

    event: ClassVar[str] = "clipped"
    at: float
    client: str
    norm: float
    """Before."""


@dataclass(frozen=True, slots=True)
class RoundUnfinished:
    """A model was sent to a client, and no update that answers it was applied. Written when that is
    certain: the client left or began anew, its update was rejected, or the run ended."""

    event: ClassVar[str] = "unfinished"
    at: float
    client: str
    base_version: int
    dispatched: float
    """Aggregator took the model that it then sent; of several that are not answered, the first."""
    until: float
    """The update arrived all the same; else, when nothing more was expected of the client (`at`)."""
    dispatch: int = 0
    """Number of the newest dispatch of which this tells: what the client finished of that and of those
    before, and what is not in the records otherwise, was not applied. 0 in runs of before."""


@dataclass(frozen=True, slots=True)
class VersionMade:
    """A new global model."""

    event: ClassVar[str] = "version"
    at: float
    version: int
    updates: int
    """Updates that went into it."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The global model on the test set. `at` is when the model was taken, not when evaluation ended."""

    event: ClassVar[str] = "evaluation"
    at: float
    version: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class EvaluatedPart:
    """The global model on a part of the data: one class, or one device. The version's `evaluation`
    follows."""

    event: ClassVar[str] = "evaluation_part"
    at: float
    """When the model was taken."""
    version: int
    part: str
    """`class`: the test set's samples of one class. `device`: training samples of one device."""
    name: str
    """The class's number, the device's name."""
    samples: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Acted:
    """The emulator acted on a device."""

    event: ClassVar[str] = "action"
    at: float
    """When it was done; where the controller does not do it itself (links, and in containers all but CPU
    shares), when it gave the order."""
    device: str
    source: str
    """`scenario` (churn, availability and heat included), `hand` (a user in mid-run) or `aggregator`
    (which has a client that floods end)."""
    lateness: float
    """Seconds since it was due."""
    details: Mapping[str, Any]
    """The action's JSON form, see `agents.device_actions.to_json`."""

    @property
    def action(self) -> Action | None:
        """What was done; None where this version does not know it. Not stored."""
        return from_json(self.details)


@dataclass(frozen=True, slots=True)
class Disrupted:
    """From `since` to `at` the testbed, and not the experiment, kept the run from going on. One that
    lasts is written again when it is over, with the same `since`."""

    event: ClassVar[str] = "disrupted"
    at: float
    since: float
    reason: str
    """As in `nothing arrived`."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something a reader of the run should know (a quorum start, a client that left)."""

    event: ClassVar[str] = "note"
    at: float
    message: str


@dataclass(frozen=True, slots=True)
class WrongSum:
    """The sum of masked updates (secure aggregation) was outside of its bounds and was discarded. One of
    the updates or answers was wrong; which one cannot be determined."""

    event: ClassVar[str] = "wrong_sum"
    at: float
    updates: tuple[str, ...]
    """Clients whose updates it was to be the sum of."""
    answers: tuple[str, ...]
    """Clients whose sums of shares opened it."""

    @property
    def senders(self) -> str:
        """For people; not stored."""
        return f"updates of {', '.join(self.updates)}; answers of {', '.join(self.answers)}"


@dataclass(frozen=True, slots=True)
class RunEnded:
    event: ClassVar[str] = "run_ended"
    at: float
    reason: str
    """`after`, `updates`, `target_accuracy`, `interrupted` or `no clients left`."""
    version: int
    updates: int


_REASONS = {
    "after": "time is up",
    "updates": "updates made",
    "target_accuracy": "target reached",
}
COMPLETE = tuple(_REASONS)
"""Reasons of an end as planned."""


def end_reason(reason: str) -> str:
    """Why a run ended, for people: of `after`, `time is up`. Reasons of no topology are words."""
    return _REASONS.get(reason, reason)


Record = (
    RunStarted
    | ClientStatus
    | UpdateApplied
    | UpdateRejected
    | UpdateClipped
    | RoundUnfinished
    | VersionMade
    | Evaluated
    | EvaluatedPart
    | Acted
    | Disrupted
    | Note
    | WrongSum
    | RunEnded
)

RECORDS: dict[str, type[Record]] = {record.event: record for record in typing.get_args(Record)}


def to_line(record: Record) -> str:
    """One line of `events.jsonl`, newline included.

    Floats keep six decimals (microseconds), below 1 six significant digits (small weights and losses);
    what is not finite (a loss that diverged) becomes null.
    """
    template, fields = _LINES[type(record)]
    return template % tuple(map(_to_json, fields(record)))


def _line(record: type[Record]) -> tuple[str, Callable[[Record], tuple[Any, ...]]]:
    """The line of a kind of record, with %s for its values, and what gets these: a line is written for
    every update, so its keys are not put together anew each time."""
    names = [field.name for field in dataclasses.fields(record)]
    keys = "".join(f',"{name}":%s' for name in names)
    return f'{{"event":"{record.event}"{keys}}}\n', operator.attrgetter(*names)


_LINES = {record: _line(record) for record in RECORDS.values()}


def _to_json(value: Any) -> str:
    if type(value) is float:
        if not math.isfinite(value):
            return "null"
        return repr(round(value, 6)) if abs(value) >= 1 else repr(float(f"{value:.6g}"))
    return str(value) if type(value) is int else _JSON.encode(value)


LARGEST = 1e300
"""Of the numbers that are not whole; one that is infinite was written as null."""
_LARGEST: Mapping[type, float] = {int: 2**63 - 1, float: LARGEST}
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def from_line(line: str) -> Record | None:
    """The record of one line; None for a record of a newer minor format.

    Raises ValueError for a line that is no record (torn, or not ours).
    """
    try:
        fields = _OBJECT.decode(line)
    except RecursionError as error:
        raise ValueError(f"values are nested too deeply: {error}") from None
    event = fields.pop("event", None)
    if not isinstance(event, str):
        raise ValueError(f"not an event record: {line[:80]!r}")
    if (kind := RECORDS.get(event)) is None:
        return None
    for name, value in fields.items():
        if value is None:
            fields[name] = math.nan
        elif (most := _LARGEST.get(type(value))) is not None and abs(value) > most:
            raise ValueError(f"{name} of a record {event!r}: expected a number of at most {most:g}")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"a record {event!r}: {error}") from error


def read(path: Path) -> Iterator[Record]:
    """All records of `path` in order; a torn last line is left out.

    Raises ValueError, naming the line, where any other line cannot be read, or the format is newer.
    """
    return (record for _, record in read_numbered(path))


def read_numbered(path: Path) -> Iterator[tuple[int, Record]]:
    """As `read`, with the number of each record's line."""
    with files.open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = from_line(line.decode())
                if isinstance(record, RunStarted) and record.format > FORMAT:
                    raise ValueError(f"format {record.format}, but this version reads up to {FORMAT}")
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            if record is not None:
                yield number, record
