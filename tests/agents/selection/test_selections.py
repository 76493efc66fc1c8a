"""The selections, against numbers computed by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agents.selection.charged import Charged
from agents.selection.fastest import Fastest
from agents.selection.interface import Draw, by_weight
from agents.selection.oort import Oort, statistical_utility
from agents.selection.round_robin import RoundRobin
from agents.selection.tifl import Tifl
from agents.selection.uniform import UniformSelection
from tests.agents.selection.helpers import choose, draw, make_draws, view


def test_uniform_makes_the_draw_of_the_rule() -> None:
    seen = view(a={}, b={}, c={})
    wanted = Draw(["a", "b", "c"], 2, of_rule=lambda _: ["c", "a"])
    assert UniformSelection().choose(wanted, seen, np.random.default_rng(0)) == ["c", "a"]
    others = {*choose(UniformSelection(), seen, 2)}  # some idle client is not eligible
    assert len(others) == 2
    assert others < {"a", "b", "c"}


def test_round_robin_gives_each_client_its_turn() -> None:
    draws = make_draws(RoundRobin())
    assert [draw(draws, 3) for _ in range(4)] == [[*"abc"], [*"dab"], [*"cda"], [*"bcd"]]
    assert draw(draws, 2, idle="bd") == ["b", "d"]  # fewer are idle; both had a turn in the last draw
    assert draw(draws, 1, idle="abd") == ["a"]


def test_fastest_measures_each_client_once_and_takes_the_fastest_then() -> None:
    seen = view(
        slow={"mean_duration": 9.0, "chosen": 1},
        new={},
        fast={"mean_duration": 2.0, "chosen": 3},
        dead={"chosen": 1},  # has never answered
        other={"mean_duration": 2.0, "chosen": 1},
    )
    order = ["new", "fast", "other", "slow", "dead"]
    assert choose(Fastest(), seen, 5, idle="") == order
    assert [*Fastest().choose(Draw(order[1:], 2), seen, np.random.default_rng(0))] == ["fast", "other"]
    first = view(a={}, b={}, c={})  # before anyone has a duration
    assert choose(Fastest(), first, 2) == ["a", "b"]


def test_fastest_explores_with_the_probability_that_it_is_given() -> None:
    seen = view(**{name: {"mean_duration": float(k), "chosen": 1} for k, name in enumerate("abcd")})
    picked = Counter(choose(Fastest(explore=0.4), seen, 1, seed=k)[0] for k in range(2000))
    assert picked["a"] / 2000 == pytest.approx(0.6 + 0.4 / 4, abs=0.03)
    assert picked["d"] / 2000 == pytest.approx(0.4 / 4, abs=0.02)


def test_charged_excludes_low_batteries_until_a_report_or_the_recheck() -> None:
    seen = view(
        at=1000.0,
        full={"battery": 1.0},
        low={"battery": 0.19, "battery_at": 500.0},
        edge={"battery": 0.2},
        mains={},
        stale={"battery": 0.0, "battery_at": 400.0},
    )
    names = [*seen.clients]
    assert Charged(minimum=0.2).eligible(names, seen) == ["full", "edge", "mains", "stale"]
    assert Charged(minimum=0.2, recheck=None).eligible(names, seen) == ["full", "edge", "mains"]


def test_charged_by_level_draws_in_proportion_to_the_level() -> None:
    seen = view(a={"battery": 0.9}, b={"battery": 0.3})
    picked = Counter(choose(Charged(weight="level"), seen, 1, seed=k)[0] for k in range(2000))
    assert picked["a"] / 2000 == pytest.approx(0.75, abs=0.03)


def test_weights_of_zero_come_last_and_all_zero_is_uniform() -> None:
    rng = np.random.default_rng(0)
    assert by_weight("abc", [0.0, 2.0, 0.0], 1, rng) == ["b"]
    assert sorted(by_weight("abc", [0.0, 1e300, 1e-300], 3, rng)) == [*"abc"]
    assert len(by_weight("abc", [0.0, 0.0, 0.0], 2, rng)) == 2
    assert by_weight("", [], 2, rng) == []


# Oort

KNOWN = {"chosen": 1, "samples": 10}


def test_oort_utility_is_the_published_formula() -> None:
    """S = 10·(1, 2, 4) scaled to 0, 1/3, 1; R = 10, and the clients had their last turn in draw 5, 5 and
    2. With percentile 50 the preferred duration of 1, 2, 8 s is 2 s."""
    seen = view(
        draw=10,
        a=KNOWN | {"loss": 1.0, "last_draw": 5, "duration": 1.0},
        b=KNOWN | {"loss": 2.0, "last_draw": 5, "duration": 2.0},
        c=KNOWN | {"loss": 4.0, "last_draw": 2, "duration": 8.0},
    )
    oort = Oort(percentile=50.0, alpha=2.0)
    assert oort.preferred(seen) == 2.0
    assert oort.utilities("abc", seen) == pytest.approx(
        {
            "a": math.sqrt(0.1 * math.log(10) / 5),
            "b": 1 / 3 + math.sqrt(0.1 * math.log(10) / 5),
            "c": (1 + math.sqrt(0.1 * math.log(10) / 2)) * (2 / 8) ** 2,
        }
    )
    without = replace(oort, alpha=0.0).utilities("abc", seen)
    assert without["c"] == pytest.approx(1 + math.sqrt(0.1 * math.log(10) / 2))


def test_oort_exploration_decays_and_goes_to_clients_that_were_never_chosen() -> None:
    oort = Oort()
    assert [oort.epsilon(1), oort.epsilon(2), oort.epsilon(1000)] == pytest.approx([0.9, 0.882, 0.2])
    first = view(a={}, b={}, c={})
    assert {*choose(oort, first, 3)} == {*"abc"}  # nobody is known yet
    seen = view(draw=1000, a=KNOWN | {"loss": 1.0, "last_draw": 9}, b={}, c={}, d={})
    explored = [name for k in range(500) for name in choose(oort, seen, 1, seed=k) if name != "a"]
    assert len(explored) / 500 == pytest.approx(0.2, abs=0.05)
    assert {*explored} == {*"bcd"}
    without = replace(oort, exploration=0.0, exploration_min=0.0)
    assert len(choose(without, seen, 3)) == 3  # too few are known: new ones fill the places
    all_known = view(draw=1000, a=KNOWN | {"loss": 1.0}, b=KNOWN | {"loss": 3.0})
    assert {*choose(oort, all_known, 2)} == {"a", "b"}  # nobody is left to explore


def test_oort_admits_clients_near_the_utility_of_the_last_place() -> None:
    losses = {"a": 10.0, "b": 9.9, "c": 1.0, "d": 0.0}
    known = {name: KNOWN | {"loss": loss, "last_draw": 999} for name, loss in losses.items()}
    seen, oort = view(draw=1000, **known), Oort(exploration=0, exploration_min=0)
    picked = Counter(choose(oort, seen, 1, seed=k)[0] for k in range(400))
    assert {*picked} == {"a", "b"}  # c is below 95 % of a
    assert picked["a"] / 400 == pytest.approx(0.5, abs=0.1)


def test_oort_caps_the_utility_of_outliers_and_ignores_unusable_losses() -> None:
    draws = make_draws(Oort())
    for client, loss in (("a", 1e38), ("b", math.nan), ("c", math.inf), ("d", -5.0)):
        draws.note_round(client, loss=loss, took=1, staleness=0)
    losses = [draws.view.clients[c].loss for c in "abcd"]
    assert losses == [1e38, None, None, None]
    assert statistical_utility(draws.view.clients["b"]) == 0.0
    names = [f"c{k}" for k in range(40)]
    seen = view(draw=100, **{name: KNOWN | {"loss": 1.0, "last_draw": 99} for name in names})
    seen.clients["c0"].loss, seen.clients["c1"].loss = 1e38, 2.0
    seen.clients["c2"].loss = 0.5
    utility = Oort().utilities(names, seen)
    assert max(utility.values()) < 1.1
    assert utility["c0"] == utility["c1"] > utility["c3"]  # capped at 10·2


def test_oort_pacer_raises_the_percentile_when_utility_falls() -> None:
    oort = Oort(window=2, percentile=10.0, pacer_step=30.0, exploration=0, exploration_min=0)
    seen = view(a=KNOWN | {"loss": 8.0, "last_draw": 1})
    raised = []
    for number, loss in enumerate((8.0, 8.0, 1.0, 1.0, 9.0, 9.0, 2.0, 2.0, 2.0, 2.0), 1):
        seen.draw, seen.clients["a"].loss = number, loss
        choose(oort, seen, 1)
        raised.append(seen.memory.get("percentile", 10.0))
    assert raised == [10.0, 10.0, 10.0, 40.0, 40.0, 40.0, 40.0, 70.0, 70.0, 70.0]  # equal: not raised


def test_oort_excludes_clients_with_many_updates_but_at_most_30_percent() -> None:
    seen = view(a={"updates": 8}, b={"updates": 9}, c={}, d={})
    assert Oort(most_updates=5).eligible("abcd", seen) == [*"acd"]  # 30 % of 4 is 1
    assert Oort().eligible("abcd", seen) == "abcd"


# TiFL


def test_tifl_tiers_are_equal_parts_by_mean_duration() -> None:
    seconds = {"a": 5.0, "b": 1.0, "c": 3.0, "d": 2.0, "e": None}
    seen = view(**{c: {"mean_duration": s, "chosen": 1} for c, s in seconds.items()}, new={})
    assert Tifl(tiers=2).members(seen) == [["b", "d", "c"], ["a", "e"]]
    assert Tifl(tiers=3).members(seen) == [["b", "d"], ["c", "a"], ["e"]]


def test_tifl_profiles_new_clients_first_and_then_takes_one_tier() -> None:
    seconds = {"a": 1.0, "b": 1.1, "c": 7.0, "d": 7.1}
    known = {c: {"mean_duration": s, "chosen": 1} for c, s in seconds.items()}
    assert {*choose(Tifl(tiers=2), view(**known, x={}, y={}), 2)} == {"x", "y"}
    drawn = {tuple(sorted(choose(Tifl(tiers=2), view(**known), 2, seed=k))) for k in range(30)}
    assert drawn == {("a", "b"), ("c", "d")}
    assert {*choose(Tifl(tiers=2), view(**known), 4)} == {*"abcd"}  # one tier is too small


def test_tifl_credits_bound_the_draws_of_a_tier_until_all_are_spent() -> None:
    seconds = {"a": 1.0, "b": 7.0}
    seen = view(**{c: {"mean_duration": s, "chosen": 1} for c, s in seconds.items()})
    picked = [choose(Tifl(tiers=2, credits=3), seen, 1, seed=k)[0] for k in range(6)]
    assert Counter(picked) == {"a": 3, "b": 3}
    assert seen.memory["credits"] == [0, 0]
    assert choose(Tifl(tiers=2, credits=3), seen, 1)  # renewed
    assert sum(seen.memory["credits"]) == 5


def test_tifl_prefers_tiers_with_a_high_loss_when_progress_stops() -> None:
    """P_t = 2(m + 1 − j)/(m(m + 1)): with m = 3, 1/2, 1/3 and 1/6."""
    tifl = Tifl(tiers=3, interval=10)
    seen = view(
        draw=9,
        a={"mean_duration": 1.0, "chosen": 1, "loss": 1.0},
        b={"mean_duration": 2.0, "chosen": 1, "loss": 3.0},
        c={"mean_duration": 3.0, "chosen": 1, "loss": 2.0},
    )
    for seen.draw in (9, 10):  # the first interval has no losses to compare with
        choose(tifl, seen, 1)
        assert tifl.probabilities(seen) == pytest.approx([1 / 3] * 3)
    assert seen.memory["losses"] == {0: 1.0, 1: 3.0, 2: 2.0}
    seen.draw = 20
    choose(tifl, seen, 1)  # no loss has fallen
    assert tifl.probabilities(seen) == pytest.approx([1 / 6, 1 / 2, 1 / 3])
    for known in seen.clients.values():
        known.loss = 0.1
    seen.draw = 30
    choose(tifl, seen, 1)  # all have fallen: no change
    assert tifl.probabilities(seen) == pytest.approx([1 / 6, 1 / 2, 1 / 3])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Oort(exploration=1.5), "exploration is 1.5, expected from 0 to 1"),
        (lambda: Oort(exploration_min=0.95), "exploration_min is 0.95, but exploration is only 0.9"),
        (lambda: Oort(percentile=101), "percentile is 101"),
        (lambda: Oort(window=0), "window is 0"),
        (lambda: Tifl(tiers=0), "tiers is 0"),
        (lambda: Tifl(tiers=5).check(4), "tiers is 5, but there are only 4 clients"),
        (lambda: Fastest(explore=-0.1), "explore is -0.1"),
        (lambda: Charged(minimum=2.0), "minimum is 2"),
        (lambda: Charged(recheck=0.0), "recheck is 0"),
    ],
)
def test_wrong_parameters_are_refused(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()  # type: ignore[operator]
