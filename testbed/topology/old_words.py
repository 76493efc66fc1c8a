"""Deprecated keys and values of a topology. This version still reads them, with a hint to the user.

The table `_OLD` lists the functions that translate them to the current keys and values. The next version
empties the table. The JSON Schema has only the current keys and values.
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
"""Placeholder in the places of `_OLD`. It stands for every entry of a list."""


def translate(document: Document) -> Document:
    """Return `document`, an unvalidated topology, with current keys and values in place of deprecated
    ones. The source of the result has a hint about each replacement."""
    data, source = document.data, document.source
    keys, values, hints = dict(source.keys), dict(source.values), list(source.hints)
    for where, rewrite in _OLD:
        for at, old in _mappings(data, where):
            new = rewrite(old)
            if new is old:
                continue
            removed, added = _differences(old, new), _differences(new, old)
            first = (*at, next(iter(removed)))
            for key in added:  # errors in the new key point to the old one
                keys.setdefault((*at, key), source.keys.get(first, source.place(at)))
                values.setdefault((*at, key), source.place(first))
            place = yamlfile.dotted_path(at)
            hints.append((f"{place}: " if place else "") + hint(_format(removed), _format(added)))
            data = yamlfile.replace_value(data, at, new)
    return replace(
        document, data=data, source=replace(source, keys=keys, values=values, hints=tuple(hints))
    )


def hint(old: str, new: str) -> str:
    """Return the hint to write `new` in place of `old`, both written as in the file. If `new` is empty,
    the hint is to remove `old`."""
    change = f"write {new} in place of {old}" if new else f"remove {old}"
    return f"{change}, which the next version refuses"


def _differences(one: Values, other: Values) -> Values:
    """Return the entries of `one` that are missing in `other` or have another value there."""
    return {key: value for key, value in one.items() if key not in other or other[key] != value}


def _format(values: Values) -> str:
    """Format `values` for a hint, such as `rtt: 80ms, loss: 1%`."""
    return yamlfile.write(dict(values)).strip().strip("{}") if values else ""


def _mappings(data: Any, pattern: tuple[str, ...], at: Where = ()) -> Iterator[tuple[Where, Values]]:
    """Yield each mapping in `data` whose place fits `pattern`, together with its place."""
    if not pattern:
        if isinstance(data, Mapping):
            yield at, data
    elif pattern[0] == EACH:
        for index, entry in enumerate(data if isinstance(data, tuple) else ()):
            yield from _mappings(entry, pattern[1:], (*at, index))
    elif isinstance(data, Mapping):
        yield from _mappings(data.get(pattern[0]), pattern[1:], (*at, pattern[0]))


def _link(values: Values) -> Values:
    """Replace `delay`, the delay of one direction, by `rtt`. A link with both keys is not changed,
    because validation reports it."""
    delay, rtt = values.get("delay"), values.get("rtt")
    if "delay" not in values or (delay is not None and rtt is not None):
        return values
    if delay is not None:
        rtt = delay
        with suppress(ValueError):  # validation of rtt reports a value that is not a duration
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
"""Replacements of deprecated schemes, by deprecated name. A replacement has the current name, the
current names of the parameters, and the old defaults of the parameters whose defaults have changed."""


def _partition(values: Values) -> Values:
    scheme = values.get("scheme")
    if not isinstance(scheme, str) or scheme not in _SCHEMES:
        return values
    now, names, defaults = _SCHEMES[scheme]
    return {**defaults, **{names.get(key, key): value for key, value in values.items()}, "scheme": now}


def _durability(values: Values) -> Values:
    """Replace the former key `record` by `durability: recording`."""
    record = values.get("record")
    if record not in ("nothing", "updates"):
        return values
    others = {key: value for key, value in values.items() if key != "record"}
    return {**others, "durability": "recording"} if record == "updates" else others


_SECTION = "virtual"
"""Topology key that holds the settings of virtual time."""


def _virtual(values: Values) -> Values:
    """Move the settings of virtual time from the section `runtime` to `virtual`."""
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
    """Remove `cpus`, because former versions wrote planned CPUs into the topology."""
    return {key: value for key, value in values.items() if key != "cpus"} if "cpus" in values else values


_OLD: tuple[tuple[tuple[str, ...], Callable[[Values], Values]], ...] = (
    ((), _durability),
    ((), _virtual),
    (("devices", EACH), _cpus),
    (("devices", EACH, "link"), _link),
    (("scenario", EACH, "link"), _link),
    (("task", "partition"), _partition),
)
"""Places of mappings with deprecated keys or values, and the functions that translate these mappings. If
there is nothing to translate, a function returns its argument itself."""
