"""Arithmetic on flat vectors."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st

from agents.models.vectors import add_and_clear, add_scaled, finite, mix, norm

LONG = 100_003
"""Longer than the blocks that the arithmetic works in, and no multiple of them."""


def test_add_scaled() -> None:
    target = np.array([1.0, 2.0], np.float32)
    add_scaled(target, np.array([4.0, -8.0], np.float32), 0.25)
    assert target.tolist() == [2.0, 0.0]
    add_scaled(target, np.array([4.0, -8.0], np.float32), 1.0)
    assert target.tolist() == [6.0, -8.0]


def test_mix() -> None:
    target = np.array([1.0, 2.0], np.float32)
    mix(target, np.array([5.0, -2.0], np.float32), 0.25)
    assert target.tolist() == [2.0, 1.0]
    mix(target, np.array([7.0, 9.0], np.float32), 1.0)
    assert target.tolist() == [7.0, 9.0]


def test_long_vectors_are_processed_completely() -> None:
    target, vector = np.ones(LONG, np.float32), np.arange(LONG, dtype=np.float32)
    add_scaled(target, vector, 0.5)
    np.testing.assert_array_equal(target, 1 + 0.5 * vector)
    mix(target, vector, 0.5)
    np.testing.assert_array_equal(target, 0.5 + 0.75 * vector)
    add_and_clear(target, vector, -0.75)
    np.testing.assert_array_equal(target, np.full(LONG, 0.5))
    np.testing.assert_array_equal(vector, np.zeros(LONG))


@given(st.floats(-1e6, 1e6, width=32), st.floats(0, 1))
def test_mixing_equal_models_changes_no_bit(value: float, share: float) -> None:
    target = np.full(3, value, np.float32)
    mix(target, target.copy(), share)
    assert target.tolist() == [np.float32(value)] * 3


@pytest.mark.parametrize("operation", [add_scaled, mix])
def test_works_in_place_with_scratch_far_smaller_than_the_model(operation: object) -> None:
    target, vector = np.zeros(1_000_000, np.float32), np.ones(1_000_000, np.float32)
    tracemalloc.start()
    operation(target, vector, 0.5)  # type: ignore[operator]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.1 * target.nbytes
    assert target.dtype == np.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, LONG // 2, LONG - 1])
def test_single_non_finite_element_is_found(bad: float, index: int) -> None:
    vector = np.ones(LONG, np.float32)
    vector[index] = bad
    assert not math.isfinite(norm(vector))
    assert not finite(vector)


@pytest.mark.parametrize("value", [1e-3, 0.1, 3.0])
def test_norm_of_many_equal_elements_has_nine_correct_digits(value: float) -> None:
    """A sum in float32 would be off by 0.1 %."""
    vector = np.full(10_000_000, value, np.float32)
    assert norm(vector) == pytest.approx(float(np.float32(value)) * math.sqrt(1e7), rel=1e-9)


def test_norm_by_hand() -> None:
    assert norm(np.array([3.0, -4.0], np.float32)) == 5.0
    assert norm(np.zeros(0, np.float32)) == 0.0
    assert norm(np.array([1.8e19], np.float32)) == pytest.approx(1.8e19)
    for vector in ([3e38], [1.9e19], [1.8e19, 1.8e19], [np.inf, -np.inf]):
        assert not math.isfinite(norm(np.array(vector, np.float32)))
        assert not finite(np.array(vector, np.float32))


def test_norm_is_the_same_with_each_number_of_threads() -> None:
    """BLAS would divide long vectors among its threads and round otherwise. Then a replay with other
    cores than the run would differ."""
    vector = np.random.default_rng(0).standard_normal(100_000, np.float32)
    found = set()
    for threads in (1, 2, 3):
        with threadpoolctl.threadpool_limits(threads):
            found.add(norm(vector))
    assert len(found) == 1
