"""Short names for runs that are shown together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    ("label", "files"),
    ("label", "settings", "files"),
    ("label", "runtime", "settings", "seed"),
    ("label", "runtime", "settings", "files"),
    ("topology", "label", "runtime", "settings", "files"),
    ("topology", "label", "runtime", "settings", "files", "seed"),
    ("label", "begin"),
)
_MAX_SETTINGS = 3
"""Settings in a name, unless more are needed to distinguish the runs."""
_CHOICES = ("scheme", "kind")
"""Keys that choose the kind of a mapping, which then is one setting, such as `partition: {scheme:
dirichlet, alpha: 0.1}`."""
_SHOWN_OTHERWISE = ("name", "seed", "rule.name", "runtime.name")
"""Settings that other parts of a name show."""


def distinct(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by short distinct names.

    A name begins with the run's label in a sweep, or with its rule, and has as needed: settings that
    differ, the seed, the runtime, the topology or the start time. If that does not distinguish all, the
    names of the run directories are used.
    """
    if (names := _names(runs, _NAMES)) is None:
        names = [run.name for run in runs]
    if len(set(names)) < len(runs):
        names = [str(run.path) for run in runs]
    return dict(zip(names, runs, strict=True))


def by_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Sets of runs that differ only in their seed, with the same settings, user code, data files and
    runtime, by short distinct names."""
    sets: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.topology.items() if key != "seed"}
        others = [run.manifest.get(key) for key in ("code", "data_files", "runtime")]
        sets.setdefault(repr((settings, others)), []).append(run)
    first = [same[0] for same in sets.values()]
    names = _names(first, [parts for parts in _NAMES if not {"seed", "begin"}.intersection(parts)])
    if names is None:  # files differ, but the shown parts of their digests are equal
        names = [f"{_part(run, 'label', {})} #{number}" for number, run in enumerate(first, start=1)]
    return dict(zip(names, sets.values(), strict=True))


def _names(runs: Sequence[Run], choices: Iterable[Sequence[str]]) -> list[str] | None:
    """`choices`: lists of parts of a name. The first one that makes all names distinct is used; None if
    there is none."""
    settings = _differing(runs)
    for parts in choices:
        names = [" ".join(filter(None, (_part(run, part, settings) for part in parts))) for run in runs]
        if len(set(names)) == len(runs):
            return names
    return None


def coordinates(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return for each run the settings in which it differs from the others, as short texts by setting:
    `{"rule": "fedbuff", "partition": "dirichlet 0.1", "lr": "lr 0.06"}`.

    The key `rule` is always present; its text is the variant if all runs are variants of a sweep. A
    setting that follows from those before it is left out.
    """
    columns: dict[str, list[str]] = {"rule": _heads(runs)}
    settings = _setting_texts(runs)
    kept = _needed([*zip(columns["rule"], strict=True)], settings)
    short = _short_names(kept)
    columns |= {short[path]: settings[path] for path in kept}
    others: dict[str, list[str]] = {
        key: [_part(run, key, {}) for run in runs] for key in ("runtime", "files", "topology")
    }
    kept = _needed([*zip(*columns.values(), strict=True)], others)
    columns |= {key: others[key] for key in kept}
    return [
        {key: texts[place] for key, texts in columns.items() if texts[place]}
        for place in range(len(runs))
    ]


def _heads(runs: Sequence[Run]) -> list[str]:
    """Variant of each run, or its rule with the parameters that differ between runs of this rule, but
    without those that all rules have."""
    variants = [str(run.manifest.get("variant") or "") for run in runs]
    if all(variants):
        return variants
    rules = [dict(run.topology.get("rule") or {}) for run in runs]
    common = set.intersection(*map(set, rules)) if rules else set()
    own = [{key: value for key, value in rule.items() if key not in common} for rule in rules]
    names = [str(rule.get("name", "?")) for rule in rules]
    return [
        _with_parameters(
            name, one, [other for other, its in zip(own, names, strict=True) if its == name]
        )
        for name, one in zip(names, own, strict=True)
    ]


def _needed(keys: Sequence[tuple[str, ...]], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the `columns` that distinguish items with equal `keys`, if columns before them do not."""
    needed = []
    for name, texts in columns.items():
        longer = [(*key, text) for key, text in zip(keys, texts, strict=True)]
        if len(set(longer)) > len(set(keys)):
            needed.append(name)
            keys = longer
    return needed


def _differing(runs: Sequence[Run]) -> dict[int, str]:
    """Settings that differ between the runs, as text by `id`, without those that follow from the label;
    empty for fewer than two runs."""
    if len(runs) < 2:
        return {}
    settings = _setting_texts(runs)
    labels = [(_part(run, "label", {}),) for run in runs]
    shown = [path for path, texts in settings.items() if _needed(labels, {path: texts})]
    if len(shown) > _MAX_SETTINGS:
        shown = _needed(labels, settings)
    return {
        id(run): ", ".join(filter(None, (settings[path][place] for path in shown)))
        for place, run in enumerate(runs)
    }


def _setting_texts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings that differ: path -> text per run, empty if the run does not have the setting."""
    leaves = [dict(_leaves(run.topology)) for run in runs]
    known = dict.fromkeys(path for of_run in leaves for path in of_run if path not in _SHOWN_OTHERWISE)
    differing = [path for path in known if len({repr(of_run.get(path)) for of_run in leaves}) > 1]
    names = _short_names(differing)
    return {
        path: [
            _setting_text(names[path], of_run[path], [other.get(path) for other in leaves])
            if path in of_run
            else ""
            for of_run in leaves
        ]
        for path in differing
    }


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Last parts of the paths; whole paths if these are not distinct."""
    last = [path.rpartition(".")[2] for path in paths]
    return dict(zip(paths, last if len(set(last)) == len(last) else paths, strict=True))


def _setting_text(name: str, value: Any, others: Sequence[Any]) -> str:
    """Text such as `lr 0.06` or `dirichlet 0.1`. `others`: the values of all runs."""
    if (choice := choice_of(value)) is None:
        return f"{name} {_text(value)}"
    return choice_text(value, [other for other in others if choice_of(other) == choice])


def choice_of(value: Any) -> str | None:
    """Kind that a mapping names, such as `dirichlet` for `{scheme: dirichlet, alpha: 0.1}`."""
    if not isinstance(value, Mapping):
        return None
    return next((str(value[key]) for key in _CHOICES if isinstance(value.get(key), str)), None)


def choice_text(value: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Text such as `dirichlet 0.1`. `others`: mappings of the same kind, `value` included, of which only
    differing parameters are shown."""
    parameters = [
        {key: inner for key, inner in one.items() if key not in _CHOICES} for one in (value, *others)
    ]
    return _with_parameters(choice_of(value) or "", parameters[0], parameters[1:])


def _with_parameters(
    name: str, parameters: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> str:
    """Parameters that differ from those of `others`; a single one without its name."""
    differing = _different_leaves(parameters, others)
    if len(differing) == 1:
        return f"{name} {_text(next(iter(differing.values())))}"
    return f"{name} {differences(parameters, others)}".rstrip()


def differences(value: Any, others: Sequence[Any]) -> str:
    """Text such as `after 1s` for the parts that differ."""
    return ", ".join(f"{path} {_text(leaf)}" for path, leaf in _different_leaves(value, others).items())


def _different_leaves(value: Any, others: Sequence[Any]) -> dict[str, Any]:
    leaves = [dict(_leaves(other)) for other in others]
    return {
        path: leaf
        for path, leaf in _leaves(value)
        if any(repr(other.get(path)) != repr(leaf) for other in leaves)
    }


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All values with their paths, such as `devices.pi.cpu`. An entry of a list has its `name`, or else
    its index. A mapping that names its kind is one value."""
    if isinstance(value, Mapping) and choice_of(value) is None:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
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
        case "files":
            digests = {"code": run.manifest.get("code"), "data": run.manifest.get("data_files")}
            return ", ".join(f"{key} {str(digest)[:6]}" for key, digest in digests.items() if digest)
        case "seed":
            return f"seed {run.topology.get('seed', '?')}"
        case "begin":  # a run id is the topology's name, date, time, and random digits
            return run.name.removeprefix(f"{run.topology.get('name')}-")
    return str(run.topology.get("name", run.name))
