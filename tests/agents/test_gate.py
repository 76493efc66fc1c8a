"""Who may send how much to the aggregator."""

from __future__ import annotations

import pytest

from agents.aggregator.gate import Gate


def test_who_answers_what_it_was_sent_may_do_so_at_any_rate() -> None:
    gate = Gate()
    for number in range(10_000):
        assert gate.passes("a", at=number / 10_000)
        gate.answers("a")
    assert not gate.floods("a")


@pytest.mark.parametrize("rate", [20.0, 1e6])
def test_who_sends_what_nobody_asked_for_is_refused_and_shut_out_and_nobody_else(rate: float) -> None:
    gate = Gate()
    passed = tried = 0
    while not gate.floods("flooding"):
        tried += 1
        passed += gate.passes("flooding", at=tried / rate)
    assert passed == pytest.approx(100 + 10 * tried / rate, abs=1)
    assert tried - passed == 1000
    gate.shut_out("flooding")
    assert not gate.floods("flooding")  # once
    assert not gate.passes("flooding", at=1e9)
    assert gate.passes("a", at=tried / rate)


def test_a_flood_is_over_when_hardly_anything_comes_of_it() -> None:
    gate = Gate()
    assert gate.subsided() is None
    gate.shut_out("a")
    for number in range(50):
        gate.passes("a", at=number)
    assert gate.subsided() is None
    for number in range(3):  # a new client of it says that it is there
        gate.passes("a", at=number)
    assert gate.subsided() == 53
    assert gate.subsided() is None


def test_who_was_started_anew_is_let_in_and_may_be_shut_out_again() -> None:
    gate = Gate()
    for _ in range(1100):
        gate.passes("a", at=0.0)
    assert gate.floods("a")
    gate.shut_out("a")
    assert gate.let_in("a")
    assert not gate.let_in("a")
    assert not gate.floods("a")
    assert gate.passes("a", at=1000.0)
