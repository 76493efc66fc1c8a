"""Write the conformance kit's scenarios anew: `python -m tests.conformance.record`.

What clients do (`receive`, `join`, `leave`) is kept as the files have it. What the core sends and makes
is recorded again. A new scenario is written by hand into the file of its rule, with what clients do; an
event with `at` alone lets time pass until then.
"""

from __future__ import annotations

from typing import Any

import yaml

from agents.rules import RULES
from fl_conformance.scenario import FOLDER, FORMAT, rule_names
from tests.conformance.recording import Recorder

_HEAD = "# Written by `python -m tests.conformance.record`; fl_conformance/scenario.py reads it.\n"


def text(rule: str) -> str:
    """Return the file of `rule`, with one event per line."""
    lines = [
        f"format: {FORMAT}",
        f"rule: {rule}",
        f"paper: {_flow(RULES[rule].paper)}",
        f"equation: {_flow(RULES[rule].equation)}",
        "tolerance: {relative: 1.0e-5, absolute: 1.0e-6}",
        "scenarios:",
    ]
    for content in yaml.safe_load((FOLDER / f"{rule}.yaml").read_text(encoding="utf-8"))["scenarios"]:
        scenario = Recorder(rule, content).record()
        events = scenario.pop("events")
        for mark, (key, value) in zip(["-", *[" "] * len(scenario)], scenario.items(), strict=False):
            lines.append(f"{mark} {key}: {_flow(value)}")
        lines += ["  events:", *(f"  - {_flow(event)}" for event in events)]
    return _HEAD + "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    dumped = yaml.safe_dump(
        value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True
    )
    return dumped.removesuffix("\n...\n").strip()


def main() -> None:
    for rule in rule_names():
        (FOLDER / f"{rule}.yaml").write_text(text(rule), encoding="utf-8")


if __name__ == "__main__":
    main()
