"""Words of the version before this one in a topology: read as the words of today, with a hint.

A table says, by place, what is read how; the next version empties it. The JSON Schema has the words of
today alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from testbed.topology import units, yamlfile
from testbed.topology.schema import Virtual
from testbed.topology.yamlfile import Document, Where

Values = Mapping[str, Any]
EACH = "each"
"""In a place: each entry of a list."""


def translated(document: Document) -> Document:
    """`document`, a topology not yet validated, in the words of today; its source has a hint for each
    old one."""
    data, source = document.data, document.source
    keys, values, hints = dict(source.keys), dict(source.values), list(source.hints)
    for where, translate in _OLD:
        for at, old in _mappings(data, where):
            new = translate(old)
            if new is old:
                continue
            gone, come = _beyond(old, new), _beyond(new, old)
            first = (*at, next(iter(gone)))
            for key in come:  # errors in it point at the old word
                keys.setdefault((*at, key), source.keys.get(first, source.place(at)))
                values.setdefault((*at, key), source.place(first))
            place = yamlfile.dotted(at)
            hints.append((f"{place}: " if place else "") + hint(_shown(gone), _shown(come)))
            data = yamlfile.replaced(data, at, new)
    return replace(
        document, data=data, source=replace(source, keys=keys, values=values, hints=tuple(hints))
    )


def hint(old: str, new: str) -> str:
    """`old` and `new`: the words, as they are written; no `new`: it says nothing any more."""
    change = f"write {new} in place of {old}" if new else f"remove {old}"
    return f"{change}, which the next version refuses"


def _beyond(one: Values, other: Values) -> Values:
    """What `one` has and `other` has not, or has another value of."""
    return {key: value for key, value in one.items() if key not in other or other[key] != value}


def _shown(values: Values) -> str:
    """`rtt: 80ms, loss: 1%`."""
    return yamlfile.write(dict(values)).strip().strip("{}") if values else ""


def _mappings(data: Any, pattern: tuple[str, ...], at: Where = ()) -> Iterator[tuple[Where, Values]]:
    """The mappings at `pattern`, each with its place."""
    if not pattern:
        if isinstance(data, Mapping):
            yield at, data
    elif pattern[0] == EACH:
        for index, entry in enumerate(data if isinstance(data, tuple) else ()):
            yield from _mappings(entry, pattern[1:], (*at, index))
    elif isinstance(data, Mapping):
        yield from _mappings(data.get(pattern[0]), pattern[1:], (*at, pattern[0]))


def _link(values: Values) -> Values:
    """`delay`, of one way, was half of `rtt`. Both are an error."""
    delay, rtt = values.get("delay"), values.get("rtt")
    if "delay" not in values or (delay is not None and rtt is not None):
        return values
    if delay is not None:
        rtt = delay
        with suppress(ValueError):  # what is no duration is an error of rtt's
            rtt = units.format_duration(2 * units.duration(delay))
    return {key: value for key, value in values.items() if key != "delay"} | {"rtt": rtt}


_SCHEMES: Mapping[str, tuple[str, Mapping[str, str], Values]] = {
    "DirichletPartitioner": ("dirichlet", {"min_partition_size": "min_samples"}, {}),
    "IidPartitioner": ("iid", {}, {}),
    "NaturalIdPartitioner": ("natural", {}, {"choice": "first", "min_samples": 1}),
    "PathologicalPartitioner": (
        "pathological",
        {
            "num_classes_per_partition": "classes_per_client",
            "class_assignment_mode": "assignment",
        },
        {"assignment": "random"},
    ),
    "ShardPartitioner": (
        "shards",
        {"num_shards_per_partition": "shards_per_client"},
        {"shards_per_client": None},
    ),
}
"""By scheme that was one of ours under flwr-datasets' name: ours, its parameters' names, and those whose
defaults differed."""


def _partition(values: Values) -> Values:
    scheme = values.get("scheme")
    if not isinstance(scheme, str) or scheme not in _SCHEMES:
        return values
    now, names, defaults = _SCHEMES[scheme]
    return {**defaults, **{names.get(key, key): value for key, value in values.items()}, "scheme": now}


def _durability(values: Values) -> Values:
    """`record` was a setting beside `durability`."""
    record = values.get("record")
    if record not in ("nothing", "updates"):
        return values
    others = {key: value for key, value in values.items() if key != "record"}
    return {**others, "durability": "recording"} if record == "updates" else others


_SECTION = "virtual"
"""Of a topology: what virtual time takes as given."""


def _virtual(values: Values) -> Values:
    """What virtual time takes as given was part of `runtime`."""
    runtime = values.get("runtime")
    if not isinstance(runtime, Mapping) or not (moved := runtime.keys() & Virtual.model_fields):
        return values
    others = {key: value for key, value in runtime.items() if key not in moved}
    given = {key: value for key, value in runtime.items() if key in moved and value is not None}
    new = {key: value for key, value in values.items() if key != "runtime"}
    own = values.get(_SECTION) or {}
    return {
        **new,
        **({"runtime": others} if others else {}),
        **({_SECTION: {**given, **own}} if given and isinstance(own, Mapping) else {}),
    }


def _cpus(values: Values) -> Values:
    """`cpus` had what a plan found for each device."""
    return {key: value for key, value in values.items() if key != "cpus"} if "cpus" in values else values


_OLD: tuple[tuple[tuple[str, ...], Callable[[Values], Values]], ...] = (
    ((), _durability),
    ((), _virtual),
    (("devices", EACH), _cpus),
    (("devices", EACH, "link"), _link),
    (("scenario", EACH, "link"), _link),
    (("task", "partition"), _partition),
)
"""Place of a mapping, and what of it is read in another way."""
