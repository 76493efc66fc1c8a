"""Explanations of mutants that no test can kill belong to existing mutants."""

from __future__ import annotations

import sys

import pytest

from tests import mutants


def test_explanations_belong_to_existing_mutants() -> None:
    assert mutants.stale(mutants.EQUIVALENT) == []


def test_explanation_of_a_missing_mutant_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ("agents/aggregator/evaluation.py", "_NICE = 19", "_NICE = 20")
    old = [
        ("agents/aggregator/evaluation.py", "_NICE = 18", "_NICE = 20"),
        ("agents/aggregator/evaluation.py", "_NICE = 19", "_NICE = 21"),
        ("agents/aggregator/gone.py", "_NICE = 19", "_NICE = 20"),
    ]
    assert mutants.stale([old[0], key, *old[1:]]) == old
    monkeypatch.setattr(mutants, "EQUIVALENT", dict.fromkeys(old, "none"))
    monkeypatch.setattr(sys, "argv", ["mutants", "agents/aggregator/evaluation.py"])
    monkeypatch.setattr(mutants, "import_what_is_heavy", lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit, match=r"no mutant any more:\nagents/aggregator/evaluation.py\n"):
        mutants.main()
