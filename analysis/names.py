"""Short names for runs that are shown together."""

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
"""Maximum number of settings in a name. If runs differ in more settings, other parts of the name
distinguish them."""
_SHOWN_OTHERWISE = ("name", "seed", "rule.name", "runtime.name")
"""Settings that are not shown as settings in a name, because other parts of the name show them."""


def distinct(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by short distinct names.

    A name begins with the run's label in a sweep, or with its rule. If needed, it also has the settings
    that differ, the seed, the runtime, the topology or the start time. If that does not distinguish all
    runs, the names are those of the run directories.
    """
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
    """Group runs that differ only in their seed. Such runs have the same settings, user code, data files
    and runtime. Return the sets by short distinct names."""
    sets: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.topology.items() if key != "seed"}
        others = [run.manifest.get(key) for key in ("code", "data_files", "runtime")]
        sets.setdefault(repr((settings, others)), []).append(run)
    return dict(zip(distinct([same[0] for same in sets.values()]), sets.values(), strict=True))


def _differing(runs: Sequence[Run]) -> dict[int, str]:
    """Return a text for each run, with its values of the settings that differ between the runs. The key
    of a run is `id(run)`.

    The mapping is empty for fewer than two runs. It is also empty if more than `_MAX_SETTINGS` settings
    differ.
    """
    if len(runs) < 2:
        return {}
    leaves = [dict(_leaves(run.topology)) for run in runs]
    known = dict.fromkeys(path for of_run in leaves for path in of_run if path not in _SHOWN_OTHERWISE)
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
    """Yield all values with their paths, such as `devices.pi.cpu`. An entry of a list is named by its
    `name`. If it has no name, its index is used."""
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
        case "begin":  # a run id is the topology's name, date, time, and random digits
            return run.name.removeprefix(f"{run.topology.get('name')}-")
    return str(run.topology.get("name", run.name))
