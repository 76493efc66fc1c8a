"""A shorter JSON schema: kinds of a value that differ in their name or in a unit alone are defined once.
Editors complete the same keys and values as before."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]
_REF = "#/$defs/"
_OF_A_UNIT = re.compile(r"\w+__(\w+?)__\d+")
"""Pydantic's name of a class that was made for several units, such as `a__b__Uniform__3`."""
_WORDS = ("title", "description", "default")


def share_definitions(schema: Schema) -> Schema:
    schema = json.loads(json.dumps(schema))
    known = schema["$defs"]
    choices = [*_choices(schema)]
    alike = defaultdict[str, list[str]](list)
    for name in known:
        if found := _OF_A_UNIT.fullmatch(name):
            alike[found[1]].append(name)
    known |= {title: _without_units([known[name] for name in names]) for title, names in alike.items()}
    titles = {name: title for title, names in alike.items() for name in names}
    for choice in choices:
        _share_units(choice, known, titles)
    for choice in choices:
        _share_names(choice, known)
    used = set(re.findall(rf'"{re.escape(_REF)}(\w+)"', json.dumps(schema)))
    return schema | {"$defs": {name: one for name, one in sorted(known.items()) if name in used}}


def _choices(schema: Any) -> Iterator[Schema]:
    """Yield each choice among named kinds, inner ones first."""
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, dict | list):
            yield from _choices(inner)
    if isinstance(schema, dict) and "oneOf" in schema and "discriminator" in schema:
        yield schema


def _without_units(same: list[Schema]) -> Schema:
    """Return the definition that holds for each unit."""
    properties = {
        key: value
        if all(one["properties"][key] == value for one in same)
        else {word: value[word] for word in _WORDS if word in value}
        for key, value in same[0]["properties"].items()
    }
    return same[0] | {"properties": properties}


def _share_units(choice: Schema, known: Mapping[str, Schema], titles: Mapping[str, str]) -> None:
    """Say beside the choice which values the keys of its kinds have."""
    values: dict[str, list[Schema]] = {}
    names = [ref.removeprefix(_REF) for ref in choice["discriminator"]["mapping"].values()]
    for name in (name for name in names if name in titles):
        shared = known[titles[name]]["properties"]
        for key, value in known[name]["properties"].items():
            plain = {word: one for word, one in value.items() if word not in _WORDS}
            if value != shared[key] and plain not in values.setdefault(f"^{key}$", []):
                values[f"^{key}$"].append(plain)
    if values:
        _rename(choice, {_REF + name: _REF + titles.get(name, name) for name in names})
        choice["patternProperties"] = {
            key: {"anyOf": found} if len(found) > 1 else found[0] for key, found in values.items()
        }


def _share_names(choice: Schema, known: dict[str, Schema]) -> None:
    """Make one definition of kinds with the same keys. Each name keeps its description."""
    tag, mapping = choice["discriminator"]["propertyName"], choice["discriminator"]["mapping"]
    alike = defaultdict[str, dict[str, Schema]](dict)
    for name, ref in mapping.items():
        kind = known[ref.removeprefix(_REF)]
        keys = {key: one for key, one in kind["properties"].items() if key != tag}
        alike[json.dumps(keys) if keys else name][name] = kind
    for kinds in alike.values():
        if len(kinds) > 1:
            first = next(iter(kinds.values()))
            names = [{"const": name, "description": one["description"]} for name, one in kinds.items()]
            title = f"{first['title']}AndAlike"
            properties = first["properties"] | {tag: {"title": tag.title(), "oneOf": names}}
            merged = {word: one for word, one in first.items() if word != "description"}
            known[title] = merged | {"title": title, "properties": properties}
            _rename(choice, {mapping[name]: _REF + title for name in kinds})


def _rename(choice: Schema, names: Mapping[str, str]) -> None:
    mapping = choice["discriminator"]["mapping"]
    mapping.update({kind: names.get(ref, ref) for kind, ref in mapping.items()})
    refs = [names.get(one["$ref"], one["$ref"]) for one in choice["oneOf"] if "$ref" in one]
    others = [one for one in choice["oneOf"] if "$ref" not in one]
    choice["oneOf"] = [*({"$ref": ref} for ref in dict.fromkeys(refs)), *others]
