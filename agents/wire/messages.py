"""Control messages: what controller, inits, router, aggregator and clients send each other beside models
and updates (docs/wire.md).

`decode` takes whatever a peer may have sent, and gives a message or a MessageError: it checks the topic,
the size, the JSON, that all fields are there and no others, types, ranges, lengths, and that the device
of a message is that of its topic. Texts come out without what would act on a screen. `encode` holds what
we send against the same rules.

Orders to the aggregator (on `control/`) are a JSON object with the order's name as `do`; orders to
devices, telemetry and reports are one without; a failure is its reason, a status and a request are one
word.
Times are in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from agents.device_actions import SetLink, Switching, from_json, to_json
from agents.mqtt import topics
from agents.mqtt.topics import Topics, is_name
from agents.texts import shown, visible

MAX_PAYLOAD_BYTES = 64 * 1024
MAX_TEXT_CHARACTERS = 4096
_MAX_ENTRIES, _MAX_DEPTH = 32, 3
"""Of the maps of an action's details."""
_MAX_NUMBER = 1e18
"""Of an action's details."""
_MAX_SECONDS = 1e10
_MAX_BITS_PER_SECOND = 10**15
_MAX_COUNT = 2**63 - 1
_CPUSET = re.compile(r"((\d{1,5}(-\d{1,5})?)(,\d{1,5}(-\d{1,5})?)*)?", re.ASCII)
NO_LIMIT = -1
"""Quota, memory or swap of a control group without that limit."""
MAX_SUMMANDS = 500
"""Updates of one secure sum: names of 64 characters and all, a request for it fits into a message."""


class MessageError(Exception):
    """A payload that is not a valid message for its topic; the text describes the error."""


T = TypeVar("T")
_Reader = Callable[[Any], Any]
"""Returns what it is given, or the same as the field's own type. Raises MessageError."""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MessageError(f"expected a text, found {shown(value)}")
    if len(value) > MAX_TEXT_CHARACTERS:
        raise MessageError(f"a text of {len(value)} characters, at most {MAX_TEXT_CHARACTERS} are read")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise MessageError("a text with half of a surrogate pair, which no file can hold")
    return visible(value, MAX_TEXT_CHARACTERS, keep="\n")


def _line(value: Any) -> str:
    return visible(_text(value), MAX_TEXT_CHARACTERS)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not is_name(value):
        raise MessageError(f"expected a name, found {shown(value)}")
    return value


def _number(least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        # Compared before it is converted: an integer of 400 digits is no float.
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise MessageError(f"expected a number from {least:g} to {most:g}, found {shown(value)}")
        return float(value)

    return read


def _integer(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise MessageError(f"expected an integer from {least} to {most}, found {shown(value)}")
        return value

    return read


def _one_of(literal: Any) -> Callable[[Any], str]:
    words = typing.get_args(literal)

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise MessageError(f"expected one of {', '.join(words)}, found {shown(value)}")
        return value

    return read


def _cpuset(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS or not _CPUSET.fullmatch(value):
        raise MessageError(f"expected numbers of cores, as in 0,2-3, found {shown(value)}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise MessageError(f"expected true or false, found {shown(value)}")
    return value


_at_least_0 = _number(0.0, _MAX_SECONDS)
_rate = _integer(1, _MAX_BITS_PER_SECOND)
_CHANGES: dict[str, _Reader] = {
    "up": lambda value: None if value is None else _rate(value),
    "down": lambda value: None if value is None else _rate(value),
    "rtt": _at_least_0,
    "jitter": _at_least_0,
    "loss": _number(0.0, 1.0),
}


def _changes(value: Any) -> dict[str, float | None]:
    if not isinstance(value, dict) or not value or not value.keys() <= _CHANGES.keys():
        raise MessageError(f"expected a map with some of {', '.join(_CHANGES)}, found {shown(value)}")
    return {name: _CHANGES[name](change) for name, change in value.items()}


def _action(value: Any) -> RemoteAction:
    action = from_json(value) if isinstance(value, dict) else None
    if not isinstance(action, RemoteAction) or value.keys() != to_json(action).keys():
        raise MessageError(f"no action on a device: {shown(value)}")
    return SetLink(_changes(action.changes)) if isinstance(action, SetLink) else action


def _summands(value: Any) -> tuple[tuple[str, int, int], ...]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_SUMMANDS:
        raise MessageError(f"expected up to {MAX_SUMMANDS} updates, found {shown(value)}")
    if not all(isinstance(one, list | tuple) and len(one) == 3 for one in value):
        raise MessageError("expected client, dispatch and weight of each update")
    count = _integer(0, _MAX_COUNT)
    return tuple((_name(client), count(number), count(weight)) for client, number, weight in value)


def _details(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MessageError(f"expected a map, found {shown(value)}")
    details: dict[str, Any] = _detail(value, _MAX_DEPTH)
    return details


def _detail(value: Any, depth: int) -> Any:
    match value:
        case None | bool():
            return value
        case str():
            return _text(value)
        case int() | float():
            if not -_MAX_NUMBER <= value <= _MAX_NUMBER:
                raise MessageError(f"{shown(value)} is no number that an action has")
            return value
        case dict() if depth:
            if len(value) > _MAX_ENTRIES:
                raise MessageError(f"a map with {len(value)} entries, at most {_MAX_ENTRIES} are read")
            return {_text(key): _detail(inner, depth - 1) for key, inner in value.items()}
    raise MessageError(f"no action has {shown(value)} among its details, or not that deep")


RemoteAction = SetLink | Switching
"""What is not the controller's own to do: CPU limits are."""
State = Literal["joining", "ready", "over", "offline"]
ClientCommand = Literal["stop", "pull", "interrupt"]
Source = Literal["scenario", "hand"]
_REPORT = "report "

Text = Annotated[str, _text]
Line = Annotated[str, _line]
"""A device's: of more than one line, it could pass for output of ours."""
Name = Annotated[str, _name]
Seconds = Annotated[float, _at_least_0]
DeviceTime = Annotated[float, _number(-_MAX_SECONDS, _MAX_SECONDS)]
"""May be below 0 by a little, where the host's clock is set."""
Share = Annotated[float, _number(0.0, 1.0)]
Rate = Annotated[float, _number(0.0, _MAX_BITS_PER_SECOND)]
Count = Annotated[int, _integer(0, _MAX_COUNT)]
Flag = Annotated[bool, _flag]
Cpuset = Annotated[str, _cpuset]
Limit = Annotated[int, _integer(NO_LIMIT, _MAX_COUNT)]


@dataclass(frozen=True, slots=True)
class Start:
    """To the aggregator: the run clock is to start."""

    do: ClassVar[str] = "start"


@dataclass(frozen=True, slots=True)
class Stop:
    """To the aggregator: the run is to end."""

    do: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True)
class Log:
    """To the aggregator: write down what was done to a device, as `agents.events.Acted`."""

    do: ClassVar[str] = "log"
    at: DeviceTime
    device: Name
    source: Annotated[Source, _one_of(Source)]
    lateness: DeviceTime
    details: Annotated[Mapping[str, Any], _details]


@dataclass(frozen=True, slots=True)
class Note:
    """To the aggregator: write down something that a reader of the run should know."""

    do: ClassVar[str] = "note"
    message: Text


@dataclass(frozen=True, slots=True)
class Disrupt:
    """To the aggregator: write down, as `agents.events.Disrupted`, what disturbed the run from `since`
    to `at`, on the host's monotonic clock."""

    do: ClassVar[str] = "disrupt"
    at: Seconds
    since: Seconds
    reason: Text


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """To the init of `device`, or to the router, whichever can do it: do `action` to the device."""

    device: Name
    action: Annotated[RemoteAction, _action]


@dataclass(frozen=True, slots=True)
class LimitsRequest:
    """To the init of `device`: read the limits of its container now, and send LimitsRead."""

    device: Name


@dataclass(frozen=True, slots=True)
class QueueUse:
    """Totals of the queue of one direction of a link, over the time in which packets waited in it."""

    busy: Seconds
    """Time in which packets waited."""
    left: Count
    """Bytes that left it then."""
    allowed: Count
    """Bytes that the link's rate allows in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A device's telemetry: what it used until `at`, on the host's monotonic clock."""

    device: Name
    at: Seconds
    cpu: Seconds
    """CPU time."""
    periods: Count | None = None
    """Of the CPU quota."""
    throttled_periods: Count | None = None
    throttled: Seconds | None = None
    ran: Seconds | None = None
    """For how long the client's main thread, which trains, was on a CPU."""
    waited: Seconds | None = None
    """For how long that thread wanted to run but was not on a CPU: throttled, suspended, or behind
    others in the queue of a core."""
    memory: Count
    """Bytes."""
    received: Count | None = None
    """Bytes, as `sent`."""
    sent: Count | None = None
    uplink: QueueUse | None = None
    """None: its rate is not limited."""
    downlink: QueueUse | None = None


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What a link was measured to be; what was not measured is None."""

    rtt: Seconds | None = None
    jitter: Seconds | None = None
    loss: Share | None = None
    """Of round trips."""
    up: Rate | None = None
    """bit/s."""
    down: Rate | None = None
    round_trips: Count | None = None
    """How many were tried."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A device's link as it was measured before the start, at `at` on the host's monotonic clock."""

    device: Name
    at: Seconds
    probe: LinkFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a control group; NO_LIMIT: without. A field is None if the kernel has no such limit."""

    quota: Limit
    """µs of CPU time per period."""
    period: Limit
    """µs."""
    shares: Limit | None = None
    """CPU weight of cgroup v1."""
    weight: Limit | None = None
    """CPU weight of cgroup v2."""
    cpus: Cpuset | None = None
    """Cores, as in `0,2-3`."""
    memory: Limit | None = None
    """Bytes."""
    swap: Limit | None = None
    """Bytes beside those of memory; None if the host has swap that the kernel cannot limit."""


@dataclass(frozen=True, slots=True)
class LimitsRead:
    """The limits of a device's container as its init read them from the kernel at `at`, on the host's
    monotonic clock. Sent at the start, at each change, and upon LimitsRequest."""

    device: Name
    at: Seconds
    limits: Limits


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Something that nobody ordered disturbed the run from `since` to `at`, on the host's monotonic
    clock; `device` is the device that noticed it, or the router. One that lasts is sent again when it is
    over, with the same `since`."""

    device: Name
    at: Seconds
    since: Seconds
    disturbance: Line
    """Reason, such as `the uplink of pi-1 carried nothing though packets waited`."""


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """What a device's client uses of its GPU; what NVML does not tell is None."""

    memory: Count | None = None
    """Bytes."""
    sm: Share | None = None
    """Share of the time, since the sample before, in which a kernel of it ran."""
    mps: Flag = False
    """Whether MPS holds it within its limits."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What the controller has read of a device's GPU until `at`, on the host's monotonic clock. A line
    of the run's telemetry, and no message: no device sends one."""

    device: Name
    at: Seconds
    gpu: GpuFigures


@dataclass(frozen=True, slots=True)
class Failure:
    """`component`, a device or the router, could not do an order."""

    component: Name
    reason: Line


@dataclass(frozen=True, slots=True)
class Status:
    """Where `component`, a client, the aggregator or the router, stands."""

    component: Name
    state: Annotated[State, _one_of(State)]


@dataclass(frozen=True, slots=True)
class Request:
    """The aggregator requests of `client` to send what it has and go on (`pull`), to cut its training
    short (`interrupt`), or to end (`stop`)."""

    client: Name
    what: Annotated[ClientCommand, _one_of(ClientCommand)]


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """The aggregator requests of `client` to send once more what is not acknowledged, and then a
    `Report` `about` a dispatch, 0 for none. On the topic of requests, `report` and the number."""

    client: Name
    about: Count


@dataclass(frozen=True, slots=True)
class UnmaskRequest:
    """The aggregator requests of `client` the weighted sum of its shares of the masks of `updates`: for
    each, client, dispatch and weight. On the topic of requests, a JSON object."""

    client: Name
    number: Count
    updates: Annotated[Sequence[tuple[str, int, int]], _summands]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The aggregator has the update of `client` that answers `dispatch`, and will not lose it. On the
    topic of requests, a decimal number."""

    client: Name
    dispatch: Count


@dataclass(frozen=True, slots=True)
class Report:
    """The next update of `client` will answer `dispatch`; 0: it waits for a model. It was asked
    `about` another one."""

    client: Name
    dispatch: Count
    about: Count


AggregatorOrder = Start | Stop | Log | Note | Disrupt
Order = AggregatorOrder | DeviceOrder | LimitsRequest
AddressedOrder = tuple[str, Order]
"""To which component of the run, as in `Topics.control`, and what."""
Telemetry = Sample | Probe | LimitsRead | Disturbance
"""Messages of devices and routers to the controller."""
Message = (
    Order
    | Telemetry
    | Failure
    | Status
    | Request
    | ReportRequest
    | UnmaskRequest
    | Acknowledgement
    | Report
)
D = TypeVar("D", bound=DeviceOrder | LimitsRequest | Telemetry)

_AGGREGATOR_ORDERS: dict[str, type[AggregatorOrder]] = {
    order.do: order for order in typing.get_args(AggregatorOrder)
}


def clipped(text: str) -> str:
    """`text` as a message can carry it."""
    return text[:MAX_TEXT_CHARACTERS].encode(errors="replace").decode()


def encode(message: Message | GpuSample) -> bytes:
    """The payload of `message`. Raises MessageError for one that no peer would take."""
    fields = _plain(message)
    _build(type(message), fields)
    match message:
        case Failure(_, word) | Status(_, word) | Request(_, word):
            payload = word.encode()
        case Acknowledgement(_, dispatch):
            payload = str(dispatch).encode()
        case ReportRequest(_, about):
            payload = f"{_REPORT}{about}".encode()
        case Report() | UnmaskRequest():
            del fields["client"]  # the topic says it
            payload = json.dumps(fields).encode()
        case DeviceOrder() | LimitsRequest() | GpuSample():
            payload = json.dumps(fields).encode()
        case Sample() | Probe() | LimitsRead() | Disturbance():
            payload = json.dumps(fields).encode()
        case _:
            payload = json.dumps({"do": message.do, **fields}).encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(f"a message of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    return payload


def decode(names: Topics, topic: str, payload: bytes | bytearray) -> Message:
    """The message that came as `payload` on `topic`, of the run of `names`. Raises MessageError."""
    try:
        kind, name = names.kind_and_name(topic)
    except ValueError as error:
        raise MessageError(str(error)) from error
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(f"a message of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    try:
        text = payload.decode()
    except UnicodeDecodeError as error:
        raise MessageError(f"no UTF-8: {error}") from error
    match kind:
        case "control":
            return _order(name, _json(text))
        case "telemetry":
            fields = _json(text)
            kinds: dict[str, type[Telemetry]] = {
                "probe": Probe, "limits": LimitsRead, "disturbance": Disturbance,
            }  # fmt: skip
            found = (kinds[field] for field in kinds if field in fields)
            return _of_device(name, next(found, Sample), fields)
        case "failure":
            return _build(Failure, {"component": name, "reason": text})
        case "status":
            return _build(Status, {"component": name, "state": text})
        case "request" if text.isdecimal() and len(text) < 20:
            return _build(Acknowledgement, {"client": name, "dispatch": int(text)})
        case "request" if (about := text.removeprefix(_REPORT)) != text:
            if not (about.isdecimal() and len(about) < 20):
                raise MessageError(f"about: expected a whole number, found {shown(about)}")
            return _build(ReportRequest, {"client": name, "about": int(about)})
        case "request" if text.startswith("{"):
            return _build(UnmaskRequest, {**_json(text), "client": name})
        case "request":
            return _build(Request, {"client": name, "what": text})
        case "report":
            return _build(Report, {**_json(text), "client": name})
    raise MessageError(f"{kind}/ carries no control messages")


def limits(fields: Any) -> Limits:
    """Limits from plain values, as in a line of telemetry. Raises MessageError."""
    return _build(Limits, fields)


def _order(name: str, fields: dict[str, Any]) -> Order:
    if name != topics.AGGREGATOR:
        alone = fields.keys() == {"device"} and name != topics.ROUTER
        kind: type[DeviceOrder | LimitsRequest] = LimitsRequest if alone else DeviceOrder
        return _of_device(None if name == topics.ROUTER else name, kind, fields)
    order = fields.pop("do", None)
    if not isinstance(order, str) or order not in _AGGREGATOR_ORDERS:
        raise MessageError(f"{name} knows no order {shown(order)}")
    return _build(_AGGREGATOR_ORDERS[order], fields)


def _of_device(name: str | None, cls: type[D], fields: dict[str, Any]) -> D:
    """A message about the device `name`; None: about any."""
    message = _build(cls, fields)
    if name not in (None, message.device):
        raise MessageError(f"device: the topic is that of {name}, the message that of {message.device}")
    return message


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise MessageError(f"expected a JSON object, found {shown(found)}")
    return found


def _no_number(text: str) -> NoReturn:
    raise MessageError(f"{text} is no number of JSON")


def _plain(message: Any) -> dict[str, Any]:
    """The fields that are given, dataclasses and maps as dicts."""
    found = {}
    for one in dataclasses.fields(message):
        value = getattr(message, one.name)
        if isinstance(value, RemoteAction):
            value = to_json(value)
        elif dataclasses.is_dataclass(value):
            value = _plain(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        if value is not None:
            found[one.name] = value
    return found


def _build(cls: type[T], fields: Any) -> T:
    """Raises MessageError."""
    if not isinstance(fields, dict):
        raise MessageError(f"expected a JSON object, found {shown(fields)}")
    readers, required = _FIELDS[cls]
    if missing := required - fields.keys():
        raise MessageError(f"without {', '.join(sorted(missing))}")
    values = {}
    for name, value in fields.items():
        if name not in readers:
            raise MessageError(f"unknown field {shown(name)}")
        try:
            values[name] = readers[name](value)
        except MessageError as error:
            raise MessageError(f"{name}: {error}") from error
    return cls(**values)


def _fields_of(cls: type[Any]) -> tuple[dict[str, _Reader], frozenset[str]]:
    """What reads each field of `cls`, and which must be there."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    readers = {one.name: _reader(hints[one.name]) for one in fields}
    return readers, frozenset(one.name for one in fields if one.default is dataclasses.MISSING)


def _reader(hint: Any) -> _Reader:
    """Of a dataclass, of an annotated type, or of one that may be None as well: None is left out, not
    written."""
    for option in (hint, *typing.get_args(hint)):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return partial(_build, option)
        if typing.get_origin(option) is Annotated:
            reader: _Reader = option.__metadata__[0]
            return reader
    raise TypeError(f"{hint} has no reader")


_FIELDS = {
    cls: _fields_of(cls)
    for cls in (*typing.get_args(Message), LinkFigures, Limits, QueueUse, GpuSample, GpuFigures)
}


@dataclass(slots=True)
class Refusals:
    """Counts refused messages by topic, and so by sender; of each it logs the first few, and then every
    tenfold number, so that a peer cannot fill the log."""

    log: Callable[[str], object]
    max_logged: int = 20
    counts: Counter[str] = field(default_factory=Counter, init=False)

    @property
    def count(self) -> int:
        return self.counts.total()

    def add(self, topic: str, error: MessageError) -> int:
        """Count a message on `topic` that was refused because of `error`; return how many there were."""
        self.counts[topic] += 1
        count = self.counts[topic]
        if count <= self.max_logged:
            self.log(f"refused a message on {topic:.200}: {error}")
        elif count == self.max_logged + 1:
            self.log(f"refused more than {self.max_logged} messages on {topic:.200}")
        elif f"{count}".rstrip("0") == "1":
            self.log(f"refused {count} messages on {topic:.200}")
        return count
