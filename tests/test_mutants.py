"""The explanations of mutants that no test can kill are of mutants that there are."""

from __future__ import annotations

import sys

import pytest

from tests import mutants


def test_each_explanation_is_of_a_mutant_that_there_is() -> None:
    assert mutants.stale(mutants.EQUIVALENT) == []


def test_of_another_line_mutation_or_file_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
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
