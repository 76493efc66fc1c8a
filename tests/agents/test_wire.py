"""The wire format against the safetensors library, and against whatever a peer may send."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from agents.models.vectors import Buffers
from agents.wire import payloads
from agents.wire.payloads import ModelMessage, WireError
from tests.agents.helpers import joined, message, split

VECTOR = np.array([1.5, -2.0, 0.1], np.float32)
MODEL = ModelMessage(run="run", version=3, dispatch=17, schema="abc", vector=VECTOR)
UPDATE = message("nano-1", 17, base_version=3, loss=float("nan"), vector=VECTOR)


def test_payloads_are_encoded_and_decoded() -> None:
    model = payloads.decode_model(payloads.encode(MODEL))
    assert (model.run, model.version, model.dispatch, model.schema) == ("run", 3, 17, "abc")
    np.testing.assert_array_equal(model.vector, VECTOR)
    update = payloads.decode_update(payloads.encode(UPDATE))
    for field in dataclasses.fields(update):
        np.testing.assert_array_equal(getattr(update, field.name), getattr(UPDATE, field.name))


def test_safetensors_reads_our_payloads() -> None:
    payload = payloads.encode(UPDATE)
    tensors = safetensors.numpy.load(payload)
    assert list(tensors) == ["w"]
    np.testing.assert_array_equal(tensors["w"], VECTOR)
    assert tensors["w"].dtype == np.float32


def test_payloads_of_safetensors_are_read() -> None:
    payload = safetensors.numpy.save({"w": VECTOR}, {"protocol": "2", "name": "läufer"})
    vector, metadata, _ = payloads.unpack(payload)
    np.testing.assert_array_equal(vector, VECTOR)
    assert metadata == {"protocol": "2", "name": "läufer"}


def test_buffers_follow_the_vector_in_the_same_format() -> None:
    """The number of floats is odd, so that the integers are not aligned; they are the largest and the
    smallest."""
    buffers = Buffers(np.array([0.5, -3.0], np.float32), np.array([2**62, -(2**62), 7]))
    payload = payloads.encode(dataclasses.replace(UPDATE, buffers=buffers))
    tensors = safetensors.numpy.load(payload)
    assert sorted(tensors) == ["floats", "integers", "w"]
    assert tensors["integers"].tolist() == [2**62, -(2**62), 7]
    update = payloads.decode_update(payload)
    np.testing.assert_array_equal(update.vector, VECTOR)
    assert update.buffers.equals(buffers)
    assert not np.shares_memory(update.buffers.floats, update.vector)  # it is kept for longer
    assert payloads.decode_model(
        payloads.encode(dataclasses.replace(MODEL, buffers=buffers))
    ).buffers.equals(buffers)


@pytest.mark.parametrize("count", [-1, 3, 2**70, "2", None, True])
def test_buffers_with_invalid_sizes_are_refused(count: object) -> None:
    buffers = Buffers(np.array([0.5, -3.0], np.float32), np.array([1]))
    header, data = split(payloads.encode(dataclasses.replace(UPDATE, buffers=buffers)))
    header["floats"]["shape"] = [count]
    with pytest.raises(WireError):
        payloads.unpack(joined(header, data))


def test_decoded_data_is_aligned_and_not_copied() -> None:
    payload = payloads.encode(UPDATE)
    vector = payloads.decode_update(payload).vector
    assert np.shares_memory(vector, np.frombuffer(payload, np.uint8))
    assert not vector.flags.writeable
    assert vector.flags.aligned


def test_strided_vector_is_sent_with_its_values() -> None:
    strided = np.arange(6, dtype=np.float64)[::2]
    payload = payloads.encode(dataclasses.replace(MODEL, vector=strided))
    assert payloads.decode_model(payload).vector.tolist() == [0.0, 2.0, 4.0]


def _payload(header: Any, data: bytes = VECTOR.tobytes()) -> bytes:
    return joined(header, data)


def _header(**changes: Any) -> dict[str, Any]:
    tensor = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    return {"__metadata__": {"protocol": "2"}, "w": tensor | changes}


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "shorter"),
        (b"\x00" * 7, "shorter"),
        (struct.pack("<Q", 2**63) + b"{}", "header of 9223372036854775808 bytes"),
        (struct.pack("<Q", 100_000) + b" " * 100_000, "header of 100000 bytes"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "unreadable"),
        (struct.pack("<Q", 60_000) + b"[" * 60_000, "unreadable"),
        (_payload([]), "unreadable"),
        (_payload({"w": {}}), "unreadable"),
        (_payload(_header(dtype="F64")), "float32"),
        (_payload(_header(dtype="I32")), "float32"),
        (_payload(_header(shape=[3, 1])), "float32"),
        (_payload(_header(shape=[4])), "float32"),
        (_payload(_header(data_offsets=[4, 12])), "float32"),
        (_payload(_header(), b"\x00" * 11), "float32"),
        (_payload(_header(), b"\x00" * 16), "float32"),
        (_payload(_header() | {"extra": {}}), "float32"),
        (_payload(_header() | {"__metadata__": ["protocol"]}), "map of strings"),
        (_payload(_header() | {"__metadata__": {"protocol": 1}}), "map of strings"),
        (_payload(_header() | {"__metadata__": {"protocol": "2", "version": 1e999}}), "map of strings"),
        (_payload(_header() | {"__metadata__": {}}), "protocol None"),
        (_payload(_header() | {"__metadata__": {"protocol": "1"}}), "protocol '1', expected 2"),
        (_payload(_header()), "field run"),
        (payloads.encode(MODEL).replace(b'"version":"3"', b'"version":"x"'), "field version"),
    ],
)
def test_invalid_payloads_are_refused_with_the_reason(payload: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        payloads.decode_model(payload)


@pytest.mark.parametrize(
    "header",
    [
        b'"' + b"\xff" * 60_000,
        json.dumps(_header() | {"__metadata__": {"protocol": "9" * 60_000}}).encode(),
        json.dumps(_header() | {"__metadata__": {"protocol": "\ud800\x1b\u202e"}}).encode(),
        json.dumps(
            _header() | {"__metadata__": {"protocol": "2", "run": "r", "version": "\x1b" * 9000}}
        ).encode(),
        json.dumps(_header(shape="\x1b" * 9000)).encode(),
        b'{"__metadata__": {}, "w": %s0%s}' % (b"[" * 900, b"]" * 900),
    ],
)
def test_errors_are_short_and_printable(header: bytes) -> None:
    with pytest.raises(WireError) as raised:
        payloads.decode_model(struct.pack("<Q", len(header)) + header + VECTOR.tobytes())
    assert len(str(raised.value)) < 200
    assert str(raised.value).isprintable()


@given(length=st.integers(0, len(payloads.encode(UPDATE)) - 1))
def test_truncated_payloads_are_refused(length: int) -> None:
    with pytest.raises(WireError):
        payloads.decode_update(payloads.encode(UPDATE)[:length])


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "__metadata__": anything | st.dictionaries(st.sampled_from(["protocol", "run"]), anything),
        "w": anything | st.fixed_dictionaries({"dtype": anything, "shape": anything}),
        "x": anything,
    },
)


@given(payload=st.binary() | st.builds(_payload, anything | headers, st.binary()))
def test_any_bytes_are_a_payload_or_a_wire_error(payload: bytes) -> None:
    for decode in (payloads.decode_model, payloads.decode_update):
        try:
            decode(payload)
        except WireError as error:
            assert str(error)  # noqa: PT017


@given(
    position=st.integers(0, len(payloads.encode(UPDATE)) - 1),
    put=st.binary(min_size=1, max_size=4),
    field=st.sampled_from(["sequence", "dispatch", "loss", "samples", "sent"]),
    value=anything,
)
def test_damaged_payload_is_valid_or_a_wire_error(
    position: int, put: bytes, field: str, value: Any
) -> None:
    payload = payloads.encode(UPDATE)
    header, data = split(payload)
    header["__metadata__"][field] = value
    for damaged in (
        payload[:position] + put + payload[position + len(put) :],
        joined(header, data),
    ):
        try:
            payloads.decode_update(damaged)
        except WireError as error:
            assert str(error)  # noqa: PT017
