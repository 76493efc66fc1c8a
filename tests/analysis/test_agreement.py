"""Whether two settings rank configurations alike: by hand, ties, what was not reached, the bootstrap."""

from __future__ import annotations

from math import inf, isnan, nan, sqrt
from pathlib import Path

import pandas as pd
import pytest

from analysis.agreement import RankAgreement, agreement, times
from analysis.load import load


def of(**seconds: list[tuple[float, float]]) -> RankAgreement:
    """The agreement of configurations with a pair of times, virtual and real, for each seed."""
    rows = [(name, *pair) for name, pairs in seconds.items() for pair in pairs]
    return agreement(pd.DataFrame(rows, columns=["configuration", "predicted", "measured"]))


def ranks(found: RankAgreement) -> dict[str, tuple[int, int]]:
    return {one.name: (one.predicted_rank, one.measured_rank) for one in found.configurations}


def test_equal_orders_have_tau_one() -> None:
    found = of(b=[(2.0, 30.0)], a=[(1.0, 20.0)], c=[(3.0, 40.0)])
    assert ranks(found) == {"a": (1, 1), "b": (2, 2), "c": (3, 3)}
    assert list(ranks(found)) == ["a", "b", "c"]
    assert (found.tau, found.low, found.high, found.swapped) == (1.0, 1.0, 1.0, ())


def test_swap_is_one_discordant_pair() -> None:
    found = of(a=[(1.0, 2.0)], b=[(2.0, 1.0)], c=[(3.0, 3.0)])
    assert found.tau == pytest.approx(1 / 3)  # two of three pairs in order: (2 - 1) ÷ 3
    assert found.swapped == (("a", "b"),)
    assert (found.low, found.high, found.resampled) == (-1.0, 1.0, "configurations")


def test_tie_is_not_discordant_and_lowers_tau() -> None:
    found = of(a=[(1.0, 2.0)], b=[(1.0, 1.0)], c=[(3.0, 3.0)])
    assert ranks(found) == {"a": (1, 2), "b": (1, 1), "c": (3, 3)}
    assert found.tau == pytest.approx(2 / sqrt(2 * 3))  # of three pairs one has no order in virtual time
    assert found.swapped == ()


def test_configurations_that_miss_the_target_are_last_and_tied() -> None:
    found = of(a=[(1.0, 1.0)], b=[(nan, inf)], c=[(inf, nan)], d=[(2.0, inf)])
    assert ranks(found) == {"a": (1, 1), "d": (2, 2), "b": (3, 2), "c": (3, 2)}
    assert [one.measured for one in found.configurations] == [1.0, inf, inf, inf]
    assert found.tau == pytest.approx(3 / sqrt(5 * 3))


def test_one_seed_missing_the_target_is_enough() -> None:
    found = of(a=[(1.0, 1.0), (1.0, inf)], b=[(2.0, 2.0), (2.0, 4.0)])
    assert ranks(found) == {"a": (1, 2), "b": (2, 1)}
    assert [one.measured for one in found.configurations] == [inf, 3.0]


def test_tau_is_undefined_if_all_tie() -> None:
    found = of(a=[(inf, 1.0)], b=[(inf, 2.0)], c=[(inf, 3.0)])
    assert isnan(found.tau)
    assert isnan(found.low)
    assert found.swapped == ()


@pytest.mark.parametrize(("count", "seconds"), [(0, {}), (1, {"a": [(1.0, 1.0), (2.0, 2.0)]})])
def test_fewer_than_two_configurations_are_refused(
    count: int, seconds: dict[str, list[tuple[float, float]]]
) -> None:
    with pytest.raises(ValueError, match=f"at least 2 configurations to rank, found {count}"):
        of(**seconds)


def test_two_configurations_with_one_seed_have_no_interval() -> None:
    found = of(a=[(1.0, 1.0)], b=[(2.0, 2.0)])
    assert found.tau == 1.0
    assert isnan(found.low)
    assert isnan(found.high)


def test_interval_of_tau_comes_from_resampled_seeds() -> None:
    apart = {"a": [(1.0, 1.1), (1.2, 1.3)], "b": [(2.0, 2.1), (2.2, 2.3)]}
    found = of(**apart)
    assert (found.tau, found.low, found.high, found.resampled) == (1.0, 1.0, 1.0, "seeds")
    mixed = {"a": [(1.0, 1.0), (1.0, 5.0), (1.0, 1.0)], "b": [(2.0, 2.0), (2.0, 3.0), (2.0, 4.0)]}
    found = of(**mixed)
    assert (found.tau, found.low, found.high) == (1.0, -1.0, 1.0)  # as the second seed may come thrice
    assert found == of(**mixed)  # the same numbers each time


def test_seeds_are_resampled_only_if_each_configuration_has_several() -> None:
    found = of(a=[(1.0, 1.0), (1.1, 1.1)], b=[(2.0, 2.0)], c=[(3.0, 3.0)])
    assert found.resampled == "configurations"


def test_times_to_the_target_are_interpolated(directory: Path) -> None:
    run = load(directory)
    found = times(["fedbuff"], [run], [run], 0.8)
    # 10 % at 0 s, 85 % at 5 s
    assert found.to_dict("list") == {
        "configuration": ["fedbuff"],
        "predicted": [pytest.approx(5 * 0.7 / 0.75)],
        "measured": [pytest.approx(5 * 0.7 / 0.75)],
    }
    assert times(["fedbuff"], [run], [run], 0.9)["measured"].tolist() == [inf]
