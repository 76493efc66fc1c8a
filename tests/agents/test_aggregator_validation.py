"""Validation of updates: a rule gets only those that a client can have made of the model sent to it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.aggregator.dispatches import Dispatched
from agents.aggregator.inputs import Settings, UpdateArrived
from agents.aggregator.intake import Validation
from agents.config import StopConditions, UpdateBounds
from agents.models import vectors
from agents.models.vectors import Buffers, Vector
from agents.pipeline.compression import Compressed, TopK
from agents.pipeline.steps import ServerSteps
from agents.rules.client_half import ClientSide, Kind
from agents.rules.interface import Server
from agents.secure.arithmetic import SecureRun
from agents.secure.secure_messages import DIVERGED, Masked
from agents.timing.nanoseconds import SECOND, from_seconds
from agents.wire.payloads import UpdateMessage
from tests.agents.helpers import COMPRESSED, message, secure_step

_W = np.array([1, 2, 2], np.float32)
_SECURE = SecureRun(
    clients=["a", "b", "c"],
    updates=2,
    weights=1,
    colluding=1,
    needed=2,
    range=1.0,
    bits=20,
    timeout=30.0,
)
_MASKED = Masked(np.array([1, 2, 3], np.uint32), holders=(0, 1), outside=0, took=SECOND // 4)


def validation(*, secure: SecureRun | None = None, version: int = 0, **settings: Any) -> Validation:
    """Validation in a run whose model is `_W` of `version`, with deltas from clients with any number of
    samples, changed by `settings`."""
    defaults: dict[str, Any] = {
        "side": ClientSide(),
        "importance": {"a": 1.0},
        "stop": StopConditions(after=1.0),
    }
    steps = [COMPRESSED] if secure is None else [secure_step(secure)]
    asked = Settings(run="run", schema="s", evaluate_every=1, steps=steps, **defaults | settings)
    server = Server(_W.copy(), {}, np.random.default_rng(0), version=version)
    return Validation(asked, server, ServerSteps(asked.steps, _W.size))


def update(*vector: float, **fields: Any) -> UpdateMessage:
    """One from 100.125 to 100.5 s on its client's clock that is all right."""
    return message("a", 1, vector=np.array(vector or (0, 0, 1), np.float32), **fields)


def masked(**fields: Any) -> UpdateMessage:
    return update(encoded=replace(_MASKED, **fields).encoded)


def judged(
    checks: Validation, found: UpdateMessage, base: Vector | None = None, dispatched: int = 0
) -> UpdateMessage | str:
    """An answer to the model of version `dispatched`, sent at 100 and come at 101 s of its clock."""
    event = UpdateArrived(SECOND, "a", 1, SECOND, found)
    begin, end = from_seconds(100.0), from_seconds(101.0)
    return checks.check(event, Dispatched(dispatched, 0), base, begin, end)


def test_valid_update_is_passed_on_unchanged() -> None:
    fine = update()
    assert judged(validation(), fine) is fine


_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"kind": "model"}, "kind model, expected delta"),
    "another schema": ({"schema": "t"}, "another model: schema t"),
    "too long": ({"vector": np.zeros(4, np.float32)}, "another model: 4 parameters, expected 3"),
    "not finite": ({"vector": np.array([0, np.nan, 0], np.float32)}, "not finite"),
    "too large": ({"vector": np.array([0, 3e19, 0], np.float32)}, "its norm is above"),
    "buffers": (
        {"buffers": Buffers(np.zeros(1, np.float32), np.zeros(0, np.int64))},
        "another model: 1 numbers in its buffers, expected 0",
    ),
    "another base": ({"base_version": 1}, "base version 1, expected 0"),
    "masked": (
        {"encoded": _MASKED.encoded},
        "encoded by a step that this run does not have: holders, outside, took",
    ),
    "no samples": ({"samples": 0}, "0 samples, expected at least 1"),
    "many samples": ({"samples": 2**63}, "sequence, samples or steps are above"),
    "less than no step": ({"steps": -1}, "-1 steps, expected at least 0"),
    "no effective steps": ({"effective_steps": 0.0}, "0 effective steps"),
    "many effective steps": ({"effective_steps": 1e12 + 1}, "effective steps, expected above 0"),
    "endless effective steps": ({"effective_steps": math.inf}, "inf effective steps"),
    "effective steps that are none": ({"effective_steps": math.nan}, "nan effective steps"),
    "a loss that is no float32": ({"loss": -1e39}, "loss -1e+39"),
}


@pytest.mark.parametrize(("fields", "problem"), _FAULTS.values(), ids=_FAULTS)
def test_invalid_field_is_reported(fields: dict[str, Any], problem: str) -> None:
    told = judged(validation(), replace(update(), **fields))
    assert isinstance(told, str)
    assert problem in told


@pytest.mark.parametrize(
    "fields",
    [
        *({"steps": 0}, {"samples": 1}, {"samples": 2**63 - 1}),
        *({"loss": math.nan}, {"loss": math.inf}, {"loss": 3.4e38}),
        *({"effective_steps": 1e-300}, {"effective_steps": 1e12}),
    ],
    ids=str,
)
def test_unusual_but_possible_updates_are_valid(fields: dict[str, Any]) -> None:
    found = update(**fields)
    assert judged(validation(), found) is found


def test_times_of_an_update_must_be_in_order_between_dispatch_and_arrival() -> None:
    names = ("downloaded", "train_start", "train_end", "sent")
    for times in itertools.product(range(99, 103), repeat=4):
        found = update(**{name: at * SECOND for name, at in zip(names, times, strict=True)})
        downloaded, start, end, sent = times
        possible = 100 <= downloaded <= start <= end <= 101 and 100 <= sent <= 101
        assert (judged(validation(), found) is found) == possible, times


def test_samples_are_limited_by_the_clients_shard() -> None:
    known = validation(samples={"a": 10})
    assert isinstance(judged(known, update(samples=10)), UpdateMessage)
    assert judged(known, update(samples=11)) == "11 samples, expected 10 as in its shard"


@pytest.mark.parametrize("staleness", [0, 2, 3])
def test_update_over_the_staleness_bound_is_dropped(staleness: int) -> None:
    bounded = validation(bounds=UpdateBounds(staleness=2), version=5)
    old = 5 - staleness
    told = judged(bounded, update(base_version=old), dispatched=old)
    if staleness <= 2:
        assert isinstance(told, UpdateMessage)
    else:
        assert told == "staleness 3, expected at most 2"


_NUMBERS = st.floats(-4, 4, width=32)


@given(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS))
@pytest.mark.parametrize("kind", ["delta", "model"])
def test_update_over_the_norm_bound_is_clipped_in_its_direction(
    kind: str, move: tuple[float, float, float]
) -> None:
    """The move that a model makes is its difference to the global one."""
    origin = _W if kind == "model" else np.zeros(3, np.float32)
    found = update(*origin + np.array(move, np.float32), kind=kind)
    checks = validation(bounds=UpdateBounds(norm=2.0))
    moved = found.vector - origin
    length = checks.over_norm(found)
    if length is None:
        assert vectors.norm(moved) <= 2
    else:
        assert length == vectors.norm(moved) > 2
        clipped = checks.clip(found, length)
        np.testing.assert_allclose(clipped - origin, moved * (2 / length), rtol=1e-5, atol=1e-6)
        assert not np.shares_memory(clipped, found.vector)


def test_update_over_the_norm_bound_may_be_dropped() -> None:
    dropping = validation(bounds=UpdateBounds(norm=2.0, over_norm="drop"))
    assert isinstance(judged(dropping, update(0, 0, 2)), UpdateMessage)
    assert judged(dropping, update(0, 0, 2.5)) == "norm 2.5, expected at most 2"


def test_any_norm_is_valid_without_a_bound() -> None:
    assert validation().over_norm(update(0, 0, 1e18)) is None


def compressed(vector: Vector, kind: Kind = "delta", **arrays: Any) -> UpdateMessage:
    """All of `vector`; with these `arrays` in place of its own."""
    packed = TopK(share=1.0).compress(vector)
    packed = replace(packed, arrays={**packed.arrays, **arrays})
    return update(kind=kind, encoded=packed.encoded)


def huge() -> UpdateMessage:
    """The compressed update claims a size that no memory holds."""
    return update(encoded=Compressed("fp16", 10**15, 0, {}).encoded)


@pytest.mark.parametrize(("kind", "base"), [("delta", None), ("model", _W)])
def test_compressed_model_is_expanded_relative_to_its_base(kind: Kind, base: Vector | None) -> None:
    moved = np.array([0, -1, 3], np.float32)
    found = judged(validation(side=ClientSide(kind)), compressed(moved, kind), base)
    assert isinstance(found, UpdateMessage)
    assert found.vector.tolist() == (moved if base is None else base + moved).tolist()


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (compressed(_W, "model"), "the model that it was trained from is not kept"),
        (compressed(np.zeros(4, np.float32)), "another model: 4 parameters, expected 3"),
        (huge(), "out of range"),
        (compressed(_W, indices=np.array([0, 1, 3], np.uint32)), "indices must ascend"),
        (compressed(_W, indices=np.array([0, 1, 1], np.uint32)), "indices must ascend"),
        (compressed(np.array([0, np.inf, 0], np.float32)), "not finite"),
    ],
    ids=["no base", "too long", "huge", "above the last", "repeated", "not finite"],
)
def test_compressed_update_that_cannot_be_expanded_is_rejected(
    found: UpdateMessage, problem: str
) -> None:
    told = judged(validation(side=ClientSide(as_model=True)), found)
    assert isinstance(told, str)
    assert problem in told


_MASKING_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"words": np.zeros(4, np.uint32)}, "another model: 4 parameters, expected 3"),
    "diverged": ({"outside": DIVERGED}, vectors.DIVERGED),
    "few holders": ({"holders": (0,)}, "only 1 clients have a share of its mask, expected at least 2"),
    "an unknown holder": ({"holders": (0, 3)}, "a client that is not in this run"),
    "longer than the round": ({"took": SECOND}, "masking time out of range"),
    "less than no time": ({"took": -1}, "expected from 0 to"),
}


@pytest.mark.parametrize(("fields", "problem"), _MASKING_FAULTS.values(), ids=_MASKING_FAULTS)
def test_unusable_mask_is_reported(fields: dict[str, Any], problem: str) -> None:
    told = judged(validation(secure=_SECURE), masked(**fields))
    assert isinstance(told, str)
    assert problem in told


@pytest.mark.parametrize("took", [0, from_seconds(0.375)])
def test_mask_cannot_take_longer_than_its_round(took: int) -> None:
    assert isinstance(judged(validation(secure=_SECURE), masked(took=took)), UpdateMessage)


def test_masked_model_is_passed_on_with_its_base_only() -> None:
    found = judged(validation(secure=_SECURE), masked())
    assert isinstance(found, UpdateMessage)
    assert found.vector.size == 0
    models = validation(secure=_SECURE, side=ClientSide("model"))
    found = judged(models, replace(masked(), kind="model"), base=_W)
    assert isinstance(found, UpdateMessage)
    assert found.vector is _W
    told = judged(models, replace(masked(), kind="model"))
    assert told == "masked, but the model that it was trained from is not kept"
    assert (
        judged(validation(secure=_SECURE), update()) == "not masked, but the run uses secure aggregation"
    )
