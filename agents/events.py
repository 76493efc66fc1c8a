"""Records of `events.jsonl`: the events of a run, with their times.

Each line is a JSON object. `"event"` is the name of the record; the other keys are the record's fields.
Times are in seconds of device time since the start of the run clock unless a field says otherwise.
Readers skip unknown fields and records. They ignore an incomplete last line, which may be left by a
crash.
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

from agents import features
from agents.checks import convert
from agents.device_actions import Action, from_json
from agents.disk import files

FORMAT = 1
"""Version of the run directory's format. Readers refuse a newer version."""

_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run clock starts. Every client of `clients` is ready, and its CPU limit is in force."""

    event: ClassVar[str] = "run_started"
    at: float
    wall_clock: float
    """Unix time of the start, in seconds."""
    clients: tuple[str, ...]
    missing: tuple[str, ...]
    """Clients that are absent: they were not ready in time (quorum), or join later (scenario)."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """A client reported its state, or the broker published the client's last will (`offline`)."""

    event: ClassVar[str] = "status"
    at: float
    client: str
    state: str
    """`joining`, `ready` or `offline`."""


@dataclass(slots=True, kw_only=True)  # a frozen object takes 1 µs longer to make
class UpdateApplied:
    """One update was applied to the global model."""

    event: ClassVar[str] = "update"
    client: str
    sequence: int
    kind: str
    base_version: int
    applied_version: int
    """First version that contains the update."""
    staleness: int
    """Number of versions that were made after the base version and before the version with the update:
    applied_version − 1 − base_version."""
    weight: float
    """Factor by which the rule multiplied the update."""
    samples: int
    """Number of the client's training samples."""
    steps: int
    """Number of local steps done."""
    loss: float
    """Mean local training loss over the steps."""
    bytes: int
    """Payload size of the update on the wire, in bytes."""
    dispatched: float
    """Time at which the aggregator took the global model that was sent to the client."""
    downloaded: float
    """Time at which the client had received the whole model."""
    train_start: float
    train_end: float
    sent: float
    """Time at which the client began the upload, after its thinking time."""
    arrived: float
    """Time at which the aggregator had received the whole update, which is the end of the upload."""
    applied: float
    """Time at which the update was applied."""
    dispatch: int = 0
    """Number of the dispatch that the update answers, counted over the run. `client` and `dispatch`
    together identify the update. 0 in older runs, which did not record the number."""
    bytes_before: float = math.nan
    """Payload size in bytes that the update would have in float32; NaN in older runs, which did not
    record the size."""
    masking: float = 0.0
    """Seconds that the client took to make a mask and its shares, before `train_start` (secure
    aggregation)."""
    outside: int = 0
    """Number of coordinates that were clipped to the range of secure aggregation."""

    @property
    def at(self) -> float:
        """Time of the record, equal to `applied`. This property is not stored; other records have a
        field `at`."""
        return self.applied


@dataclass(frozen=True, slots=True)
class UpdateRejected:
    """An update was rejected; the run continues."""

    event: ClassVar[str] = "rejected"
    at: float
    client: str
    reason: str
    dispatch: int = 0
    """Number of the dispatch that the update claims to answer; 0 if the update names no dispatch, and in
    older runs."""


@dataclass(frozen=True, slots=True)
class UpdateClipped:
    """The norm of an update exceeded the bound on norms. The update was scaled down to the bound before
    it was passed to the rule."""

    event: ClassVar[str] = "clipped"
    at: float
    client: str
    norm: float
    """ℓ2 norm before clipping."""


@dataclass(frozen=True, slots=True)
class RoundUnfinished:
    """A model was sent to a client, but no update that answers it was applied. The record is written as
    soon as no answer can arrive any more: the client left or restarted, the update was rejected, or the
    run ended."""

    event: ClassVar[str] = "unfinished"
    at: float
    client: str
    base_version: int
    dispatched: float
    """Time at which the aggregator took the global model that was sent. If several models were
    unanswered, the time for the first of these models."""
    until: float
    """Time at which the rejected update arrived. If no update was rejected, `until` is equal to `at`:
    from this time on, no update was expected."""
    dispatch: int = 0
    """Number of the newest dispatch that this record covers; 0 in older runs. The record covers the
    updates of the client that answer this dispatch or an earlier one and that have no record of their
    own. None of these updates was applied."""


@dataclass(frozen=True, slots=True)
class ClientsDrawn:
    """A rule drew clients. Recorded only if the topology says who is chosen. Names are separated by
    spaces."""

    event: ClassVar[str] = "draw"
    at: float
    draw: int
    """Number of the draw; a draw with no eligible client repeats the number before."""
    wanted: int
    """Number of clients that the rule wanted."""
    eligible: int
    """Number of eligible clients."""
    chosen: str
    """Names of the chosen clients, in the order of the choice."""
    added: str
    """Names of clients that are eligible now, and were not at the draw that was recorded before."""
    removed: str
    """Names of clients that were eligible at the draw that was recorded before, and are not now."""


@dataclass(frozen=True, slots=True)
class VersionMade:
    """A new version of the global model was made."""

    event: ClassVar[str] = "version"
    at: float
    version: int
    updates: int
    """Number of updates in this version."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Evaluation of the global model on the test set."""

    event: ClassVar[str] = "evaluation"
    at: float
    """Time at which the model was taken, not the end of the evaluation."""
    version: int
    """Version of the model."""
    loss: float
    """Mean loss on the test set."""
    accuracy: float
    """Share of correct predictions, from 0 to 1; NaN if the task has no accuracy."""


@dataclass(frozen=True, slots=True)
class EvaluatedPart:
    """Evaluation of the global model on a part of the data: one class, or one device. The record
    `evaluation` of the same version follows."""

    event: ClassVar[str] = "evaluation_part"
    at: float
    """Time at which the model was taken."""
    version: int
    part: str
    """`class`: the test set's samples of one class. `device`: training samples of one device."""
    name: str
    """Number of the class, or name of the device."""
    samples: int
    """Number of samples in the part."""
    loss: float
    """Mean loss on the part."""
    accuracy: float
    """Share of correct predictions on the part, from 0 to 1; NaN if the task has no accuracy."""


@dataclass(frozen=True, slots=True)
class Acted:
    """The emulator acted on a device."""

    event: ClassVar[str] = "action"
    at: float
    """Time at which the action was done. If another process carries out the action, the time at which
    the order was sent. This is the case for links, and in containers for everything except CPU
    shares."""
    device: str
    source: str
    """Origin of the action. `scenario`: the topology's scenario, churn, availability or heat. `hand`: a
    user during the run. `aggregator`: the aggregator ended a client that flooded it. Otherwise
    a feature of the device, which had no power (`poweroff`), or had it again (`poweron`)."""
    lateness: float
    """Seconds between the time when the action was due and `at`."""
    details: Mapping[str, Any]
    """The action's JSON form, as `agents.device_actions.to_json` returns it."""

    @property
    def action(self) -> Action | None:
        """The action; None if this version of the testbed does not know the action. This property is not
        stored."""
        return from_json(self.details)


@dataclass(frozen=True, slots=True)
class Disrupted:
    """The testbed itself, not the experiment, hindered the run from `since` to `at`. A long disruption
    is recorded when it is noticed, and again with the same `since` when it is over."""

    event: ClassVar[str] = "disrupted"
    at: float
    since: float
    reason: str
    """Reason as a clause, such as `nothing arrived`."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note for people who read the run's events, such as a start with a quorum or a client that
    left."""

    event: ClassVar[str] = "note"
    at: float
    message: str


@dataclass(frozen=True, slots=True)
class WrongSum:
    """The sum of masked updates (secure aggregation) was outside of its bounds and was discarded. At
    least one of the updates or answers was wrong, but it cannot be determined which."""

    event: ClassVar[str] = "wrong_sum"
    at: float
    updates: tuple[str, ...]
    """Clients whose updates were in the sum."""
    answers: tuple[str, ...]
    """Clients whose answers (sums of mask shares) were used to unmask the sum."""

    @property
    def senders(self) -> str:
        """Text for people that names the clients in `updates` and `answers`. This property is not
        stored."""
        return f"updates of {', '.join(self.updates)}; answers of {', '.join(self.answers)}"


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run ended."""

    event: ClassVar[str] = "run_ended"
    at: float
    reason: str
    """`after`, `updates`, `target_accuracy`, `diverged`, `interrupted` or `no clients left`."""
    version: int
    """Last version of the model."""
    updates: int
    """Number of updates that were applied in the run."""


_REASONS = {
    "after": "time is up",
    "updates": "updates made",
    "target_accuracy": "target reached",
    "diverged": "training diverged",
}
COMPLETE = tuple(_REASONS)
"""Reasons of `RunEnded` after which a run is complete: the conditions in a topology's `stop`, and
`diverged`, which ends a run without `stop: {after: ...}` that would never end."""


def end_reason(reason: str) -> str:
    """Return the reason for a run's end as text for people, such as `time is up` for `after`. Other
    reasons are readable already and are returned unchanged."""
    return _REASONS.get(reason, reason)


Record = (
    RunStarted
    | ClientStatus
    | UpdateApplied
    | UpdateRejected
    | UpdateClipped
    | RoundUnfinished
    | ClientsDrawn
    | VersionMade
    | Evaluated
    | EvaluatedPart
    | Acted
    | features.Record
    | Disrupted
    | Note
    | WrongSum
    | RunEnded
)

RECORDS: dict[str, type[Record]] = {record.event: record for record in typing.get_args(Record)}


def to_line(record: Record) -> str:
    """Return the line of `events.jsonl`, with newline.

    Floats have six decimals (microseconds). Floats below 1, such as small weights and losses, have six
    significant digits. A number that is not finite, such as a diverged loss, becomes null.
    """
    template, fields = _LINES[type(record)]
    return template % tuple(map(_to_json, fields(record)))


def _line(record: type[Record]) -> tuple[str, Callable[[Record], tuple[Any, ...]]]:
    """Return the template of a record's line, with %s for its values, and a function that returns the
    values. Template and function are made once per class, because a line is written for every update."""
    names = [field.name for field in dataclasses.fields(record)]
    keys = "".join(f',"{name}":%s' for name in names)
    return f'{{"event":"{record.event}"{keys}}}\n', operator.attrgetter(*names)


_LINES = {record: _line(record) for record in RECORDS.values()}


def _to_json(value: Any) -> str:
    if type(value) is float:
        if not math.isfinite(value):
            return "null"
        return repr(round(value, 6)) if abs(value) >= 1 else repr(float(f"{value:.6g}"))
    if value is None:
        return "null"
    return str(value) if type(value) is int else _JSON.encode(value)


LARGEST = 1e300
"""Largest magnitude of a float that `from_line` accepts. `to_line` writes an infinite number as null."""
_LARGEST: Mapping[type, float] = {int: 2**63 - 1, float: LARGEST}
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def from_line(line: str) -> Record | None:
    """Return the record of one line; None if this version does not know this kind of record.

    Raises ValueError if the line is not a valid record, for instance if the line is incomplete.
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
            raise ValueError(f"record {event!r}: {name} is too large, expected at most {most:g}")
    try:
        return convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"record {event!r}: {error}") from error


def read(path: Path) -> Iterator[Record]:
    """Return all records of `path` in order; an incomplete last line is ignored.

    Raises ValueError with the line's number if another line cannot be read, or if the format is newer
    than `FORMAT`.
    """
    return (record for _, record in read_numbered(path))


def read_numbered(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield all records as `read` does, each with its line number in the file."""
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
