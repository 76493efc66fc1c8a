"""Control messages: there and back, and whatever a peer may send instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from agents.device_actions import Crash, Disconnect, Reconnect, SetCpu, SetLink, to_json
from agents.mqtt.topics import AGGREGATOR, ROUTER, Topics
from agents.wire import messages
from agents.wire.messages import LinkFigures, Message, MessageError, decode, encode

NAMES = Topics("r")
PI = "pi-1"
DEEP = b"[" * 60_000
LONG = b"9" * 400
HALF = b"\\ud800"
"""One half of a surrogate pair."""

SAMPLE = messages.UsageSample(
    device=PI,
    at=12.5,
    cpu=3.25,
    periods=40,
    throttled_periods=4,
    throttled=0.5,
    memory=2**31,
    received=10,
    sent=20,
)
KINDS: tuple[type[Any], ...] = get_args(Message)

rates = st.none() | st.integers(1, 10**15)
seconds = st.floats(0, 1e10)
changes = st.fixed_dictionaries(
    {},
    optional={"up": rates, "down": rates, "rtt": seconds, "jitter": seconds, "loss": st.floats(0, 1)},
).filter(bool)
OWN: dict[tuple[type[Any], str], st.SearchStrategy[Any]] = {
    (SetLink, "changes"): changes,
    (messages.LogOrder, "details"): (
        st.builds(SetLink, changes) | st.builds(SetCpu, st.floats(0, 1000))
    ).map(to_json),
}
"""Values of fields whose type allows more than the message does."""


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a declared type, within the limits that are declared with it."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            parts = {
                one.name: OWN[cls, one.name] if (cls, one.name) in OWN else values(one.type)
                for one in fields
            }
            return st.builds(cls, **parts)
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case inspect.LiteralType(values=options):
            return st.sampled_from(options)
        case inspect.IntType(ge=least, le=most):
            return st.integers(least, most)
        case inspect.FloatType(ge=low, le=high):
            return st.floats(low, high)
        case inspect.StrType(pattern=str(pattern)):
            return st.from_regex(pattern)
        case inspect.StrType():
            return st.text(max_size=40)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.CollectionType(item_type=item, min_length=least):
            return st.lists(values(item), min_size=least or 0, max_size=5)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
    raise AssertionError(f"no strategy for {kind}")


def of_kind(kind: type[Any]) -> st.SearchStrategy[Message]:
    found = values(inspect.type_info(kind))
    return found.filter(lambda message: getattr(message, "device", "") not in (AGGREGATOR, ROUTER))


any_message = st.one_of(*map(of_kind, KINDS))


def _topic(message: Message) -> str:
    match message:
        case messages.NetworkStart() | messages.MeasureOrder():
            return NAMES.control(ROUTER)
        case messages.Failure(name):
            return NAMES.failure(name)
        case messages.Status(name):
            return NAMES.status(name)
        case messages.Report(name):
            return NAMES.report(name)
    if isinstance(message, messages.Telemetry):
        return NAMES.telemetry(message.device)
    if isinstance(message, messages.AggregatorOrder):
        return NAMES.control(AGGREGATOR)
    if isinstance(message, messages.Order):
        return NAMES.control(message.device)
    return NAMES.request(message.client)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_messages_are_encoded_and_decoded_unchanged(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(of_kind(kind))
    assert decode(NAMES, _topic(message), encode(message)) == message


@pytest.mark.parametrize("action", [SetLink({"rtt": 0.1}), Disconnect(), Reconnect()])
def test_router_is_sent_orders_for_any_device(action: SetLink | Disconnect | Reconnect) -> None:
    order = messages.DeviceOrder(PI, action)
    assert decode(NAMES, TO_ROUTER, encode(order)) == order


def test_telemetry_has_the_format_that_the_analysis_reads() -> None:
    assert json.loads(encode(SAMPLE)) == {
        "device": PI,
        "at": 12.5,
        "cpu": 3.25,
        "periods": 40,
        "throttled_periods": 4,
        "throttled": 0.5,
        "memory": 2**31,
        "received": 10,
        "sent": 20,
    }
    assert encode(messages.LinkProbe(PI, 1.0, LinkFigures(rtt=0.5))) == (
        b'{"device":"pi-1","at":1.0,"probe":{"rtt":0.5}}'
    )


def test_status_and_request_are_single_words() -> None:
    assert encode(messages.Status(PI, "ready")) == b"ready"
    assert encode(messages.Request(PI, "stop")) == b"stop"


def _log(**changed: Any) -> bytes:
    fields = {"at": 1.0, "device": PI, "source": "hand", "lateness": 0.0, "details": {"action": "crash"}}
    return json.dumps({"do": "log", **fields, **changed}).encode()


def _sample(**changed: Any) -> bytes:
    return json.dumps({"device": PI, "at": 1.0, "cpu": 1.0, "memory": 1, **changed}).encode()


def _limits(**changed: Any) -> bytes:
    limits = {"quota": 1, "period": 1, **changed}
    return json.dumps({"device": PI, "at": 1.0, "limits": limits}).encode()


def _act(device: Any, action: Any, **fields: Any) -> bytes:
    return json.dumps({"device": device, "action": {"action": action, **fields}}).encode()


def _link(**changed: Any) -> bytes:
    return _act(PI, "set", link=changed)


TO_AGGREGATOR, TO_PI, TO_ROUTER = map(NAMES.control, (AGGREGATOR, PI, ROUTER))
OF_PI = NAMES.telemetry(PI)


@pytest.mark.parametrize(
    ("topic", "payload", "complaint"),
    [
        ("", b"ready", "not a topic of run r"),
        ("testbed/r/status", b"ready", "not a topic of run r"),
        ("testbed/other/status/pi-1", b"ready", "not a topic of run r"),
        ("testbed/r/status/pi-1/x", b"ready", "not a topic of run r"),
        ("testbed/r/status/+", b"ready", "not a topic of run r"),
        ("testbed/r/update/pi-1", b"ready", "no control messages are expected on update/"),
        (TO_PI, b"", "not a JSON"),
        (TO_PI, b"\xff\xfe", "not a JSON"),
        (TO_PI, DEEP, "not a JSON"),
        (TO_PI, b'{"do": ' + DEEP, "not a JSON"),
        (TO_PI, b" " * 65_537, "65537 bytes, expected at most 65536"),
        (TO_PI, b"[]", "not a JSON object"),
        (TO_PI, b"null", "not a JSON object"),
        (TO_AGGREGATOR, b"{}", "`do`"),
        (TO_AGGREGATOR, b'{"do": []}', "\\.do`"),
        (TO_AGGREGATOR, b'{"do": "burn"}', "'burn' .*\\.do`"),
        (TO_PI, b'{"do": "start"}', "unknown field `do`"),
        (TO_PI, _act("pi-1", "burn"), "'burn' .*\\.action.action`"),
        (TO_PI, _act("pi-1", []), "\\.action.action`"),
        (TO_PI, _act("pi-1", "set", cpu=0.5), "field `[a-z]+` .*\\.action`"),
        (TO_PI, _act("pi-1", "crash", now=1), "field `[a-z]+` .*\\.action`"),
        (TO_PI, b'{"device": "pi-1", "action": []}', "\\.action`"),
        (TO_PI, b'{"action": {"action": "crash"}}', "missing required field `device`"),
        (TO_PI, _act("pi-2", "crash"), "device: found pi-2, expected pi-1"),
        (TO_PI, _act(3, "crash"), "\\.device`"),
        (TO_ROUTER, _act("+", "disconnect"), "\\.device`"),
        (TO_PI, _link(), "link"),
        (TO_PI, _link(speed=1), "link"),
        (TO_PI, _link(up=0), "link"),
        (TO_PI, _link(up=1e6), "link"),
        (TO_PI, _link(up=True), "link"),
        (TO_PI, _link(rtt=None), "link"),
        (TO_PI, _link(rtt=-1), "link"),
        (TO_PI, _link(loss=1.1), "\\.link.loss`"),
        (TO_PI, _link(rtt="1"), "link"),
        (TO_PI, _link(rtt=float("nan")), "not a JSON"),
        (TO_PI, _link(rtt=float("inf")), "not a JSON"),
        (TO_AGGREGATOR, _log(at=int(LONG)), "\\.at`"),
        (TO_AGGREGATOR, _log().replace(b"1.0", b"9" * 5000), "not a JSON"),
        (TO_AGGREGATOR, _log().replace(b"1.0", b"1e999"), "not a JSON"),
        (TO_AGGREGATOR, _log(at=False), "\\.at`"),
        (TO_AGGREGATOR, _log(source="cron"), "'cron' .*\\.source`"),
        (TO_AGGREGATOR, _log(source=[]), "\\.source`"),
        (TO_AGGREGATOR, _log(details=[]), "\\.details`"),
        (TO_AGGREGATOR, _log(details={"a": []}), "`action`"),
        (TO_AGGREGATOR, _log(details={"action": "burn"}), "'burn'"),
        (TO_AGGREGATOR, _log(details={"action": "crash", "a": 1}), "unknown field `a`"),
        (TO_AGGREGATOR, _log(details={"action": "set", "cpu": int(LONG)}), "\\.cpu`"),
        (
            TO_AGGREGATOR,
            _log(details={"action": "set", "cpu": 1}).replace(b": 1}", b": 1e999}"),
            "not a JSON",
        ),
        (TO_AGGREGATOR, _log(details={"action": "set", "link": {"up": -1}}), "\\.link.up`"),
        (TO_AGGREGATOR, _log(details={"action": "\ud800"}), "not a JSON"),
        (TO_AGGREGATOR, b'{"do": "note", "message": "\\ud800"}', "not a JSON"),
        (TO_AGGREGATOR, b'{"do": "note", "message": 1}', "\\.message`"),
        (TO_AGGREGATOR, b'{"do": "note", "message": "%s"}' % (b"x" * 4097), "4096 .*\\.message`"),
        (OF_PI, _sample(device="pi-2"), "device: found pi-2, expected pi-1"),
        (OF_PI, _sample(at=-1), "\\.at`"),
        (OF_PI, _sample(memory=1.5), "\\.memory`"),
        (OF_PI, _sample(memory=2**63), "\\.memory`"),
        (OF_PI, _sample(gpu=1), "unknown field `gpu`"),
        (OF_PI, b'{"device": "pi-1", "at": 1.0}', "missing required field `cpu`"),
        (OF_PI, b'{"device": "pi-1", "at": 1.0, "probe": []}', "\\.probe`"),
        (OF_PI, b'{"device": "pi-1", "at": 1.0, "probe": {"up": "x"}}', "\\.probe.up`"),
        (OF_PI, b'{"device": "pi-1", "at": 1.0, "limits": 1}', "\\.limits`"),
        (OF_PI, _limits(cpus="0-99999999"), "\\.limits.cpus`"),
        (OF_PI, _limits(swap=-2), ">= -1 .*\\.limits.swap`"),
        (NAMES.failure(PI), b"\xff", "not UTF-8"),
        (NAMES.failure(PI), b"x" * 4097, "4096 .*\\.reason`"),
        (NAMES.status(PI), b"", "'' .*\\.state`"),
        (
            NAMES.status(PI),
            b"READY",
            "'READY' .*\\.state`",
        ),
        (NAMES.request(PI), b"ready", "'ready' .*\\.what`"),
        (NAMES.request(PI), b"report -1", "\\.about`"),
        (NAMES.request(PI), b"9" * 19, "<= 9223372036854775807 .*\\.dispatch`"),
        (NAMES.request(PI), b"9" * 20, "\\.what`"),
        (NAMES.request(PI), b"-1", "'-1' .*\\.what`"),
    ],
)
def test_invalid_messages_are_refused_with_the_reason(
    topic: str, payload: bytes, complaint: str
) -> None:
    with pytest.raises(MessageError, match=complaint) as raised:
        decode(NAMES, topic, payload)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    "message",
    [
        messages.DeviceOrder(PI, SetLink({"rtt": float("nan")})),
        messages.DeviceOrder(PI, SetLink({})),
        messages.DeviceOrder(PI, SetLink({"up": 10**5000})),
        messages.DeviceOrder("a/b", Crash()),
        messages.LogOrder(float("inf"), PI, "hand", 0.0, {"action": "crash"}),
        messages.LogOrder(0.0, PI, "hand", 0.0, {"action": "dance"}),
        messages.UsageSample(device=PI, at=0.0, cpu=0.0, throttled=float("nan"), memory=0),
        messages.UnmaskRequest(PI, 0, [(PI, 1, 1)] * (messages.MAX_SUMMANDS + 1)),
    ],
)
def test_messages_that_peers_would_refuse_are_not_sent(message: Message) -> None:
    with pytest.raises(MessageError):
        encode(message)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m \u202egnp.exe \u2066".encode(), r"\x9b31m \u202egnp.exe \u2066"),
        (b"no\rok\nRun ended: valid", r"no\rok\nRun ended: valid"),
        ("läuft 🙂".encode(), "läuft 🙂"),
        (b"\x1b" * 4096, r"\x1b" * 1024),
    ],
)
def test_control_characters_from_a_device_are_removed(said: bytes, shown: str) -> None:
    assert decode(NAMES, NAMES.failure(PI), said) == messages.Failure(PI, shown)


@given(st.text(st.characters(), max_size=50))
def test_any_text_is_sent_in_printable_form(text: str) -> None:
    assert (
        decode(NAMES, NAMES.failure(PI), encode(failure := messages.Failure(PI, text * 200))) == failure
    )
    assert decode(NAMES, TO_AGGREGATOR, encode(note := messages.NoteOrder(text * 200))) == note


def test_null_field_equals_a_missing_one() -> None:
    assert decode(NAMES, OF_PI, _sample(sent=None)) == decode(NAMES, OF_PI, _sample())


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
topics = any_message.map(_topic) | st.text()


def _decodes_or_is_refused(topic: str, payload: bytes) -> None:
    """A message that is accepted could also be sent."""
    try:
        message = decode(NAMES, topic, payload)
    except MessageError as error:
        assert str(error)  # noqa: PT017
    else:
        assert decode(NAMES, topic, encode(message)) == message


@given(topic=topics, payload=st.binary() | anything.map(lambda value: json.dumps(value).encode()))
def test_any_payload_is_a_message_or_refused(topic: str, payload: bytes) -> None:
    _decodes_or_is_refused(topic, payload)


def _put(value: Any) -> Callable[[Any], list[Any]]:
    """All that comes of putting `value` in place of one part of a JSON value, however deep."""

    def put(into: Any) -> list[Any]:
        inside = into.items() if isinstance(into, dict) else []
        return [value, *({**into, key: new} for key, inner in inside for new in put(inner))]

    return put


@given(message=any_message, value=anything, key=st.text(max_size=5))
def test_message_with_a_changed_value_is_valid_or_refused(
    message: Message, value: Any, key: str
) -> None:
    topic, payload = _topic(message), encode(message)
    if not payload.startswith(b"{"):
        return
    fields = json.loads(payload)
    without = [{k: v for k, v in fields.items() if k != left_out} for left_out in fields]
    for changed in (*_put(value)(fields), {**fields, key: value}, *without):
        _decodes_or_is_refused(topic, json.dumps(changed).encode())


@given(
    message=any_message,
    other=topics,
    place=st.floats(0, 1),
    put=st.binary(max_size=4)
    | st.sampled_from([DEEP, LONG, b"NaN", b"-Infinity", b"1e999", b"\\ud800"]),
    instead=st.integers(0, 8),
)
def test_damaged_message_is_valid_or_refused(
    message: Message, other: str, place: float, put: bytes, instead: int
) -> None:
    topic, payload = _topic(message), encode(message)
    at = int(place * len(payload))
    _decodes_or_is_refused(other, payload)
    _decodes_or_is_refused(topic, payload[:at])
    _decodes_or_is_refused(topic, payload[:at] + put + payload[at + instead :])


def test_first_refusals_per_sender_are_printed_and_all_are_counted() -> None:
    said: list[str] = []
    refusals = messages.Refusals(said.append, max_logged=2)
    assert [refusals.add("a/b", MessageError(f"no {number}")) for number in range(105)][-1] == 105
    refusals.add("a/c", MessageError("nor this"))
    assert refusals.count == 106
    assert said == [
        "refused a message on a/b: no 0",
        "refused a message on a/b: no 1",
        "refused more than 2 messages on a/b",
        "refused 10 messages on a/b",
        "refused 100 messages on a/b",
        "refused a message on a/c: nor this",
    ]
