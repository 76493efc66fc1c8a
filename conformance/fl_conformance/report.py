"""Output of the command: text for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fl_conformance.adapter import Vector
from fl_conformance.checking import FirstDifference, RuleResult, ScenarioResult
from fl_conformance.faults import FAULTS, Explanation
from fl_conformance.scenario import (
    ClientJoined,
    ClientLeft,
    ModelSent,
    NewVersion,
    RuleFile,
    Scenario,
    ScenarioEvent,
    UpdateReceived,
)

_CAUSES = 3
"""Likely causes that are shown for one scenario."""
_UNKNOWN = (
    "No known mistake, and no pair of known mistakes, gives these models. Compare the steps above with "
    "the equation."
)


def listing(files: Sequence[RuleFile]) -> str:
    lines: list[str] = []
    for file in files:
        lines.append(f"{file.rule}: {file.equation}  ({file.paper})")
        lines += [f"    {one.name}: {one.about}" for one in file.scenarios]
    return "\n".join(lines)


def text(result: RuleResult) -> str:
    lines = [f"{result.file.rule}: {result.file.equation}  ({result.file.paper})"]
    for one in result.results:
        lines += _scenario_lines(one)
    return "\n".join(lines)


def summary(results: Sequence[RuleResult]) -> str:
    outcomes = [one.outcome for result in results for one in result.results]
    counted = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
    return f"{len(outcomes)} scenarios: " + ", ".join(f"{n} {outcome}" for outcome, n in counted.items())


def document(results: Sequence[RuleResult]) -> dict[str, Any]:
    return {
        "rules": [
            {
                "rule": result.file.rule,
                "paper": result.file.paper,
                "equation": result.file.equation,
                "scenarios": [_scenario_document(one) for one in result.results],
            }
            for result in results
        ]
    }


def _scenario_lines(result: ScenarioResult) -> list[str]:
    name = f"  {result.scenario.name}"
    if result.outcome == "conforms":
        return [f"{name}: conforms ({result.checks} models compared)"]
    if result.difference is None:
        return [f"{name}: {result.outcome}: {result.reason}"]
    difference = result.difference
    lines = [f"{name}: differs. {result.scenario.about}"]
    parameters = ", ".join(
        f"{key}: {value}" for key, value in result.scenario.setting.parameters.items()
    )
    lines.append(f"    parameters: {parameters or 'the defaults'}")
    events = result.scenario.events[: difference.check.event + 1]
    lines += [f"    {event.at:>5g} s  {_event_text(event)}" for event in events]
    lines += [f"             {line}" for line in _difference_lines(difference)]
    if result.reason:
        lines.append(f"    later the adapter failed: {result.reason}")
    shown = result.explanations[:_CAUSES]
    if not shown:
        return [*lines, f"    likely cause: {_UNKNOWN}"]
    for number, explanation in enumerate(shown):
        title = "likely cause" if number == 0 else "or"
        lines.append(f"    {title}: {cause_text(explanation)} ({_strength(explanation, result)})")
    return lines


def cause_text(explanation: Explanation) -> str:
    return " Also: ".join(FAULTS[name] for name in FAULTS if name in explanation.cause)


def _strength(explanation: Explanation, result: ScenarioResult) -> str:
    if explanation.matched == result.checks:
        return f"gives exactly these models, in all {result.checks} comparisons"
    return f"gives these models in the first {explanation.matched} of {result.checks} comparisons"


def _difference_lines(difference: FirstDifference) -> list[str]:
    check = difference.check
    receiver = "" if check.client is None else f" that {check.client} is sent"
    lines = [
        f"model{receiver}, expected version {check.version}: {_numbers(check.expected)}",
        f"the adapter has:     {_numbers(difference.found)}",
    ]
    if difference.same_as is not None and difference.same_as != check.version:
        lines.append(f"this is the model of version {difference.same_as}")
    elif difference.weights is not None:
        lines.append(f"this is               {difference.weights}")
    return lines


def _event_text(event: ScenarioEvent) -> str:
    match event:
        case ModelSent(_, client, version):
            return f"{client} is sent version {version}"
        case UpdateReceived(_, update):
            return (
                f"{update.client} hands in {update.kind} {_numbers(update.vector)}, "
                f"trained from version {update.base_version}"
            )
        case ClientJoined(_, client):
            return f"{client} joins"
        case ClientLeft(_, client, memory):
            return f"{client} leaves" + ("" if memory is None else f" and hands in {_numbers(memory)}")
        case NewVersion(_, version, _, equation):
            return f"version {version}: {equation}"


def _numbers(vector: Vector) -> str:
    return "[" + ", ".join(f"{value:.8g}" for value in vector) + "]"


def _scenario_document(result: ScenarioResult) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": result.scenario.name,
        "outcome": result.outcome,
        "checks": result.checks,
        "reason": result.reason or None,
        "difference": None,
        "causes": [
            {
                "names": sorted(explanation.cause),
                "text": cause_text(explanation),
                "matched": explanation.matched,
            }
            for explanation in result.explanations
        ],
    }
    if result.difference is not None:
        check = result.difference.check
        content["difference"] = {
            "at": check.at,
            "client": check.client,
            "version": check.version,
            "equation": _equation(result.scenario, check.version),
            "expected": check.expected.tolist(),
            "found": result.difference.found.tolist(),
            "found_as": result.difference.weights,
        }
    return content


def _equation(scenario: Scenario, version: int) -> str | None:
    made = [one for one in scenario.events if isinstance(one, NewVersion) and one.version == version]
    return made[0].equation if made else None
