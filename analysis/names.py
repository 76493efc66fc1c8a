"""Short names for runs that stand beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.load import Run

_NAMES = (
    ("label",),
    ("label", "seed"),
    ("label", "runtime"),
    ("label", "runtime", "seed"),
    ("topology", "label"),
    ("topology", "label", "seed"),
)


def distinct(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by what tells them apart: the label that a sweep has given them, or the rule, then seed,
    runtime and topology, else the run directory."""
    for parts in _NAMES:
        named = {" ".join(_part(run, part) for part in parts): run for run in runs}
        if len(named) == len(runs):
            return named
    return {run.name: run for run in runs}


def by_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by their settings and their runtime but for the seed, each set with a short name."""
    sets: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.topology.items() if key != "seed"}
        sets.setdefault(repr((settings, run.manifest.get("runtime"))), []).append(run)
    return dict(zip(distinct([same[0] for same in sets.values()]), sets.values(), strict=True))


def _part(run: Run, part: str) -> str:
    match part:
        case "label":
            return str(run.manifest.get("label") or run.topology.get("rule", {}).get("name", "?"))
        case "runtime":
            return str(run.manifest.get("runtime", "?"))
        case "seed":
            return f"seed {run.topology.get('seed', '?')}"
    return str(run.topology.get("name", run.name))
