"""Field, code, masks and rounding of secure aggregation, against other people's and by counting."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from agents.secure import arithmetic, party
from agents.secure.arithmetic import (
    FIELD,
    Field,
    Grid,
    MaskCode,
    Words,
    code_problem,
    lagrange_matrix,
    split_problem,
)

_TOP = FIELD.p - 1


def test_field_arithmetic_equals_galois_at_its_limits_too() -> None:
    import galois  # takes a second and a half

    gf = galois.GF(FIELD.p)
    edges = np.array([0, 1, 2, 0xFFFF, 0x10000, FIELD.p // 2, _TOP - 1, _TOP], np.uint32)
    a, b = np.repeat(edges, len(edges)), np.tile(edges, len(edges))
    assert np.array_equal(FIELD.sum(a, b), gf(a) + gf(b))
    assert np.array_equal(FIELD.difference(a, b), gf(a) - gf(b))
    left, right = a.reshape(4, 16), b.reshape(16, 4)
    assert np.array_equal(FIELD.product(left, right), gf(left) @ gf(right))


def test_a_long_sum_of_the_largest_products_is_exact() -> None:
    terms = 4096
    left, right = np.full((1, terms), _TOP), np.full((terms, 1), _TOP, np.uint32)
    assert FIELD.product(left, right)[0, 0] == terms * _TOP**2 % FIELD.p
    with pytest.raises(ValueError, match="expected at most 4096"):
        FIELD.product(np.zeros((1, terms + 1)), np.zeros((terms + 1, 1), np.uint32))


def test_reduction_works_for_all_64_bit_values() -> None:
    values = np.array([0, FIELD.p, 2 * FIELD.p, 2**64 - 1, 2**63, 2**62 + 12345], np.uint64)
    for field in (Field(3), Field(19), FIELD):
        expected = [int(value) % field.p for value in values]
        assert field.reduce(values.copy()).tolist() == expected


def test_interpolation_equals_galois() -> None:
    """The matrix maps a polynomial's values at some points to its values at others."""
    import galois

    gf = galois.GF(FIELD.p)
    polynomial = galois.Poly([_TOP, 5, 0, 123456789], field=gf)
    points, targets = [1, 2, 3, 9], [4, 5, 2**30]
    values = np.array([[int(polynomial(gf(point)))] for point in points], np.uint32)
    found = FIELD.product(lagrange_matrix(points, targets, FIELD), values)
    assert found[:, 0].tolist() == [int(polynomial(gf(target))) for target in targets]


@given(st.data())
def test_any_u_shares_recover_the_sum_of_masks(data: st.DataObject) -> None:
    parties = data.draw(st.integers(1, 8))
    needed = data.draw(st.integers(1, parties))
    code = MaskCode(
        parties, needed, data.draw(st.integers(0, needed - 1)), data.draw(st.integers(1, 40))
    )
    seed = data.draw(st.binary(min_size=16, max_size=16))
    weights = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=4))
    drawn = party.expand_seed(seed, len(weights) * code.size).reshape(-1, code.size)
    shares = [code.shares(mask, _noise(code, seed), range(parties)) for mask in drawn]
    summed = FIELD.product(np.array([weights]), np.stack(shares).reshape(len(weights), -1))
    answering = data.draw(st.permutations(range(parties)))[:needed]
    rows = summed.reshape(parties, -1)[answering]
    assert np.array_equal(code.mask(answering, rows), FIELD.product(np.array([weights]), drawn)[0])


def _noise(code: MaskCode, seed: bytes) -> Words:
    return party.expand_seed(seed, code.colluding * code.length)


@pytest.mark.parametrize(("needed", "colluding", "size"), [(2, 1, 1), (3, 2, 1), (3, 1, 2)])
def test_t_shares_are_uniform_for_every_mask(needed: int, colluding: int, size: int) -> None:
    """Over all noise of the field of 7 elements, any T shares are uniform for every mask, all together:
    they tell nothing. T + 1 of them are not the same."""
    field = Field(3)
    code = MaskCode(3, needed, colluding, size, field)
    noises = [*itertools.product(range(field.p), repeat=colluding * code.length)]
    drawn = [*itertools.product(range(field.p), repeat=size)]
    for holders in itertools.combinations(range(3), colluding):
        seen = {mask: _seen(code, mask, noises, holders) for mask in drawn}
        uniform = dict.fromkeys(noises, 1)
        assert all(counts == uniform for counts in seen.values())
    more = range(colluding + 1)
    assert len({frozenset(_seen(code, mask, noises, more)) for mask in drawn}) > 1


def _seen(
    code: MaskCode,
    mask: tuple[int, ...],
    noises: list[tuple[int, ...]],
    holders: range | tuple[int, ...],
) -> Counter[tuple[int, ...]]:
    """How often the shares of these holders are what they are."""
    whole = np.array(mask, np.uint32)
    found = (code.shares(whole, np.array(noise, np.uint32), holders) for noise in noises)
    return Counter(tuple(shares.reshape(-1).tolist()) for shares in found)


def test_masks_and_masked_updates_look_uniform() -> None:
    """A masked constant update shows no bit: mask and masked update pass χ² over 256 classes and a test
    of their distribution; the unmasked sum does not."""
    words, _ = Grid(1.0, 16).round(np.full(100_000, 0.25), np.random.default_rng(0))
    mask = party.expand_seed(bytes(range(16)), words.size)
    for found, uniform in ((mask, True), (FIELD.sum(words, mask), True), (words, False)):
        classes = np.bincount(found.astype(np.uint64) * 256 // FIELD.p, minlength=256)
        low = np.bincount(found & 0xFF, minlength=256)
        spread = stats.kstest(found / FIELD.p, "uniform").pvalue
        p = min(stats.chisquare(classes).pvalue, stats.chisquare(low).pvalue, spread)
        assert bool(p > 1e-4) is uniform


def test_mask_expansion_skips_values_above_the_field() -> None:
    """In the field of 7 elements one word of 8 equals p: it is skipped, and each element is equally
    likely."""
    field = Field(3)
    words = party.expand_seed(b"k" * 16, 70_000, field)
    assert stats.chisquare(np.bincount(words, minlength=8)[:7]).pvalue > 1e-4
    assert words.max() == 6
    assert np.array_equal(party.expand_seed(b"k" * 16, 70_000, field), words)
    assert not np.array_equal(party.expand_seed(b"l" * 16, 70_000, field), words)
    assert party.new_seed() != party.new_seed()


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=50), st.integers(2, 30), st.integers(0, 99))
def test_rounding_errs_by_less_than_a_step(values: list[float], bits: int, seed: int) -> None:
    grid, vector = Grid(1.5, bits), np.array(values)
    words, outside = grid.round(vector, np.random.default_rng(seed))
    assert np.abs(grid.to_reals(words) - vector.clip(-1.5, 1.5)).max() <= grid.step * (1 + 1e-9)
    assert outside == int((np.abs(vector) > 1.5).sum())


def test_rounding_is_unbiased() -> None:
    grid = Grid(1.0, 3)
    vector = np.repeat([-0.9, -0.1, 0.05, 0.5], 20_000)
    words, _ = grid.round(vector, np.random.default_rng(0))
    means = grid.to_reals(words).reshape(4, -1).mean(axis=1)
    assert means == pytest.approx([-0.9, -0.1, 0.05, 0.5], abs=0.005)  # a step is 0.33


def test_largest_allowed_sum_fits_the_field() -> None:
    updates, weight = 2, 64
    bits = (FIELD.p // (updates * weight)).bit_length() - 1
    assert arithmetic.overflow(updates, weight, bits) is None
    problem = arithmetic.overflow(updates, weight, bits + 1)
    assert problem is not None
    assert f"lower bits to {bits} or less" in problem
    grid = Grid(1.0, bits)
    for value in (1.0, -1.0):
        words, _ = grid.round(np.full(3, value), np.random.default_rng(0))
        summed = FIELD.product(np.full((1, updates), weight), np.stack([words] * updates))[0]
        assert grid.to_reals(summed).tolist() == [pytest.approx(updates * weight * value)] * 3


def test_upper_half_of_the_field_is_negative() -> None:
    words = np.array([0, 1, 2**29, 2**30 - 1, 2**30, 3 * 2**29, _TOP], np.uint32)
    expected = [0, 1, 2**29, 2**30 - 1, 1 - 2**30, 1 - 2**29, -1]
    grid = Grid(127.0, 8)  # steps of 1
    assert grid.to_integers(words).tolist() == grid.to_reals(words).tolist() == expected


def test_weights_are_rounded_to_at_least_one() -> None:
    assert arithmetic.whole_weights([1.0, 0.5, 0.6], 64) == [64, 32, 38]
    assert arithmetic.whole_weights([0.01, 0.01, 0.001, 0.0], 64) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([1.0, 1 / 64, 1 / 64], [2, 1, 1]),
        ([1 / 64, 1.0, 0.5], [1, 33, 32]),
        ([1.0, 1.0, 1 / 64], [64, 64, 1]),
        ([1.0, 0.5, 0.5], [64, 32, 32]),
        ([1.0, 0.25], [32, 16]),  # of two, where otherwise only equal weights would do
        ([0.25, 0.5], [16, 32]),
        ([1.0, 1.0], [64, 64]),
    ],
)
def test_no_update_outweighs_the_others_together(weights: list[float], whole: list[int]) -> None:
    assert arithmetic.whole_weights(weights, 64) == whole
    assert not arithmetic.dominates(whole)


@pytest.mark.parametrize("weights", [[64, 1, 1], [1, 3, 1], [33, 16], [64, 31, 32]])
def test_weights_that_reveal_one_update_are_refused(weights: list[int]) -> None:
    assert arithmetic.dominates(weights)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2e19])
def test_diverged_updates_are_refused(value: float) -> None:
    """With these values an update is rejected without secure aggregation, too."""
    with pytest.raises(ValueError, match="training diverged"):
        Grid(1.0, 16).round(np.array([0.0, value], np.float32), np.random.default_rng(0))


def test_invalid_parameters_of_the_code_are_refused() -> None:
    assert code_problem(4, 3, 2) is None
    assert code_problem(4, 5, 1) == "needed (U) is 5, expected from 1 to the number of clients, 4"
    assert split_problem(5, 3) is split_problem(4, 3) is split_problem(1, 1) is None
    assert "more than half of the number of clients, 4: otherwise two" in str(split_problem(4, 2))
    assert code_problem(4, 3, 3) == "colluding (T) is 3, expected from 0 to below needed (U), 3"
    with pytest.raises(ValueError, match="bits is 32"):
        Field(32)
    with pytest.raises(ValueError, match="the field has only"):
        MaskCode(5, 4, 1, 1, Field(3))
