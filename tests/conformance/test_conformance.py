"""The testbed's core against the conformance kit's scenarios, and its record of them."""

from __future__ import annotations

import pytest

from agents.rules import RULES
from fl_conformance import check, rule_names
from fl_conformance.scenario import FOLDER
from fl_conformance.steps import Tolerance
from tests.conformance import record
from tests.conformance.core_adapter import Adapter

EXACT = Tolerance(1e-12, 1e-12)


def test_every_rule_has_scenarios() -> None:
    assert rule_names() == sorted(RULES)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_core_has_the_recorded_models(rule: str) -> None:
    result = check(Adapter, rule, tolerance=EXACT)
    assert {one.scenario.name: one.outcome for one in result.results} == dict.fromkeys(
        [one.name for one in result.file.scenarios], "conforms"
    )


@pytest.mark.parametrize("rule", sorted(RULES))
def test_recording_again_gives_the_same_file(rule: str) -> None:
    assert record.text(rule) == (FOLDER / f"{rule}.yaml").read_text(encoding="utf-8")
