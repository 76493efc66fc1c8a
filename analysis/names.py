"""Short names for runs that stand beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.load import Run

_NAMES = (
    ("label",),
    ("label", "settings"),
    ("label", "seed"),
    ("label", "runtime"),
    ("label", "settings", "seed"),
    ("label", "runtime", "seed"),
    ("label", "runtime", "settings"),
    ("topology", "label"),
    ("topology", "label", "settings"),
    ("topology", "label", "seed"),
    ("label", "begin"),
)
_MAX_SETTINGS = 3
"""Settings that a name lists; runs that differ in more are told apart by other things."""
_TOLD_OTHERWISE = ("name", "seed", "rule.name", "runtime.name")
"""Settings that other parts of a name tell."""


def distinct(runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by what tells them apart: the label that a sweep has given them, or the rule, then the
    settings that differ, seed, runtime and topology, else when they began, or the run directory."""
    settings = _differing(runs)
    for parts in _NAMES:
        named = {}
        for run in runs:
            texts = [_part(run, part, settings) for part in parts]
            named[" ".join(filter(None, texts))] = run
        if len(named) == len(runs):
            return named
    named = {run.name: run for run in runs}
    return named if len(named) == len(runs) else {str(run.path): run for run in runs}


def by_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by their settings, their own code and data files, and their runtime but for the seed, each
    set with a short name."""
    sets: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.topology.items() if key != "seed"}
        others = [run.manifest.get(key) for key in ("code", "data_files", "runtime")]
        sets.setdefault(repr((settings, others)), []).append(run)
    return dict(zip(distinct([same[0] for same in sets.values()]), sets.values(), strict=True))


def _differing(runs: Sequence[Run]) -> dict[int, str]:
    """In words, and by the id of each run, what few settings it has otherwise than the others; empty
    where these are none or many."""
    if len(runs) < 2:
        return {}
    leaves = [dict(_leaves(run.topology)) for run in runs]
    known = dict.fromkeys(path for of_run in leaves for path in of_run if path not in _TOLD_OTHERWISE)
    differing = [path for path in known if len({repr(of_run.get(path)) for of_run in leaves}) > 1]
    if len(differing) > _MAX_SETTINGS:
        return {}
    last = [path.rpartition(".")[2] for path in differing]
    names = last if len(set(last)) == len(last) else differing
    return {
        id(run): ", ".join(
            f"{name} {_text(of_run.get(path))}"
            for path, name in zip(differing, names, strict=True)
            if path in of_run
        )
        for run, of_run in zip(runs, leaves, strict=True)
    }


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values with their path: `devices.pi.cpu`, entries of a list by their name where they have one,
    else by their place."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            name = inner.get("name", place) if isinstance(inner, Mapping) else place
            yield from _leaves(inner, f"{path}.{name}")
    else:
        yield path, value


def _text(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _part(run: Run, part: str, settings: Mapping[int, str]) -> str:
    match part:
        case "label":
            return str(run.manifest.get("label") or run.topology.get("rule", {}).get("name", "?"))
        case "settings":
            return settings.get(id(run), "")
        case "runtime":
            return str(run.manifest.get("runtime", "?"))
        case "seed":
            return f"seed {run.topology.get('seed', '?')}"
        case "begin":  # a run id is the topology's name, date, time, and some digits
            return run.name.removeprefix(f"{run.topology.get('name')}-")
    return str(run.topology.get("name", run.name))
