"""Holds an adapter against the recorded scenarios of a rule."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fl_conformance.adapter import Adapter, Vector
from fl_conformance.faults import Cause, Explanation, explain, fit
from fl_conformance.scenario import ConformanceError, RuleFile, Scenario, load
from fl_conformance.steps import Check, Tolerance, checks, observe

_HERE = Path(__file__).parent
_LONGEST_MESSAGE = 2000
"""Characters of an exception's message."""
Outcome = Literal["conforms", "differs", "skipped", "failed"]


@dataclass(frozen=True)
class FirstDifference:
    """The first check at which the adapter's model differs from the recorded one."""

    number: int
    check: Check
    found: Vector
    """The adapter's model, shape (d,)."""
    same_as: int | None
    """Version of the scenario that has this model."""
    weights: str | None
    """The adapter's model as a sum of updates, for people."""


@dataclass
class ScenarioResult:
    scenario: Scenario
    outcome: Outcome
    checks: int = 0
    """Comparisons that were made."""
    reason: str = ""
    """Why the scenario was skipped, or how the adapter failed."""
    difference: FirstDifference | None = None
    explanations: Sequence[Explanation] = ()
    """Likely causes of the difference, the likeliest first; empty if no known mistake explains it."""


@dataclass
class RuleResult:
    file: RuleFile
    results: list[ScenarioResult] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """2 if an adapter failed or no scenario ran, 1 if a model differed, otherwise 0."""
        outcomes = {result.outcome for result in self.results}
        if "failed" in outcomes or outcomes <= {"skipped"}:
            return 2
        return 1 if "differs" in outcomes else 0


def check(
    adapter: Callable[[], Adapter],
    rule: str,
    scenario: str | None = None,
    tolerance: Tolerance | None = None,
) -> RuleResult:
    """Hold an implementation of `rule` against its scenarios, with a new adapter for each.

    `scenario`: name of the only scenario to run; None for all. `tolerance`: how far a model may be off;
    None for the tolerance of the rule's file. Raises ConformanceError if the rule or scenario is
    unknown.
    """
    file = load(rule)
    tolerance = tolerance or Tolerance(file.relative, file.absolute)
    names = [one.name for one in file.scenarios]
    if scenario is not None and scenario not in names:
        raise ConformanceError(
            f"--scenario {scenario}: {rule} has no such scenario, expected {', '.join(names)}"
        )
    chosen = [one for one in file.scenarios if scenario in (None, one.name)]
    result = RuleResult(file, [_run(adapter, one, tolerance) for one in chosen])
    _rank(result.results)
    return result


def _run(make: Callable[[], Adapter], scenario: Scenario, tolerance: Tolerance) -> ScenarioResult:
    points = checks(scenario)
    observed: list[Vector] = []
    call, failure = "making the adapter", ""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            for step in observe(make(), scenario):
                if isinstance(step, str):
                    call = step
                else:
                    observed.append(step)
    except NotImplementedError as error:
        if call in ("making the adapter", "start"):
            return ScenarioResult(scenario, "skipped", reason=_message(error) or "not implemented")
        failure = f"{call}: {_described(error)}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  whatever foreign code raises
        failure = f"{call}: {_described(error)}"
    for number, (point, found) in enumerate(zip(points, observed, strict=False)):
        if not tolerance.equal(found, point.expected):
            versions = [p.version for p in points if tolerance.equal(found, p.expected)]
            weights = fit(scenario, point, found)
            difference = FirstDifference(
                number, point, found, versions[0] if versions else None, weights
            )
            explanations = explain(scenario, observed, number, tolerance)
            return ScenarioResult(scenario, "differs", len(observed), failure, difference, explanations)
    return ScenarioResult(scenario, "failed" if failure else "conforms", len(observed), failure)


def _rank(results: Sequence[ScenarioResult]) -> None:
    counts: Counter[Cause] = Counter(
        explanation.cause for result in results for explanation in result.explanations
    )
    for result in results:
        result.explanations = sorted(
            result.explanations, key=lambda one: (-counts[one.cause], len(one.cause))
        )


def raised_text(error: BaseException) -> str:
    """Type and message without control characters."""
    return f"{type(error).__name__}: {_message(error)}".removesuffix(": ")


def _message(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  whatever foreign code raises
        message = "its message cannot be read"
    return "".join(sign if sign.isprintable() else " " for sign in message[:_LONGEST_MESSAGE])


def _described(error: BaseException) -> str:
    """Add the last place in the adapter's own code."""
    text = raised_text(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(_HERE)]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text
