"""Control messages: all between controller, inits, router, aggregator and clients, except models,
updates, and what a step of the update pipeline exchanges between clients (docs/concepts/wire.md).

`decode` accepts any bytes and returns a message or raises MessageError. It checks the topic, the size
and the JSON. Exactly the expected fields must be present, with the right types, ranges and lengths, and
a message must be about the device of its topic. Control characters in texts are escaped. `encode`
applies the same checks before sending.

On the wire, an order to the aggregator (on `control/`) is a JSON object with the order's name in the
field `do`. Orders to devices, telemetry and reports are JSON objects without `do`. A failure is sent as
its reason in plain text. A status is one word, and so is a simple request. All times are in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from agents import device_actions, features
from agents.checks import convert
from agents.config import Way
from agents.device_actions import SetBackground, SetLink, Switching
from agents.fields import (
    MAX_TEXT_CHARACTERS,
    AggregatorOrderFields,
    Count,
    Cpuset,
    DeviceTime,
    Fields,
    Limit,
    Name,
    Rate,
    Seconds,
    Share,
    Text,
)
from agents.mqtt import topics
from agents.mqtt.topics import Topics
from agents.texts import make_printable

MAX_PAYLOAD_BYTES = 64 * 1024
_MAX_ERROR_CHARACTERS = 250
MAX_SUMMANDS = 500
"""Maximum number of updates in a sum, so that the request for the sum fits into a message."""


class MessageError(Exception):
    """The text describes what is invalid."""


RemoteAction = SetLink | SetBackground | features.Action | Switching
"""By a device's init or the router. The controller sets CPU limits itself."""
State = Literal["joining", "ready", "over", "offline"]
ClientCommand = Literal["stop", "pull", "interrupt"]
Source = Literal["scenario", "hand"] | features.ActionSource
_REPORT = "report "


class StartOrder(AggregatorOrderFields, frozen=True):
    """Order to the aggregator: start the run clock."""


class StopOrder(AggregatorOrderFields, frozen=True):
    """Order to the aggregator: end the run."""


class LogOrder(AggregatorOrderFields, frozen=True):
    """Record an action on a device, as `agents.events.Acted`."""

    at: DeviceTime
    """Device time of the action, in seconds."""
    device: Name
    source: Source
    lateness: DeviceTime
    """Seconds between the time when the action was due and `at`."""
    details: Mapping[str, Any]
    """JSON form (`agents.device_actions`)."""


class NoteOrder(AggregatorOrderFields, frozen=True):
    """Record a note for people who read the run's events, as `agents.events.Note`."""

    message: Text

    def __post_init__(self) -> None:
        force_setattr(self, "message", make_printable(self.message, MAX_TEXT_CHARACTERS, keep="\n"))


class DisruptOrder(AggregatorOrderFields, frozen=True):
    """Record a disruption, as `agents.events.Disrupted`. Times are seconds of the host's monotonic
    clock."""

    at: Seconds
    since: Seconds
    reason: Text

    def __post_init__(self) -> None:
        force_setattr(self, "reason", make_printable(self.reason, MAX_TEXT_CHARACTERS, keep="\n"))


class DeviceOrder(Fields, frozen=True):
    """Order to the init of `device`, or to the router, for which `device` may be a segment."""

    device: Name
    action: RemoteAction


class LimitsRequest(Fields, frozen=True):
    """Have the init of `device` read the limits of its container now, and send LimitsRead."""

    device: Name


class MeasureOrder(Fields, frozen=True):
    """Have the init of a device, or the router, measure the link, or those segments that it shapes,
    before the run clock starts."""

    measure: Sequence[Name]
    """The device, or the segments."""


class QueueUse(Fields, frozen=True):
    """Totals of one queue of a link, over the time during which packets waited in it."""

    busy: Seconds
    """Seconds."""
    left: Count
    """Bytes."""
    allowed: Count
    """Bytes that the link's rate allows in this time."""


class UsageSample(Fields, frozen=True, kw_only=True):
    """Telemetry of a device until `at`, in seconds on the host's monotonic clock. Totals count from the
    start of the container, `ran` and `waited` from that of the client's process; None if this host does
    not count them."""

    device: Name
    at: Seconds
    cpu: Seconds
    periods: Count | None = None
    """Periods of the CPU quota."""
    throttled_periods: Count | None = None
    """Periods in which the device was throttled."""
    throttled: Seconds | None = None
    ran: Seconds | None = None
    """Seconds of the client's main thread, which trains, on a CPU."""
    waited: Seconds | None = None
    """Seconds in which that thread wanted to run but was not on a CPU: throttled, suspended, or in the
    queue of a core."""
    memory: Count
    """Bytes in use at `at`."""
    received: Count | None = None
    """Bytes over the link."""
    sent: Count | None = None
    """Bytes over the link."""
    uplink: QueueUse | None = None
    """None if the rate is not limited."""
    downlink: QueueUse | None = None
    """None if the rate is not limited."""


class LinkFigures(Fields, frozen=True):
    """None if not measured."""

    rtt: Seconds | None = None
    jitter: Seconds | None = None
    loss: Share | None = None
    """Share of round trips that were lost."""
    up: Rate | None = None
    """bit/s."""
    down: Rate | None = None
    """bit/s."""
    round_trips: Count | None = None
    """Round trips that were tried."""


class LinkProbe(Fields, frozen=True):
    """Before the start of the run clock. `at`: seconds on the host's monotonic clock."""

    device: Name
    at: Seconds
    probe: LinkFigures


class SegmentFigures(Fields, frozen=True):
    """One direction, before the start of the run clock, in bit/s."""

    segment: Name
    way: Way
    full: Rate
    """Requested of all senders below the segment together, as far as the segments on their way to the
    server let them."""
    reach: Rate
    """Requested of a single sender."""
    alone: Rate
    """Measured of a single sender."""
    together: Rate
    """Measured of all senders together."""


class NetworkProbe(Fields, frozen=True):
    """By the router `device`. `at`: seconds on the host's monotonic clock."""

    device: Name
    at: Seconds
    segments: Sequence[SegmentFigures]


class SegmentUse(Fields, frozen=True):
    """Bytes on the wire that passed in one direction. Segments above count them, too."""

    segment: Name
    way: Way
    devices: Mapping[Name, Count]
    """Devices below the segment that sent or received any."""
    background: Count = 0
    """Bytes of the background traffic on the segment and on the segments below it."""


class NetworkUse(Fields, frozen=True):
    """In the `seconds` seconds until `at`, on the host's monotonic clock, in virtual time in device
    time. Segments that nothing has passed are left out. `device`: the router."""

    device: Name
    at: Seconds
    seconds: Seconds
    segments: Sequence[SegmentUse]


class NetworkStart(Fields, frozen=True):
    """Have the router or the relay begin the background traffic. `run_time`: device time now, in
    seconds."""

    run_time: Seconds


class CgroupLimits(Fields, frozen=True, kw_only=True):
    """NO_LIMIT if a limit is not set, None if the kernel has no such limit."""

    quota: Limit
    """µs of CPU time per period."""
    period: Limit
    """µs."""
    shares: Limit | None = None
    """Weight of cgroup v1."""
    weight: Limit | None = None
    """Weight of cgroup v2."""
    cpus: Cpuset | None = None
    """Core numbers, such as `0,2-3`."""
    memory: Limit | None = None
    """Bytes."""
    swap: Limit | None = None
    """Bytes beside memory; None if the host has swap that the kernel cannot limit."""


class LimitsRead(Fields, frozen=True):
    """Read by the device's init from the kernel at the start, at each change, and for a LimitsRequest.
    `at`: seconds on the host's monotonic clock."""

    device: Name
    at: Seconds
    limits: CgroupLimits


class Disturbance(Fields, frozen=True):
    """An unplanned event from `since` to `at`, in seconds on the host's monotonic clock.

    `device` noticed it, or is the router. A long one is sent when it is noticed, and again with the same
    `since` when it is over.
    """

    device: Name
    at: Seconds
    since: Seconds
    disturbance: Text
    """Description, such as `the uplink of pi-1 carried nothing though packets waited`."""
    is_over: bool = True
    """The event has ended at `at`."""

    def __post_init__(self) -> None:
        force_setattr(self, "disturbance", make_printable(self.disturbance, MAX_TEXT_CHARACTERS))


class GpuFigures(Fields, frozen=True):
    """A field is None if NVML does not report it."""

    memory: Count | None = None
    """Bytes in use."""
    sm: Share | None = None
    """Share of the time since the previous sample in which a kernel of the client ran."""
    mps: bool = False
    """MPS limits the client."""


class GpuSample(Fields, frozen=True):
    """GPU usage of a device in the time until `at`, in seconds on the host's monotonic clock. The
    controller measures the usage and writes it to the run's telemetry. A GpuSample is never sent as a
    message."""

    device: Name
    at: Seconds
    gpu: GpuFigures


class Failure(Fields, frozen=True):
    """`component`, a device or the router, failed to carry out an order."""

    component: Name
    reason: Text

    def __post_init__(self) -> None:
        force_setattr(self, "reason", make_printable(self.reason, MAX_TEXT_CHARACTERS))


class Status(Fields, frozen=True):
    """`component`: a client, the aggregator or the router."""

    component: Name
    state: State


class Request(Fields, frozen=True):
    """Have `client` send the finished update (`pull`), end the running training now and send its update
    (`interrupt`), or end (`stop`)."""

    client: Name
    what: ClientCommand


class ReportRequest(Fields, frozen=True):
    """Have `client` send all unacknowledged updates again, then a `Report`. `about`: dispatch in
    question; 0 for none. On the wire: `report` and this number, on the topic of requests."""

    client: Name
    about: Count


class UnmaskRequest(Fields, frozen=True):
    """Have `client` send the weighted sum of its shares for `updates`. On the wire: a JSON
    object, on the topic of requests."""

    client: Name
    number: Count
    """Number of the sum."""
    updates: Annotated[Sequence[tuple[Name, Count, Count]], Meta(min_length=1, max_length=MAX_SUMMANDS)]


class Acknowledgement(Fields, frozen=True):
    """The aggregator has stored the update that answers `dispatch`, and will not lose it. On the wire: a
    decimal number, on the topic of requests."""

    client: Name
    dispatch: Count


class Report(Fields, frozen=True):
    """Answer to a ReportRequest."""

    client: Name
    dispatch: Count
    """Dispatch that the client's next update will answer; 0 if it waits for a model."""
    about: Count
    """Dispatch that the request asked about; 0 for none."""


AggregatorOrder = StartOrder | StopOrder | LogOrder | NoteOrder | features.AggregatorOrder | DisruptOrder
Order = AggregatorOrder | DeviceOrder | features.InitOrder | LimitsRequest | MeasureOrder | NetworkStart
AddressedOrder = tuple[str, Order]
"""Component (as in `Topics.control`), and order."""
Telemetry = (
    UsageSample | LinkProbe | LimitsRead | Disturbance | features.Telemetry | NetworkProbe | NetworkUse
)
Measurement = Telemetry | GpuSample
"""A line of the telemetry of a run."""
"""Messages that devices and the router send to the controller."""
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


class _ToAggregator(Fields, frozen=True):
    """msgspec caches its decoders for structs but not for unions."""

    order: AggregatorOrder


T = TypeVar("T")
D = TypeVar("D", bound=DeviceOrder | features.InitOrder | LimitsRequest | Telemetry)

_TELEMETRY: dict[str, type[Telemetry]] = {
    "probe": LinkProbe,
    "limits": LimitsRead,
    "disturbance": Disturbance,
    "seconds": NetworkUse,
    "segments": NetworkProbe,
    **features.TELEMETRY,
}
"""The key is a field that no other kind has. A message with none of them is a UsageSample."""


def encode(message: Message | Measurement) -> bytes:
    """Raises MessageError for a message that `decode` would refuse."""
    fields: dict[str, Any] = msgspec.to_builtins(message, enc_hook=float)
    _build(type(message), fields)
    match message:
        case Failure(_, word) | Status(_, word) | Request(_, word):
            payload = word.encode()
        case Acknowledgement(_, dispatch):
            payload = str(dispatch).encode()
        case ReportRequest(_, about):
            payload = f"{_REPORT}{about}".encode()
        case Report() | UnmaskRequest():
            del fields["client"]  # it is part of the topic
            payload = msgspec.json.encode(fields)
        case _:
            payload = msgspec.json.encode(fields)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(f"message has {len(payload)} bytes, expected at most {MAX_PAYLOAD_BYTES}")
    return payload


def decode(names: Topics, topic: str, payload: bytes | bytearray) -> Message:
    """`names`: topics of the run. Raises MessageError."""
    try:
        kind, name = names.kind_and_name(topic)
    except ValueError as error:
        raise MessageError(str(error)) from error
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(f"message has {len(payload)} bytes, expected at most {MAX_PAYLOAD_BYTES}")
    match kind:
        case "control":
            return _order(name, _json(payload))
        case "telemetry":
            fields = _json(payload)
            found = (kind for field, kind in _TELEMETRY.items() if field in fields)
            return _of_device(name, next(found, UsageSample), fields)
        case "failure":
            return _build(Failure, {"component": name, "reason": _text(payload)})
        case "status":
            return _build(Status, {"component": name, "state": _text(payload)})
        case "request":
            return _request(name, _text(payload))
        case "report":
            return _build(Report, {**_json(payload), "client": name})
    raise MessageError(f"no control messages are expected on {kind}/")


def of_telemetry(cls: type[T], fields: Mapping[str, Any]) -> T:
    """`fields`: of a telemetry line. Raises MessageError."""
    return _build(cls, fields)


def _request(client: str, text: str) -> Message:
    about = text.removeprefix(_REPORT)
    number = int(about) if about.isdecimal() and len(about) < 20 else about
    if about != text:
        return _build(ReportRequest, {"client": client, "about": number})
    if isinstance(number, int):
        return _build(Acknowledgement, {"client": client, "dispatch": number})
    if text.startswith("{"):
        return _build(UnmaskRequest, {**_json(text), "client": client})
    return _build(Request, {"client": client, "what": text})


def _order(name: str, fields: dict[str, Any]) -> Order:
    if name == topics.AGGREGATOR:
        return _build(_ToAggregator, {"order": fields}).order
    if name == topics.ROUTER and fields.keys() == {"run_time"}:
        return _build(NetworkStart, fields)
    if fields.keys() == {"measure"}:
        return _build(MeasureOrder, fields)
    if name == topics.ROUTER:
        return _of_device(None, DeviceOrder, fields)
    if fields.keys() == {"device"}:
        return _of_device(name, LimitsRequest, fields)
    for field_name, kind in features.INIT_ORDERS.items():
        if field_name in fields:
            return _of_device(name, kind, fields)
    return _of_device(name, DeviceOrder, fields)


def _of_device(name: str | None, cls: type[D], fields: dict[str, Any]) -> D:
    """About any device if `name` is None. Raises MessageError."""
    message = _build(cls, fields)
    if name not in (None, message.device):
        raise MessageError(f"device: found {message.device}, expected {name} as in the topic")
    return message


def _text(payload: bytes | bytearray) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise MessageError(f"not UTF-8: {error}") from error


def _json(payload: bytes | bytearray | str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not a JSON object: {error}") from error


def _build(cls: type[T], fields: Any) -> T:
    """Raises MessageError."""
    try:
        message = convert(fields, cls)
        match message:
            case LogOrder(details=details) | _ToAggregator(LogOrder(details=details)):
                device_actions.parse(details)
            case DeviceOrder(_, SetLink(changes)):
                device_actions.parse(fields["action"])
                if not changes or None in map(changes.get, changes.keys() - {"up", "down"}):
                    raise ValueError("action.link: expected at least one change; only rates may be null")
    except ValueError as error:
        raise MessageError(make_printable(str(error), _MAX_ERROR_CHARACTERS)) from error
    return message


@dataclass(slots=True)
class Refusals:
    """By topic; each sender has its own. The first `max_logged` are logged, then the 100th, the 1000th
    and so on, so that a peer cannot fill the log."""

    log: Callable[[str], object]
    max_logged: int = 20
    counts: Counter[str] = field(default_factory=Counter, init=False)

    @property
    def count(self) -> int:
        return self.counts.total()

    def add(self, topic: str, error: MessageError) -> int:
        """Return the number of refused messages on this topic so far."""
        self.counts[topic] += 1
        count = self.counts[topic]
        if count <= self.max_logged:
            self.log(f"refused a message on {topic:.200}: {error}")
        elif count == self.max_logged + 1:
            self.log(f"refused more than {self.max_logged} messages on {topic:.200}")
        elif f"{count}".rstrip("0") == "1":
            self.log(f"refused {count} messages on {topic:.200}")
        return count
