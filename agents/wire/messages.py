"""Control messages: what controller, inits, router, aggregator and clients send each other beside models
and updates (docs/concepts/wire.md).

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

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from agents import device_actions
from agents.device_actions import SetLink, Switching
from agents.mqtt import topics
from agents.mqtt.topics import Topics
from agents.texts import visible

MAX_PAYLOAD_BYTES = 64 * 1024
MAX_TEXT_CHARACTERS = 4096
_MAX_ERROR_CHARACTERS = 250
_MAX_SECONDS = 1e10
_MAX_COUNT = 2**63 - 1
NO_LIMIT = -1
"""Quota, memory or swap of a control group without that limit."""
MAX_SUMMANDS = 500
"""Updates of one secure sum: names of 64 characters and all, a request for it fits into a message."""


class MessageError(Exception):
    """A payload that is not a valid message for its topic; the text describes the error."""


RemoteAction = SetLink | Switching
"""What is not the controller's own to do: CPU limits are."""
State = Literal["joining", "ready", "over", "offline"]
ClientCommand = Literal["stop", "pull", "interrupt"]
Source = Literal["scenario", "hand"]
_REPORT = "report "

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
Name = Annotated[str, Meta(pattern=rf"\A{topics.NAME}\Z")]
Seconds = Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
DeviceTime = Annotated[float, Meta(ge=-_MAX_SECONDS, le=_MAX_SECONDS)]
"""May be below 0 by a little, where the host's clock is set."""
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
Count = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
Cpuset = Annotated[
    str,
    Meta(
        max_length=MAX_TEXT_CHARACTERS,
        pattern=r"\A(([0-9]{1,5}(-[0-9]{1,5})?)(,[0-9]{1,5}(-[0-9]{1,5})?)*)?\Z",
    ),
]
"""Numbers of cores, as in `0,2-3`."""
Limit = Annotated[int, Meta(ge=NO_LIMIT, le=_MAX_COUNT)]


class _Fields(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A JSON object; a field that is None is left out, or null."""


class _AggregatorOrder(_Fields, frozen=True, tag_field="do", tag=str.lower):
    """An order that says by its name what is to be done."""


class Start(_AggregatorOrder, frozen=True):
    """To the aggregator: the run clock is to start."""


class Stop(_AggregatorOrder, frozen=True):
    """To the aggregator: the run is to end."""


class Log(_AggregatorOrder, frozen=True):
    """To the aggregator: write down what was done to a device, as `agents.events.Acted`."""

    at: DeviceTime
    device: Name
    source: Source
    lateness: DeviceTime
    details: Mapping[str, Any]
    """The action's JSON form."""


class Note(_AggregatorOrder, frozen=True):
    """To the aggregator: write down something that a reader of the run should know."""

    message: Text

    def __post_init__(self) -> None:
        force_setattr(self, "message", visible(self.message, MAX_TEXT_CHARACTERS, keep="\n"))


class Disrupt(_AggregatorOrder, frozen=True):
    """To the aggregator: write down, as `agents.events.Disrupted`, what disturbed the run from `since`
    to `at`, on the host's monotonic clock."""

    at: Seconds
    since: Seconds
    reason: Text

    def __post_init__(self) -> None:
        force_setattr(self, "reason", visible(self.reason, MAX_TEXT_CHARACTERS, keep="\n"))


class DeviceOrder(_Fields, frozen=True):
    """To the init of `device`, or to the router, whichever can do it: do `action` to the device."""

    device: Name
    action: RemoteAction


class LimitsRequest(_Fields, frozen=True):
    """To the init of `device`: read the limits of its container now, and send LimitsRead."""

    device: Name


class QueueUse(_Fields, frozen=True):
    """Totals of the queue of one direction of a link, over the time in which packets waited in it."""

    busy: Seconds
    """Time in which packets waited."""
    left: Count
    """Bytes that left it then."""
    allowed: Count
    """Bytes that the link's rate allows in that time."""


class Sample(_Fields, frozen=True, kw_only=True):
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


class LinkFigures(_Fields, frozen=True):
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


class Probe(_Fields, frozen=True):
    """A device's link as it was measured before the start, at `at` on the host's monotonic clock."""

    device: Name
    at: Seconds
    probe: LinkFigures


class Limits(_Fields, frozen=True, kw_only=True):
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


class LimitsRead(_Fields, frozen=True):
    """The limits of a device's container as its init read them from the kernel at `at`, on the host's
    monotonic clock. Sent at the start, at each change, and upon LimitsRequest."""

    device: Name
    at: Seconds
    limits: Limits


class Disturbance(_Fields, frozen=True):
    """Something that nobody ordered disturbed the run from `since` to `at`, on the host's monotonic
    clock; `device` is the device that noticed it, or the router. One that lasts is sent again when it is
    over, with the same `since`."""

    device: Name
    at: Seconds
    since: Seconds
    disturbance: Text
    """Reason, such as `the uplink of pi-1 carried nothing though packets waited`."""

    def __post_init__(self) -> None:
        force_setattr(self, "disturbance", visible(self.disturbance, MAX_TEXT_CHARACTERS))


class GpuFigures(_Fields, frozen=True):
    """What a device's client uses of its GPU; what NVML does not tell is None."""

    memory: Count | None = None
    """Bytes."""
    sm: Share | None = None
    """Share of the time, since the sample before, in which a kernel of it ran."""
    mps: bool = False
    """Whether MPS holds it within its limits."""


class GpuSample(_Fields, frozen=True):
    """What the controller has read of a device's GPU until `at`, on the host's monotonic clock. A line
    of the run's telemetry, and no message: no device sends one."""

    device: Name
    at: Seconds
    gpu: GpuFigures


class Failure(_Fields, frozen=True):
    """`component`, a device or the router, could not do an order."""

    component: Name
    reason: Text

    def __post_init__(self) -> None:
        force_setattr(self, "reason", visible(self.reason, MAX_TEXT_CHARACTERS))


class Status(_Fields, frozen=True):
    """Where `component`, a client, the aggregator or the router, stands."""

    component: Name
    state: State


class Request(_Fields, frozen=True):
    """The aggregator requests of `client` to send what it has and go on (`pull`), to cut its training
    short (`interrupt`), or to end (`stop`)."""

    client: Name
    what: ClientCommand


class ReportRequest(_Fields, frozen=True):
    """The aggregator requests of `client` to send once more what is not acknowledged, and then a
    `Report` `about` a dispatch, 0 for none. On the topic of requests, `report` and the number."""

    client: Name
    about: Count


class UnmaskRequest(_Fields, frozen=True):
    """The aggregator requests of `client` the weighted sum of its shares of the masks of `updates`: for
    each, client, dispatch and weight. On the topic of requests, a JSON object."""

    client: Name
    number: Count
    updates: Annotated[Sequence[tuple[Name, Count, Count]], Meta(min_length=1, max_length=MAX_SUMMANDS)]


class Acknowledgement(_Fields, frozen=True):
    """The aggregator has the update of `client` that answers `dispatch`, and will not lose it. On the
    topic of requests, a decimal number."""

    client: Name
    dispatch: Count


class Report(_Fields, frozen=True):
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


class _ToAggregator(_Fields, frozen=True):
    """What is checked in one go: msgspec remembers structs, but no unions."""

    order: AggregatorOrder


T = TypeVar("T")
D = TypeVar("D", bound=DeviceOrder | LimitsRequest | Telemetry)


def encode(message: Message | GpuSample) -> bytes:
    """The payload of `message`. Raises MessageError for one that no peer would take."""
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
            del fields["client"]  # the topic says it
            payload = msgspec.json.encode(fields)
        case _:
            payload = msgspec.json.encode(fields)
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
    match kind:
        case "control":
            return _order(name, _json(payload))
        case "telemetry":
            fields = _json(payload)
            kinds: dict[str, type[Telemetry]] = {
                "probe": Probe, "limits": LimitsRead, "disturbance": Disturbance,
            }  # fmt: skip
            found = (kinds[field] for field in kinds if field in fields)
            return _of_device(name, next(found, Sample), fields)
        case "failure":
            return _build(Failure, {"component": name, "reason": _text(payload)})
        case "status":
            return _build(Status, {"component": name, "state": _text(payload)})
        case "request":
            return _request(name, _text(payload))
        case "report":
            return _build(Report, {**_json(payload), "client": name})
    raise MessageError(f"{kind}/ carries no control messages")


def limits(fields: Any) -> Limits:
    """Limits from plain values, as in a line of telemetry. Raises MessageError."""
    return _build(Limits, fields)


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
    alone = fields.keys() == {"device"} and name != topics.ROUTER
    kind: type[DeviceOrder | LimitsRequest] = LimitsRequest if alone else DeviceOrder
    return _of_device(None if name == topics.ROUTER else name, kind, fields)


def _of_device(name: str | None, cls: type[D], fields: dict[str, Any]) -> D:
    """A message about the device `name`; None: about any."""
    message = _build(cls, fields)
    if name not in (None, message.device):
        raise MessageError(f"device: the topic is that of {name}, the message that of {message.device}")
    return message


def _text(payload: bytes | bytearray) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise MessageError(f"no UTF-8: {error}") from error


def _json(payload: bytes | bytearray | str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise MessageError(f"no JSON object: {error}") from error


def _build(cls: type[T], fields: Any) -> T:
    """Raises MessageError."""
    try:
        message = msgspec.convert(fields, cls)
        match message:
            case Log(details=details) | _ToAggregator(Log(details=details)):
                device_actions.parsed(details)
            case DeviceOrder(_, SetLink(changes)):
                device_actions.parsed(fields["action"])
                if not changes or None in map(changes.get, changes.keys() - {"up", "down"}):
                    raise ValueError("action.link: expected some changes, with numbers but for rates")
    except ValueError as error:
        raise MessageError(visible(str(error), _MAX_ERROR_CHARACTERS)) from error
    return message


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
