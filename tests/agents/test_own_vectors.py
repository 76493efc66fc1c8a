"""A rule's own vectors: on the wire, checked by the aggregator, sent with models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from agents import events
from agents.aggregator import actions as act
from agents.aggregator import inputs
from agents.aggregator.messages import PendingMessages
from agents.checks import DeclarationError
from agents.models.vectors import Buffers, add_scaled
from agents.mqtt import chunks
from agents.mqtt.topics import Topics
from agents.pipeline.compression import METHODS, Compressor
from agents.rules.client_half import ClientSide
from agents.rules.interface import (
    Actions,
    Broadcast,
    Ignored,
    Rule,
    Send,
    Server,
    State,
    Update,
)
from agents.timing.nanoseconds import from_seconds
from agents.wire import payloads
from agents.wire.payloads import Encoded, ModelMessage, WireError
from tests.agents.helpers import COMPRESSED, Core, done, joined, make_core, message, of, records, split

W = np.array([1.5, -2.0, 0.1], np.float32)
CONTROL = np.array([3.0, 4.0], np.float32)
BUFFERS = Buffers(np.array([0.5], np.float32), np.array([7]))
MODEL = ModelMessage(run="run", version=3, dispatch=17, schema="abc", vector=W)
UPDATE = message("nano-1", 17, base_version=3, vector=W)
PACKED = Compressor(METHODS["int8"]()).apply(CONTROL, 0, 0)


# On the wire


def test_vectors_are_encoded_and_decoded_in_order() -> None:
    vectors = {"control": CONTROL, "one": np.ones(1, np.float32)}
    model = payloads.decode_model(
        payloads.encode(dataclasses.replace(MODEL, vectors=vectors, buffers=BUFFERS))
    )
    assert {name: v.tolist() for name, v in model.vectors.items()} == {"control": [3, 4], "one": [1]}
    assert model.vector.tolist() == W.tolist()
    assert model.buffers.equals(BUFFERS)
    payload = payloads.encode(dataclasses.replace(UPDATE, vectors=vectors, buffers=BUFFERS))
    names = {"w", "vector/control", "vector/one", "floats", "integers"}
    assert safetensors.numpy.load(payload).keys() == names
    update = payloads.decode_update(payload)
    assert [*update.vectors] == ["control", "one"]
    assert update.vector.tolist() == W.tolist()
    assert payloads.encode(update) == payload


@pytest.mark.parametrize("is_encoded", [False, True])
def test_encoded_vectors_keep_their_fields_apart_from_those_of_the_update(is_encoded: bool) -> None:
    sent = dataclasses.replace(UPDATE, vectors={"control": PACKED, "one": CONTROL})
    if is_encoded:
        own = METHODS["fp16"]().compress(W).encoded
        sent = dataclasses.replace(sent, encoded=own, vector=np.zeros(0, np.float32))
    payload = payloads.encode(sent)
    found = payloads.decode_update(payload)
    control = found.vectors["control"]
    assert isinstance(control, Encoded)
    assert control.fields == PACKED.fields
    assert {n: a.tolist() for n, a in control.arrays.items()} == {
        n: a.tolist() for n, a in PACKED.arrays.items()
    }
    assert not isinstance(found.vectors["one"], Encoded)
    assert (found.encoded is not None) == is_encoded
    assert payloads.encode(found) == payload


def test_plain_size_counts_vectors_as_float32() -> None:
    plain = dataclasses.replace(UPDATE, vectors={"control": CONTROL})
    packed = dataclasses.replace(UPDATE, vectors={"control": PACKED})
    assert payloads.plain_size(packed, 3, {"control": 2}) == len(payloads.encode(plain))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("w"),
        lambda header: header["vector/control"].update(shape=[3]),
        lambda header: header["vector/control"].update(dtype="F64"),
        lambda header: header["vector/control"].update(dtype="I8"),
        lambda header: header["vector/control"].update(data_offsets=[0, 8]),
        lambda header: header["vector/control"].update(data_offsets="x"),
        lambda header: header.update({"vector/more": {}}),
        lambda header: header.update({"other": header.pop("vector/control")}),
    ],
)
def test_invalid_headers_of_vectors_are_refused(change: Any) -> None:
    for one, decode in ((MODEL, payloads.decode_model), (UPDATE, payloads.decode_update)):
        header, data = split(payloads.encode(dataclasses.replace(one, vectors={"control": CONTROL})))
        change(header)
        with pytest.raises(WireError):
            decode(joined(header, data))


def test_vector_both_whole_and_encoded_is_refused() -> None:
    sent = dataclasses.replace(UPDATE, vectors={"control": CONTROL, "control/w": CONTROL})
    with pytest.raises(WireError, match="vector control: expected float32 numbers, or an encoded"):
        payloads.decode_update(payloads.encode(sent))


def test_thousands_of_vectors_are_read_in_linear_time() -> None:
    """A header of 64 KiB has room for about 800."""
    many = {f"v{k}": np.zeros(1, np.float32) for k in range(700)}
    found = payloads.decode_update(payloads.encode(dataclasses.replace(UPDATE, vectors=many)))
    assert len(found.vectors) == 700


# From the rule to the client


def test_dispatches_with_the_same_vectors_share_their_body() -> None:
    """And one with other vectors still shares the copy of the model."""
    server = Server(np.zeros(chunks.CHUNK_BYTES, np.float32), {}, np.random.default_rng(0))
    pending = PendingMessages(Topics("run"), "abcd", "schema", server)
    same = {"control": np.ones(chunks.CHUNK_BYTES, np.float32)}
    other = {"control": np.zeros(chunks.CHUNK_BYTES, np.float32)}
    for number, (client, vectors) in enumerate(zip("abcd", (same, same, other, {}), strict=True), 1):
        pending.add_model(act.Dispatch(client, 0, number, vectors=vectors))
    chunked: list[Any] = [[*sent] for _, sent in pending.waiting]
    first, second, third, fourth = chunked
    assert all(one is two for one, two in zip(first[1:], second[1:], strict=True))
    assert len(first) == len(third) == 2 * len(fourth) == 8
    assert np.shares_memory(np.asarray(first[1].share), np.asarray(third[1].share))
    server.w += 1
    pending.add_model(act.Dispatch("a", 1, 5, vectors=same))
    later: Any = pending.waiting[-1][1]
    assert not np.shares_memory(np.asarray(first[0].share), np.asarray(later[0].share))


@dataclass(frozen=True)
class Adding(Rule):
    """Adds each update at once; sends the sum of all `control`, which it changes in place."""

    declared: ClientSide = field(
        default_factory=lambda: ClientSide(
            model_vectors={"control": 2},
            update_vectors={"control": 2},
            compressed=["control"],
            memory={"control": 2},
        )
    )
    deferred: bool = False
    keeps_bases = True

    @property
    def client_side(self) -> ClientSide:
        return self.declared

    def begin(self, server: Server) -> AddingState:
        return AddingState(self, server)


class AddingState(State):
    def __init__(self, params: Adding, server: Server) -> None:
        self.params, self.server = params, server
        self.control = np.zeros(2, np.float32)
        self.bases: list[list[float]] = []

    def start(self) -> Actions:
        return [self.send(client) for client in self.server.clients]

    def join(self, client: str) -> Actions:
        return [self.send(client)]

    def send(self, client: str) -> Send:
        return Send(client, deferred=self.params.deferred, vectors={"control": self.control})

    def update(self, update: Update) -> Actions:
        assert update.base is not None
        self.bases.append(update.base.tolist())
        if update.vectors["control"][0] < 0:
            return [Ignored("negative"), self.send(update.client)]
        add_scaled(self.server.w, update.vector, 1.0)
        add_scaled(self.control, update.vectors["control"], 1.0)
        return [self.server.aggregated([update.contribution(1.0)]), self.send(update.client)]


def begun(rule: Rule | None = None) -> tuple[Core, list[act.Dispatch]]:
    """A run of a and b, with two parameters; its first dispatches."""
    core, _ = make_core(
        rule or Adding(), None, np.zeros(2, np.float32), keeps_models=True, steps=[COMPRESSED]
    )
    for client in "ab":
        core.status(client, "ready", 0.0)
    sent = [*core.start(wall_clock=1e9, epoch=100.0), *core.end_of_instant(0.0)]
    return core, of(act.Dispatch, sent)


def answer(core: Core, dispatch: act.Dispatch, at: float = 1.0, **fields: Any) -> act.Actions:
    plain: dict[str, Any] = {"vectors": {"control": CONTROL}, "vector": np.ones(2, np.float32)}
    fields = {**plain, **done(at), **fields, "base_version": dispatch.version}
    update = message(dispatch.client, dispatch.number, **fields)
    return [*core.update(dispatch.client, update, 99, at), *core.end_of_instant(at)]


@pytest.mark.parametrize("deferred", [False, True])
def test_vectors_are_sent_as_they_were_when_the_rule_returned(deferred: bool) -> None:
    core, (a, b) = begun(Adding(deferred=deferred))
    assert a.vectors is b.vectors  # one copy for all
    (a2,) = of(act.Dispatch, answer(core, a))
    assert a.vectors["control"].tolist() == [0, 0]
    assert a2.vectors["control"].tolist() == [3, 4]
    (b2,) = of(act.Dispatch, answer(core, b, 2.0))
    assert b2.vectors["control"].tolist() == [6, 8]
    assert a2.vectors["control"].tolist() == [3, 4]


def test_model_in_place_of_a_lost_one_has_the_vectors_of_the_rule() -> None:
    """Without them the client's half would fail, and end the run."""
    core, (a, _) = begun()
    answer(core, a)
    core.handle(inputs.Reconnected(from_seconds(5.0), from_seconds(3.0)))
    reported = inputs.Reported(from_seconds(5.5), "b", dispatch=0, about=2)
    actions = core.handle(reported)
    (again,) = of(act.Dispatch, actions)
    assert (again.client, again.version) == ("b", 1)
    assert again.vectors["control"].tolist() == [3, 4]
    assert sum(isinstance(one, events.RoundUnfinished) for one in records(actions)) == 1


def test_rule_gets_the_model_that_an_update_was_trained_from() -> None:
    core, (a, b) = begun()
    (a2,) = of(act.Dispatch, answer(core, a))
    answer(core, b, 2.0)
    answer(core, a2, 3.0, sequence=2)
    state: Any = core.rule
    assert state.bases == [[0, 0], [0, 0], [1, 1]]


def test_ignored_update_is_not_acknowledged_to_a_client_with_memory() -> None:
    core, (a, _) = begun()
    (a2,) = of(act.Dispatch, answer(core, a))
    assert a2.acknowledged == 1
    (a3,) = of(act.Dispatch, answer(core, a2, 2.0, sequence=2, vectors={"control": -CONTROL}))
    assert a3.acknowledged == 1
    (a4,) = of(act.Dispatch, answer(core, a3, 3.0, sequence=3))
    assert a4.acknowledged == 3


def test_compressed_vector_reaches_the_rule_expanded() -> None:
    core, (a, _) = begun()
    (a2,) = of(act.Dispatch, answer(core, a, vectors={"control": PACKED}))
    np.testing.assert_allclose(a2.vectors["control"], CONTROL, atol=0.02)


NAN = np.array([1.0, np.nan], np.float32)


@pytest.mark.parametrize(
    ("vectors", "reason"),
    [
        ({}, "no vector control, which the rule declares"),
        ({"control": W}, "vector control has the shape (3,), expected (2,)"),
        ({"control": CONTROL, "more": W}, "a vector more, which the rule does not declare"),
        ({"other": CONTROL}, "no vector control, which the rule declares"),
        ({"control": CONTROL, "more\n": PACKED}, "a vector more\\n, which the rule does not declare"),
        ({"control": NAN}, "vector control is not finite, or its norm is above 1.8e19"),
        ({"control": CONTROL * np.float32(1e19)}, "vector control is not finite, or its norm is above"),
        (
            {"control": Compressor(METHODS["int8"]()).apply(W, 0, 0)},
            "vector control: another model: 3 parameters, expected 2",
        ),
        ({"control": Encoded({}, PACKED.arrays)}, "vector control: encoded by a step that this run"),
        (
            {"control": Encoded({**PACKED.fields, "parameters": "1" * 30}, PACKED.arrays)},
            "vector control: 1111",
        ),
        (
            {"control": Encoded({"compression": "int8"}, PACKED.arrays)},
            "vector control: fields ",
        ),
    ],
)
def test_invalid_vectors_are_rejected_with_the_reason(vectors: Any, reason: str) -> None:
    core, (a, _) = begun()
    (rejected, *_) = [
        one.reason for one in records(answer(core, a, vectors=vectors)) if hasattr(one, "reason")
    ]
    assert rejected.startswith(reason)


def test_vector_that_is_declared_whole_must_not_be_encoded() -> None:
    side = ClientSide(update_vectors={"control": 2}, model_vectors={"control": 2})
    core, (a, _) = begun(Adding(side))
    (rejected, *_) = [
        one.reason
        for one in records(answer(core, a, vectors={"control": PACKED}))
        if hasattr(one, "reason")
    ]
    assert rejected == "vector control: encoded, but it is declared to be sent whole"


class _Wrong(AddingState):
    """Returns what the test wants at the start."""

    actions: Actions = ()

    def start(self) -> Actions:
        return self.actions


@pytest.mark.parametrize("returned", [None, Send("a"), ["send"], iter(())])
def test_rule_that_returns_no_list_of_actions_is_an_error(
    returned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Wrong, "actions", returned)
    monkeypatch.setattr(Adding, "begin", lambda params, server: _Wrong(params, server))
    with pytest.raises(DeclarationError, match=r"_Wrong returned .*, expected a list of actions"):
        begun()


class _Replacing(AddingState):
    """Replaces the global model at the first update, by what the test wants."""

    by: Any = None

    def update(self, update: Update) -> Actions:
        self.server.w = self.by
        return []


@pytest.mark.parametrize("by", [None, [0.0, 0.0], np.zeros(1, np.float32), np.zeros(3)])
def test_rule_that_replaces_the_global_model_is_an_error(
    by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Replacing, "by", by)
    monkeypatch.setattr(Adding, "begin", lambda params, server: _Replacing(params, server))
    core, (a, _) = begun()
    with pytest.raises(DeclarationError, match=r"_Replacing replaced server\.w.*change it in place"):
        answer(core, a)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Send("a"), "Send to a: no vector control, which the rule declares"),
        (Send("a", vectors={"control": W}), r"Send to a: vector control has the shape \(3,\)"),
        (Send("a", vectors={"control": CONTROL, "b": W}), "Send to a: a vector b, which the rule"),
        (Send("d", vectors={"control": CONTROL}), "Send to 'd', which is not a client of this run"),
        (Broadcast(), "Broadcast has no vector control, which the rule declares: use a Send"),
    ],
)
def test_rule_that_does_not_send_what_it_declares_is_an_error(
    action: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Wrong, "actions", [action])
    monkeypatch.setattr(Adding, "begin", lambda params, server: _Wrong(params, server))
    with pytest.raises(DeclarationError, match=reason):
        begun()
