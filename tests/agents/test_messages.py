"""Control messages: there and back, and whatever a peer may send instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.device_actions import (
    Charge,
    Crash,
    Disconnect,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetBattery,
    SetCpu,
    SetLink,
    Switching,
    Unplug,
    to_json,
)
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
LIMITS = messages.CgroupLimits(
    quota=messages.NO_LIMIT, period=10_000, weight=39, cpus="0,2-3", memory=2**29, swap=0
)
EXAMPLES: list[tuple[str, Message]] = [
    (NAMES.control(AGGREGATOR), messages.StartOrder()),
    (NAMES.control(AGGREGATOR), messages.StopOrder()),
    (
        NAMES.control(AGGREGATOR),
        messages.LogOrder(
            1.5, PI, "scenario", -1e-9, {"action": "set", "link": {"up": 10**6, "rtt": None}}
        ),
    ),
    (NAMES.control(AGGREGATOR), messages.NoteOrder("läuft 🙂\n")),
    (
        NAMES.control(PI),
        messages.DeviceOrder(PI, SetLink({"up": None, "down": 8, "rtt": 0.1, "jitter": 0, "loss": 1})),
    ),
    (NAMES.control(ROUTER), messages.DeviceOrder(PI, SetLink({"rtt": 0.1}))),
    (NAMES.control(PI), messages.DeviceOrder(PI, Disconnect())),
    (NAMES.control(ROUTER), messages.DeviceOrder(PI, Disconnect())),
    (NAMES.control(PI), messages.DeviceOrder(PI, Reconnect())),
    (NAMES.control(ROUTER), messages.DeviceOrder(PI, Reconnect())),
    (NAMES.control(PI), messages.DeviceOrder(PI, Crash())),
    (NAMES.control(PI), messages.DeviceOrder(PI, Restart())),
    (NAMES.control(PI), messages.DeviceOrder(PI, Pause())),
    (NAMES.control(PI), messages.DeviceOrder(PI, Resume())),
    (NAMES.control(PI), messages.DeviceOrder(PI, Leave())),
    (NAMES.control(PI), messages.DeviceOrder(PI, Join())),
    (NAMES.control(PI), messages.DeviceOrder(PI, SetBattery(0.2))),
    (NAMES.control(PI), messages.DeviceOrder(PI, Charge(7.5))),
    (NAMES.control(AGGREGATOR), messages.EnergyOrder(9.5, PI, 17, 0.125, "sent")),
    (
        NAMES.telemetry(PI),
        messages.EnergySample(
            PI, 9.5, messages.EnergyFigures(consumed=4.5, transferred=0.5, power=2.0, level=0.75)
        ),
    ),
    (
        NAMES.control(PI),
        messages.EnergyStart(
            PI, -9.5, 12.0, messages.EnergyFigures(consumed=4.5, transferred=0.5, power=0.0, is_on=False)
        ),
    ),
    (NAMES.telemetry(PI), messages.PowerSwitch(PI, 9.5, powered=False, level=0.0)),
    (NAMES.telemetry(PI), SAMPLE),
    (NAMES.telemetry(PI), messages.UsageSample(device=PI, at=0.0, cpu=0.0, memory=0)),
    (NAMES.telemetry(PI), messages.LinkProbe(PI, 1.0, LinkFigures(0.1, 0.01, 0.0, 1e6, 2e6))),
    (NAMES.telemetry(PI), messages.LinkProbe(PI, 1.0, LinkFigures())),
    (NAMES.control(ROUTER), messages.NetworkStart(2.5)),
    (
        NAMES.telemetry(ROUTER),
        messages.NetworkProbe(
            ROUTER, 1.0, [messages.SegmentFigures("cell", "up", 2e6, 1e6, 1.01e6, 1.99e6)]
        ),
    ),
    (
        NAMES.telemetry(ROUTER),
        messages.NetworkUse(ROUTER, 2.0, 1.0, [messages.SegmentUse("cell", "down", {PI: 1514}, 3028)]),
    ),
    (NAMES.telemetry(PI), messages.LimitsRead(PI, 1.0, LIMITS)),
    (NAMES.telemetry(PI), messages.Disturbance(PI, 9.5, 4.0, "the client of pi-1 was stopped")),
    (NAMES.telemetry(ROUTER), messages.Disturbance(ROUTER, 9.5, 4.0, "the router stood still")),
    (NAMES.control(AGGREGATOR), messages.DisruptOrder(9.5, 4.0, "the router stood still")),
    (NAMES.control(PI), messages.LimitsRequest(PI)),
    (NAMES.control(PI), messages.MeasureOrder([PI])),
    (NAMES.failure(PI), messages.Failure(PI, "`tc` said: ü")),
    (NAMES.status(PI), messages.Status(PI, "joining")),
    (NAMES.status(AGGREGATOR), messages.Status(AGGREGATOR, "offline")),
    (NAMES.request(PI), messages.Request(PI, "interrupt")),
    (NAMES.request(PI), messages.Acknowledgement(PI, 17)),
    (NAMES.request(PI), messages.ReportRequest(PI, 17)),
    (NAMES.request(PI), messages.UnmaskRequest(PI, 3, [("pi-2", 17, 64), (PI, 18, 1)])),
    (NAMES.report(PI), messages.Report(PI, 16, 17)),
]

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True)
texts = st.text(
    st.characters(exclude_categories=["C", "Z"]), max_size=messages.MAX_TEXT_CHARACTERS // 100
)
seconds = st.floats(0, 1e10)
times = st.floats(-1e10, 1e10)
ways = st.sampled_from(["up", "down"])
measured_rates = st.floats(0, 1e15)
counts = st.integers(0, 2**63 - 1)
rates = st.none() | st.integers(1, 10**15)
changes = st.fixed_dictionaries(
    {},
    optional={"up": rates, "down": rates, "rtt": seconds, "jitter": seconds, "loss": st.floats(0, 1)},
).filter(bool)
maybe_count, maybe_seconds = st.none() | counts, st.none() | seconds
figures = st.builds(
    LinkFigures,
    rtt=maybe_seconds,
    jitter=maybe_seconds,
    loss=st.none() | st.floats(0, 1),
    up=st.none() | st.floats(0, 1e15),
    down=st.none() | st.floats(0, 1e15),
)
limit = st.integers(-1, 2**63 - 1)
limits = st.builds(
    messages.CgroupLimits,
    quota=limit,
    period=counts,
    shares=maybe_count,
    weight=maybe_count,
    cpus=st.none() | st.sampled_from(["", "0", "0,2-3"]),
    memory=st.none() | limit,
    swap=st.none() | limit,
)
joules = st.floats(0, 1e12)
queue_uses = st.builds(messages.QueueUse, seconds, counts, counts)
BUILT: dict[type[Any], st.SearchStrategy[Any]] = {
    messages.StartOrder: st.builds(messages.StartOrder),
    messages.StopOrder: st.builds(messages.StopOrder),
    messages.LogOrder: st.builds(
        messages.LogOrder,
        at=times,
        device=names,
        source=st.sampled_from(get_args(messages.Source)),
        lateness=times,
        details=(st.builds(SetLink, changes) | st.builds(SetCpu, st.floats(0, 1000))).map(to_json),
    ),
    messages.NoteOrder: st.builds(messages.NoteOrder, texts),
    messages.EnergyOrder: st.builds(
        messages.EnergyOrder,
        times,
        names,
        counts,
        joules,
        st.sampled_from(["sent", "lost"]),
    ),
    messages.EnergySample: st.builds(
        messages.EnergySample,
        names,
        seconds,
        st.builds(
            messages.EnergyFigures,
            consumed=joules,
            transferred=joules,
            power=joules,
            is_on=st.booleans(),
            level=st.none() | st.floats(0, 1),
            supplied=st.none() | joules,
            charging=st.none() | joules,
        ),
    ),
    messages.EnergyStart: st.builds(
        messages.EnergyStart,
        names,
        times,
        seconds,
        st.none() | st.builds(messages.EnergyFigures, consumed=joules, transferred=joules, power=joules),
    ),
    messages.PowerSwitch: st.builds(
        messages.PowerSwitch, names, seconds, st.booleans(), st.floats(0, 1)
    ),
    messages.ReportRequest: st.builds(messages.ReportRequest, names, counts),
    messages.Report: st.builds(messages.Report, names, counts, counts),
    messages.DeviceOrder: st.builds(
        messages.DeviceOrder,
        names,
        st.builds(SetLink, changes)
        | st.builds(SetBattery, st.floats(0, 1))
        | st.builds(Charge, st.none() | st.floats(0, 1e9))
        | st.just(Unplug())
        | st.sampled_from([action() for action in get_args(Switching)]),
    ),
    messages.UsageSample: st.builds(
        messages.UsageSample,
        device=names,
        at=seconds,
        cpu=seconds,
        periods=maybe_count,
        throttled_periods=maybe_count,
        throttled=maybe_seconds,
        memory=counts,
        received=maybe_count,
        sent=maybe_count,
        uplink=st.none() | queue_uses,
        downlink=st.none() | queue_uses,
    ),
    messages.LinkProbe: st.builds(messages.LinkProbe, names, seconds, figures),
    messages.NetworkStart: st.builds(messages.NetworkStart, seconds),
    messages.NetworkProbe: st.builds(
        messages.NetworkProbe,
        names,
        seconds,
        st.lists(st.builds(messages.SegmentFigures, names, ways, *4 * [measured_rates]), max_size=3),
    ),
    messages.NetworkUse: st.builds(
        messages.NetworkUse,
        names,
        seconds,
        seconds,
        st.lists(
            st.builds(
                messages.SegmentUse, names, ways, st.dictionaries(names, counts, max_size=3), counts
            ),
            max_size=3,
        ),
    ),
    messages.LimitsRequest: st.builds(messages.LimitsRequest, names),
    messages.MeasureOrder: st.builds(messages.MeasureOrder, st.lists(names, max_size=3)),
    messages.LimitsRead: st.builds(messages.LimitsRead, names, seconds, limits),
    messages.Disturbance: st.builds(messages.Disturbance, names, seconds, seconds, texts),
    messages.DisruptOrder: st.builds(messages.DisruptOrder, seconds, seconds, texts),
    messages.Failure: st.builds(messages.Failure, names, texts),
    messages.Status: st.builds(messages.Status, names, st.sampled_from(get_args(messages.State))),
    messages.Request: st.builds(
        messages.Request, names, st.sampled_from(get_args(messages.ClientCommand))
    ),
    messages.Acknowledgement: st.builds(messages.Acknowledgement, names, counts),
    messages.UnmaskRequest: st.builds(
        messages.UnmaskRequest,
        names,
        counts,
        st.lists(st.tuples(names, counts, counts), min_size=1, max_size=5),
    ),
}


def _topic(message: Message) -> str:
    match message:
        case messages.UsageSample(device=name) | messages.LinkProbe(name) | messages.LimitsRead(name):
            return NAMES.telemetry(name)
        case messages.Disturbance(name) | messages.EnergySample(name) | messages.PowerSwitch(name):
            return NAMES.telemetry(name)
        case messages.NetworkProbe(name) | messages.NetworkUse(name):
            return NAMES.telemetry(name)
        case messages.NetworkStart() | messages.MeasureOrder():
            return NAMES.control(ROUTER)
        case messages.Failure(name):
            return NAMES.failure(name)
        case messages.Status(name):
            return NAMES.status(name)
        case (
            messages.Request(name)
            | messages.ReportRequest(name)
            | messages.Acknowledgement(name)
            | messages.UnmaskRequest(name)
        ):
            return NAMES.request(name)
        case messages.Report(name):
            return NAMES.report(name)
        case _ if isinstance(message, messages.AggregatorOrder):
            return NAMES.control(AGGREGATOR)
        case _:
            return NAMES.control(message.device)


def test_every_message_kind_has_an_example() -> None:
    kinds = set(get_args(Message))
    assert {type(message) for _, message in EXAMPLES} == kinds
    assert BUILT.keys() == kinds


@pytest.mark.parametrize(("topic", "message"), EXAMPLES)
def test_messages_are_encoded_and_decoded_unchanged(topic: str, message: Message) -> None:
    assert decode(NAMES, topic, encode(message)) == message


@given(st.one_of(*BUILT.values()).filter(lambda m: getattr(m, "device", "") not in (AGGREGATOR, ROUTER)))
def test_generated_messages_are_encoded_and_decoded_unchanged(message: Message) -> None:
    assert decode(NAMES, _topic(message), encode(message)) == message


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
topics = st.sampled_from([topic for topic, _ in EXAMPLES]) | st.text()


def _decodes_or_is_refused(topic: str, payload: bytes) -> None:
    """A message that is accepted could also be sent."""
    try:
        message = decode(NAMES, topic, payload)
    except MessageError as error:
        assert str(error)  # noqa: PT017
    else:
        assert decode(NAMES, topic, encode(message)) == message


@given(topic=topics, payload=st.binary())
def test_any_bytes_are_a_message_or_refused(topic: str, payload: bytes) -> None:
    _decodes_or_is_refused(topic, payload)


@given(topic=topics, value=anything)
def test_any_json_is_a_message_or_refused(topic: str, value: Any) -> None:
    _decodes_or_is_refused(topic, json.dumps(value).encode())


def _put(value: Any) -> Callable[[Any], list[Any]]:
    """All that comes of putting `value` in place of one part of a JSON value, however deep."""

    def put(into: Any) -> list[Any]:
        inside = into.items() if isinstance(into, dict) else []
        return [value, *({**into, key: new} for key, inner in inside for new in put(inner))]

    return put


@given(example=st.sampled_from(EXAMPLES), value=anything, key=st.text(max_size=5))
def test_message_with_a_changed_value_is_valid_or_refused(
    example: tuple[str, Message], value: Any, key: str
) -> None:
    topic, message = example
    payload = encode(message)
    if not payload.startswith(b"{"):
        return
    fields = json.loads(payload)
    without = [{k: v for k, v in fields.items() if k != left_out} for left_out in fields]
    for changed in (*_put(value)(fields), {**fields, key: value}, *without):
        _decodes_or_is_refused(topic, json.dumps(changed).encode())


@given(
    example=st.sampled_from(EXAMPLES),
    other=topics,
    place=st.floats(0, 1),
    put=st.binary(max_size=4)
    | st.sampled_from([DEEP, LONG, b"NaN", b"-Infinity", b"1e999", b"\\ud800"]),
    instead=st.integers(0, 8),
)
def test_damaged_message_is_valid_or_refused(
    example: tuple[str, Message], other: str, place: float, put: bytes, instead: int
) -> None:
    topic, message = example
    payload = encode(message)
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
