"""Outcome of the sums that a rule requests, as clients answer and leave. All masks and shares are 0
here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.aggregator.dispatches import Losses
from agents.models import vectors
from agents.models.vectors import Vector
from agents.rules.interface import Contribution, SumUp
from agents.secure.arithmetic import FIELD, SecureRun
from agents.secure.secure_messages import Masked
from agents.secure.server import SecureSums, SumBegun, SumLost, SumOpened
from tests.agents.helpers import message

_CLIENTS = ["a", "b", "c", "d"]
_SETTINGS = SecureRun(
    clients=_CLIENTS,
    updates=2,
    weights=2,
    colluding=1,
    needed=3,
    range=127.0,
    bits=8,
    timeout=30.0,
)
_SHARE = np.zeros(2, np.uint32)


def sums_of(*clients: str) -> SecureSums:
    """Sums that have received an update of each of `clients`: 1 in three places, answering dispatch 1.
    All clients have a share of its mask."""
    sums = SecureSums(_SETTINGS, 3)
    for client in clients:
        masked = Masked(np.ones(3, np.uint32), holders=(0, 1, 2, 3), outside=0)
        vector = sums.receive(client, message(client, 1), masked.encoded, None)
        assert not isinstance(vector, str)
    return sums


def wanted(*clients: str, weight: float = 1.0) -> SumUp:
    return SumUp(tuple(Contribution(client, 1, 0, weight) for client in clients))


def begun(sums: SecureSums, *clients: str) -> SumBegun:
    asked = sums.begin(wanted(*clients), set(_CLIENTS))
    assert isinstance(asked, SumBegun)
    return asked


def test_the_sum_has_the_weights_that_were_used_up_to_rounding() -> None:
    sums = sums_of("a", "b")
    asked = sums.begin(
        SumUp((Contribution("a", 1, 0, 1.0), Contribution("b", 1, 0, 0.6))), set(_CLIENTS)
    )
    assert isinstance(asked, SumBegun)
    assert asked.updates == [("a", 1, 2), ("b", 1, 1)]
    assert sums.answer(asked.number, "a", _SHARE) is sums.answer(asked.number, "b", _SHARE) is None
    opened = sums.answer(asked.number, "c", _SHARE)
    assert isinstance(opened, SumOpened)
    assert [used.weight for used in opened.wanted.contributions] == [1.0, 0.5]
    assert opened.total.tolist() == [1.5, 1.5, 1.5]


@pytest.mark.parametrize(
    ("words", "holders", "outside", "problem"),
    [
        ([1, 2], (0, 1, 2), 0, "another model: 2 parameters, expected 3"),
        ([0, 2**31 - 1, 0], (0, 1, 2), 0, "word 2147483647 is not below p = 2147483647"),
        ([1, 1, 1], (0, 1, 2), -1, vectors.DIVERGED),
        ([1, 1, 1], (0, 1, 2), 4, "outside is 4, expected from 0 to 3"),
        ([1, 1, 1], (0, 1, 2), -2, "outside is -2, expected from 0 to 3"),
        ([1, 1, 1], (0, 1, 4), 0, "holders: a client that is not in this run"),
        (
            *([1, 1, 1], (0, 1), 0),
            "only 2 clients have a share of its mask, expected at least 3: too many clients are absent",
        ),
        ([0, 2**31 - 2, 0], (0, 1, 3), 3, None),
    ],
)
def test_updates_that_cannot_form_a_sum_are_refused(
    words: list[int], holders: tuple[int, ...], outside: int, problem: str | None
) -> None:
    masked = Masked(np.array(words, np.uint32), holders, outside)
    assert SecureSums(_SETTINGS, 3).problem_with(masked) == problem


def _opened(sums: SecureSums, weights: Sequence[float], words: Sequence[int]) -> Vector | str:
    """A sum of updates of a, b, …, each of three equal words, whose masks are 0; why it is lost."""
    for client, word in zip(_CLIENTS, words, strict=False):
        masked = Masked(np.full(3, word, np.uint32), (0, 1, 2, 3), 0)
        assert not isinstance(sums.receive(client, message(client, 1), masked.encoded, None), str)
    used = zip(_CLIENTS, weights, strict=False)
    asked = sums.begin(SumUp(tuple(Contribution(name, 1, 0, w) for name, w in used)), set(_CLIENTS))
    assert isinstance(asked, SumBegun)
    ends = [sums.answer(asked.number, client, _SHARE) for client in ("a", "b", "c")]
    assert ends[:2] == [None, None]
    if isinstance(ends[2], SumOpened):
        return ends[2].total
    assert isinstance(ends[2], SumLost)
    return ends[2].reason.partition("was wrong: ")[2]


def test_weights_of_a_sum_are_scaled_to_the_largest() -> None:
    """This includes sums without the largest weight, and weights rounded up to the smallest, 1/64."""
    sums = SecureSums(replace(_SETTINGS, weights=64), 3)
    total = _opened(sums, [0.5, 0.25, 0.25], [64, 32, 0])
    assert isinstance(total, np.ndarray)
    assert total.tolist() == [40.0] * 3  # 0.5 · 64 + 0.25 · 32
    total = _opened(sums, [0.001, 0.0, 1 / 64], [64, 64, 64])
    assert isinstance(total, np.ndarray)
    assert total.tolist() == [3.0] * 3


def test_dominating_update_is_lowered_and_recorded_with_its_weight() -> None:
    sums = SecureSums(replace(_SETTINGS, weights=64), 3)
    for client in ("a", "b", "c"):
        masked = Masked(np.full(3, 64, np.uint32), (0, 1, 2, 3), 0)
        assert not isinstance(sums.receive(client, message(client, 1), masked.encoded, None), str)
    weights = {"a": 1.0, "b": 0.25, "c": 0.125}
    asked = sums.begin(
        SumUp(tuple(Contribution(name, 1, 0, weight) for name, weight in weights.items())), set(_CLIENTS)
    )
    assert isinstance(asked, SumBegun)
    assert asked.updates == [("a", 1, 24), ("b", 1, 16), ("c", 1, 8)]
    for client in ("a", "b"):
        assert sums.answer(asked.number, client, _SHARE) is None
    opened = sums.answer(asked.number, "d", _SHARE)
    assert isinstance(opened, SumOpened)
    assert [used.weight for used in opened.wanted.contributions] == [0.375, 0.25, 0.125]
    assert opened.total.tolist() == [48.0] * 3


def test_sum_beyond_the_range_of_its_updates_is_wrong() -> None:
    """With steps of 1 from −127 to 127, two updates of weight 2/2 sum to at most 4 · 127."""
    sums = SecureSums(_SETTINGS, 3)
    for words in ([127, 127], [FIELD.p - 127, FIELD.p - 127], [254, 0]):
        assert isinstance(_opened(sums, [1.0, 1.0], words), np.ndarray)
    for words in ([127, 128], [FIELD.p - 127, FIELD.p - 128], [2**29, 0]):
        problem = _opened(sums, [1.0, 1.0], words)
        assert problem == "3 of 3 coordinates are larger than its updates can add up to"
    assert isinstance(_opened(sums, [1.0, 0.5], [127, 127]), np.ndarray)  # 2 · 127 + 127
    assert isinstance(_opened(sums, [1.0, 0.5], [127, 128]), str)
    assert not sums.waiting


def test_sum_longer_than_its_clipped_updates_is_wrong() -> None:
    """Updates of length 10√3 at most: with weights 1 and 0.5, sums of 15√3."""
    sums = SecureSums(replace(_SETTINGS, norm=10 * 3**0.5), 3)
    assert isinstance(_opened(sums, [1.0, 0.5], [10, 10]), np.ndarray)
    problem = _opened(sums, [1.0, 0.5], [10, 11])
    assert problem == "its norm is 26.8, but its clipped updates add up to 26 at most"


def test_wrong_sum_is_not_applied_and_all_suspects_are_named() -> None:
    sums = sums_of("a", "b")
    number = begun(sums, "a", "b").number
    assert sums.answer(number, "d", np.array([0, 2**29], np.uint32)) is None
    assert sums.answer(number, "b", _SHARE) is None
    lost = sums.answer(number, "a", _SHARE)
    assert isinstance(lost, SumLost)
    assert lost.reason.startswith("is lost because an update or an answer was wrong: ")
    assert lost.reason.endswith(" of 3 coordinates are larger than its updates can add up to")
    assert lost.answered == ("a", "b", "d")
    assert lost.wanted.contributions == wanted("a", "b").contributions
    assert not sums.waiting
    assert sums.answer(number, "c", _SHARE) is None


_EVENTS = st.lists(
    st.tuples(st.sampled_from(_CLIENTS), st.sampled_from(["answers", "cannot", "leaves"])), max_size=8
)


@given(_EVENTS)
def test_sum_opens_with_three_answers_and_is_lost_without_two_clients(
    events: list[tuple[str, str]],
) -> None:
    """The first condition that holds counts; a client that has answered may leave."""
    sums = sums_of("a", "b")
    number = begun(sums, "a", "b").number
    answered: set[str] = set()
    unable: set[str] = set()
    for client, what in events:
        known = client in answered | unable
        assert sums.is_waiting_for(client, number) == (number in sums.waiting and not known)
        if what == "leaves":
            came: SumOpened | SumLost | None = next(iter(sums.remove_client(client)), None)
        else:
            came = sums.answer(number, client, _SHARE if what == "answers" else None)
        if not known:
            (answered if what == "answers" else unable).add(client)
        if len(answered) == 3:
            assert isinstance(came, SumOpened)
        elif len(unable) == 2:
            assert isinstance(came, SumLost)
            assert came.wanted.contributions == wanted("a", "b").contributions
            assert came.reason == (
                f"is lost: {len(answered)} of 2 possible clients have answered, expected at least 3 "
                "answers"
            )
        else:
            assert came is None
        if came is not None:
            assert number not in sums.waiting
            assert sums.answer(number, "d", _SHARE) is None  # late
            assert sums.remove_client("d") == []
            return


def test_departed_client_is_not_asked_for_earlier_shares() -> None:
    sums = sums_of("a", "b")
    assert sums.remove_client("d") == []
    masked = Masked(np.ones(3, np.uint32), holders=(0, 1, 2, 3), outside=0)
    assert not isinstance(sums.receive("c", message("c", 1), masked.encoded, None), str)
    assert begun(sums, "b", "c").holders == {"a", "b", "c"}
    sums = sums_of("a", "b")
    asked = sums.begin(wanted("a", "b"), {"a", "b", "c"})
    assert isinstance(asked, SumBegun)
    assert asked.holders == {"a", "b", "c"}


def test_sum_with_too_few_share_holders_is_lost_at_once() -> None:
    lost = sums_of("a", "b").begin(wanted("a", "b"), {"a", "b"})
    assert isinstance(lost, SumLost)
    assert lost.reason == ("is lost: 0 of 2 possible clients have answered, expected at least 3 answers")


def test_one_missing_client_blocks_several_sums() -> None:
    sums = sums_of("a", "b", "c", "d")
    numbers = [begun(sums, "a", "b").number, begun(sums, "c", "d").number]
    assert sums.remove_client("a") == []
    assert [lost.number for lost in sums.remove_client("d")] == numbers
    assert not sums.waiting


def test_only_the_sum_that_timed_out_is_lost() -> None:
    sums = sums_of("a", "b", "c", "d")
    first, second = begun(sums, "a", "b").number, begun(sums, "c", "d").number
    assert sums.give_up(first).number == first
    assert set(sums.waiting) == {second}


def test_updates_ignored_by_the_rule_are_in_no_sum() -> None:
    sums = sums_of("a", "b")
    sums.drop_update("a", 1)
    sums.drop_update("a", 1)
    with pytest.raises(KeyError):
        sums.begin(wanted("a", "b"), set(_CLIENTS))


def test_shares_must_have_equal_lengths() -> None:
    assert sums_of().problem_with_shares(_SHARE) is None
    assert (
        sums_of().problem_with_shares(np.zeros(3, np.uint32)) == "sum of shares has 3 words, expected 2"
    )


def test_loss_notice_is_repeated_until_the_client_answers_it() -> None:
    losses = Losses()
    losses.add("a", 1)
    losses.confirm("a", 4)  # an answer to what was sent before the loss was known
    assert losses.announce("a", 5) == (1,)
    losses.add("a", 2)
    assert losses.announce("a", 6) == (1, 2)
    assert losses.announce("b", 7) == ()
    losses.confirm("a", 5)
    assert losses.announce("a", 8) == (2,)
    losses.confirm("a", 8)
    assert losses.announce("a", 9) == ()
    losses.add("a", 3)
    losses.forget("a")
    assert losses.announce("a", 10) == ()
