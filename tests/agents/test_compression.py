"""Compressed updates: what comes out, on the wire, and what no method makes."""

from __future__ import annotations

import dataclasses
import tempfile
import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agents import events
from agents.config import Named
from agents.models.vectors import NONE, Buffers
from agents.pipeline.compression import METHODS, Compressed, Int8, TopK
from agents.wire import payloads
from testbed import simulate
from testbed.errors import BadInputError
from testbed.run.replay import replay
from testbed.rundir.directory import RunDirectory
from testbed.topology import parse
from tests.agents.helpers import (
    COMPRESSED,
    VANILLA,
    compressor,
    joined,
    message,
    records,
    split,
    started,
)

ALL = [
    Named("fp16", {}),
    Named("int8", {"chunk": 16}),
    Named("int8", {"chunk": 1024}),
    Named("topk", {"share": 0.1}),
    Named("topk", {"share": 1.0}),
]
every_method = pytest.mark.parametrize("named", ALL, ids=repr)


BUFFERS = Buffers(np.array([0.5, -3.0, 1e9], np.float32), np.array([2**62]))


def vector(size: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def sent(compressed: Compressed, **fields: Any) -> payloads.UpdateMessage:
    nothing = np.zeros(0, np.float32)
    return dataclasses.replace(message("a", 1), vector=nothing, encoded=compressed.encoded, **fields)


def test_int8_by_hand() -> None:
    packed = Int8(chunk=16).compress(
        np.array([127.0, -63.4, 0.5, 0.49] + [0.0] * 12 + [-2.0], np.float32)
    )
    assert packed.arrays["scales"].tolist() == [1.0, pytest.approx(2 / 127)]
    assert packed.arrays["w"].tolist() == [127, -63, 0, 0, *[0] * 12, -127]  # rint(0.5) is 0
    assert packed.dense().tolist()[:2] == [127.0, -63.0]


def test_topk_keeps_the_largest_values_and_the_first_of_equal_ones() -> None:
    packed = TopK(share=0.4).compress(np.array([1.0, -3.0, 3.0, 2.0, -3.0], np.float32))
    assert packed.arrays["indices"].tolist() == [1, 2]
    assert packed.dense().tolist() == [0.0, -3.0, 3.0, 0.0, 0.0]
    assert TopK(share=0.001).compress(np.ones(5, np.float32)).arrays["indices"].tolist() == [0]


def test_topk_remainder_is_added_to_the_next_update() -> None:
    keeping = compressor("topk", share=0.5)
    assert keeping.compress(np.array([3.0, 2.0], np.float32)).dense().tolist() == [3.0, 0.0]
    assert keeping.compress(np.array([1.0, 0.5], np.float32)).dense().tolist() == [0.0, 2.5]
    diverged = keeping.compress(np.array([np.nan, 0.0], np.float32))
    assert not np.isfinite(diverged.dense()).all()
    assert keeping.compress(np.array([0.0, 0.0], np.float32)).dense().tolist() == [1.0, 0.0]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.integers(1, 10))
def test_error_feedback_loses_nothing(values: list[float], rounds: int) -> None:
    """Σ of what arrives + what is left = Σ of what was sent."""
    keeping, update = compressor("topk", share=0.2), np.array(values, np.float32)
    arrived = sum(keeping.compress(update).dense().astype(float) for _ in range(rounds))
    left = 0.0 if keeping._error is None else keeping._error
    assert arrived + left == pytest.approx(rounds * update.astype(float), rel=1e-4, abs=1e-2)


@every_method
@pytest.mark.parametrize("size", [1, 15, 16, 1023, 40_001])
def test_every_method_restores_the_vector_approximately(named: Named, size: int) -> None:
    plain = vector(size)
    back = compressor(named.name, **named.params).compress(plain).dense()
    assert back.dtype == np.float32
    assert back.shape == plain.shape
    error = np.abs(back - plain)
    most = {"fp16": 5e-3, "int8": np.abs(plain).max() / 254 * 1.001}.get(named.name)
    if most is not None:
        assert error.max() <= most
    else:
        assert error[back != 0].max() == 0


@pytest.mark.parametrize("extreme", [0.0, 1e-45, 1e-40, 1e-38, 1e18])
@every_method
def test_extreme_values_do_not_overflow(named: Named, extreme: float) -> None:
    back = compressor(named.name, **named.params).compress(np.full(20, extreme, np.float32)).dense()
    if named.name == "fp16" and extreme > 65504:
        assert np.isinf(back).all()  # which the aggregator refuses
    else:
        assert np.abs(back).max() <= extreme * 1.001


@every_method
@pytest.mark.parametrize("buffers", [NONE, BUFFERS], ids=["plain", "buffers"])
def test_compressed_update_is_sent_and_readable_by_safetensors(named: Named, buffers: Buffers) -> None:
    packed = compressor(named.name, **named.params).compress(vector(2_001))
    payload = payloads.encode(sent(packed, buffers=buffers))
    update = payloads.decode_update(payload)
    assert update.encoded is not None
    assert Compressed.from_encoded(update.encoded).dense().tobytes() == packed.dense().tobytes()
    assert update.buffers.equals(buffers)
    arrays = safetensors.numpy.load(payload)
    more = {"floats": buffers.floats, "integers": buffers.integers} if buffers.nbytes else {}
    assert {name: array.tolist() for name, array in arrays.items()} == {
        name: array.tolist() for name, array in (dict(packed.arrays) | more).items()
    }
    plain = message("a", 1, vector=vector(2_001), buffers=buffers)
    assert payloads.plain_size(update, 2_001) == len(payloads.encode(plain))


def test_compression_saves_the_stated_bytes() -> None:
    """The message has mnist-cnn's 28,938 parameters and all its fields."""
    d = 28_938
    plain = len(payloads.encode(message("a", 1, vector=vector(d))))
    ratios = {
        name: plain / len(payloads.encode(sent(method().compress(vector(d)))))
        for name, method in METHODS.items()
    }
    assert ratios["fp16"] > 1.98
    assert ratios["int8"] > 3.9
    assert ratios["topk"] > 10


def test_rule_gets_the_expanded_vector_and_both_sizes_are_recorded() -> None:
    core, server = started(w=np.zeros(3, np.float32), steps=[COMPRESSED])
    packed = TopK(share=0.4).compress(np.array([1.0, 5.0, 2.0], np.float32))
    done = core.update("a", sent(packed), 1000, 1.0)
    assert server.w.tolist() == [0.0, 5.0, 0.0]
    (applied,) = [r for r in records(done) if isinstance(r, events.UpdateApplied)]
    plain = message("a", 1, vector=np.zeros(3, np.float32))
    assert (applied.bytes, applied.bytes_before) == (1000, len(payloads.encode(plain)))


@pytest.mark.parametrize("size", [2, 4, 2**31])
def test_wrong_size_is_refused_before_allocation(size: int) -> None:
    core, _ = started(VANILLA, w=np.zeros(3, np.float32), steps=[COMPRESSED])
    one = {"values": np.ones(1, np.float32), "indices": np.zeros(1, np.uint32)}
    payload = payloads.encode(sent(Compressed("topk", size, 0, one)))
    tracemalloc.start()
    try:
        done = core.update("a", payloads.decode_update(payload), 4, 1.0)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert f"{size} parameters, expected 3" in str(records(done)[0])


@every_method
@given(data=st.data(), buffers=st.sampled_from([NONE, BUFFERS]))
def test_damaged_payloads_are_refused_or_decoded(
    named: Named, buffers: Buffers, data: st.DataObject
) -> None:
    packed = compressor(named.name, **named.params).compress(vector(40))
    header, body = split(payloads.encode(sent(packed, buffers=buffers)))
    text = st.sampled_from(
        ["", "-1", "0", "1", "41", "99999999999999999999", "fp16", "int8", "topk", "x"]
    )
    for name in data.draw(st.sets(st.sampled_from(["compression", "parameters", "chunk"]))):
        header["__metadata__"][name] = data.draw(text)
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from([name for name in header if name != "__metadata__"]))
        change = st.sampled_from(
            [
                ("dtype", "F32"),
                ("shape", [10**12]),
                ("shape", [2]),
                ("shape", []),
                ("data_offsets", [0, 1]),
            ]
        )
        header[name] |= dict([data.draw(change)])
    if data.draw(st.booleans()):
        del header[data.draw(st.sampled_from([*header]))]
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body)))]
    try:
        update = payloads.decode_update(joined(header, body))
        decoded = Compressed.from_encoded(update.encoded) if update.encoded is not None else None
    except (payloads.WireError, LookupError, ValueError):
        return
    assert decoded is not None
    assert decoded.encoded.nbytes + update.buffers.nbytes == len(body)
    assert decoded.size <= max(41, 10**6)
    with suppress(ValueError):
        assert decoded.dense().size == decoded.size


TOPOLOGY = """
name: t
task: {name: digits-logreg, local: {steps: 4, batch_size: 8, lr: 0.1}}
rule: RULE
devices: [{name: a, count: 3, timing: 1s, link: {up: 20kbit, compression: {kind: METHOD}}}]
evaluate: {every: 10s}
stop: {after: 40s}
runtime: {name: virtual}
durability: recording
"""


@pytest.mark.parametrize(
    ("method", "least", "rule"),
    [
        ("fp16", 1.7, "{name: fedasync}"),
        ("int8", 2.6, "{name: fedbuff, buffer_size: 3}"),
        ("topk, share: 0.05", 4.0, "{name: fedasync}"),
    ],
)
def test_compressed_run_in_virtual_time_is_faster_and_learns(
    method: str, least: float, rule: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        topology = TOPOLOGY.replace("METHOD", method).replace("RULE", rule)
        run = simulate(topology, runs=folder)
        link = yaml.safe_load(topology)["devices"][0] | {"link": {"up": "20kbit"}}
        plain = simulate(topology, runs=folder, devices=[link])
        replay(RunDirectory(run.path))  # from the compressed bytes, the same model to the bit
    updates = run.updates
    assert (updates["bytes_before"] / updates["bytes"]).min() > least
    assert set(plain.updates["bytes"]) == set(plain.updates["bytes_before"])
    took, took_plain = ((u["arrived"] - u["sent"]).mean() for u in (updates, plain.updates))
    assert took_plain / took == pytest.approx(plain.updates["bytes"][0] / updates["bytes"][0], rel=0.01)
    assert run.evaluations["accuracy"].iloc[-1] > 0.5


def test_unsupported_combinations_are_refused() -> None:
    area = TOPOLOGY.replace("METHOD", "int8").replace("RULE", "{name: area, criterion: every, every: 2}")
    with pytest.raises(BadInputError, match=r"5:\d+: devices\[0\].link.compression: .* unchanged"):
        parse(area)
    bounded = TOPOLOGY.replace(", compression: {kind: METHOD}", "") + "bounds: {norm: 1.0}\n"
    with pytest.raises(BadInputError, match=r"bounds.norm: .* applied unchanged"):
        parse(bounded.replace("RULE", "{name: area, criterion: every, every: 2}"))
