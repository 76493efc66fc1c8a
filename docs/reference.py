"""Pages of the documentation that are not written but made, each time the site is built (mkdocs.yml).

The reference comes from what the program itself uses: the schema of the topology, the command line, the
docstrings of rules and tasks, the catalogue of devices. ARCHITECTURE, CONTRIBUTING and CHANGELOG become
pages of the site with their links adapted.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from analysis.columns import COLUMNS
from testbed.api import catalog
from testbed.cli.main import app
from testbed.fleets import surveys
from testbed.topology import json_schema, profiles

ROOT = Path(__file__).parents[1]
OF_THE_REPOSITORY = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PYTHON = ("analysis.load", "analysis.metrics", "analysis.energy", "analysis.selection",
          "agents.rules.interface", "agents.selection.interface", "agents.tasks.interface")  # fmt: skip
"""Modules whose public names are documented, beside what `testbed` itself exports."""
_TO_DOCS = re.compile(r"\]\((?:docs/)?([^)\s:]+)\)")
_LINK = re.compile(r"\[([^\]\[]*)\]\(([\w./-]+\.md)")
_FILE_NAME = re.compile(r"[\w./-]+\.md")
_HUGE = 1e15
"""Bounds from here on are not worth a word."""
_VARIANTS = {
    "rule": ("Rule", "How updates become the next global model. Each rule has more keys.", "rules.md"),
    "selection": (
        "Selection",
        "Which idle clients train next. Most selections have more keys.",
        "selections.md",
    ),
    "task": (
        "Task",
        "What is learned, from which data, and how. Some tasks have more keys.",
        "tasks.md",
    ),
}
"""Keys of a topology of which there are many kinds, with a page for these."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs calls this with the files that it has found."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to documents of the top folder lead to the pages made of these, and a link that shows the
    name of a file shows the title of its page."""
    titles = dict(_titles(config.nav))
    folder = posixpath.dirname(page.file.src_uri)

    def adapted(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = posixpath.normpath(posixpath.join(folder, link))
        if target.startswith("../"):
            name = target.removeprefix("../")
            target = OF_THE_REPOSITORY.get(name, "index.md" if name == "README.md" else target)
            link = posixpath.relpath(target, folder or ".")
        shown = titles.get(target, text) if _FILE_NAME.fullmatch(text) else text
        return f"[{shown}]({link}"

    return _LINK.sub(adapted, markdown)


def _titles(nav: Any) -> Iterator[tuple[str, str]]:
    """What the navigation calls each page, by its path."""
    for entry in nav:
        for title, inside in entry.items():
            if isinstance(inside, str):
                yield inside, title
            else:
                yield from _titles(inside)


def pages() -> dict[str, str]:
    """Markdown by path in the site."""
    return {
        **{to: of_the_repository(name) for name, to in OF_THE_REPOSITORY.items()},
        "reference/topology.md": topology(json_schema()),
        "reference/commands.md": commands(),
        "reference/rules.md": catalogue("Rules", "aggregation rules", catalog.rules()),
        "reference/selections.md": catalogue("Selections", "selections", catalog.selections()),
        "reference/tasks.md": catalogue("Tasks", "learning tasks", catalog.tasks()),
        "reference/profiles.md": device_profiles(),
        "reference/tables.md": tables(),
        "reference/python.md": python(),
    }


def of_the_repository(name: str) -> str:
    """A document of the top folder; its links are as from docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")

    def link(match: re.Match[str]) -> str:
        page, anchor, place = match[1].partition("#")
        page = "index.md" if page == "README.md" else OF_THE_REPOSITORY.get(page, page)
        return f"]({page}{anchor}{place})"

    return _TO_DOCS.sub(link, text)


def commands() -> str:
    """All commands with their arguments and options, as `--help` tells them."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    text = get_docs_for_click(obj=command, ctx=context, name="testbed", title="Commands")
    return text + "\nExit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted.\n"


def catalogue(title: str, what: str, entries: Sequence[catalog.CatalogEntry]) -> str:
    """Rules or tasks, with their docstrings and parameters."""
    return "\n\n".join([f"# {title}", f"The {what}, by name.", *map(_entry, entries)])


def _entry(entry: catalog.CatalogEntry) -> str:
    facts = [f"- {name}: {value}" for name, value in entry.facts.items() if value not in (None, "no")]
    rows = [
        (f"`{p.name}`", p.type, "required" if p.required else f"`{p.default}`", p.description)
        for p in entry.parameters
    ]
    parts = [f"## `{entry.name}`", "\n".join(facts), _prose(entry.about)]
    return "\n\n".join([*filter(None, parts), table(("parameter", "type", "default", "meaning"), rows)])


def _prose(text: str) -> str:
    """A docstring: indented lines are equations, all else is text without mark-up."""
    lines = text.splitlines()
    return "\n".join(line if line.startswith("    ") else line.replace("*", r"\*") for line in lines)


def device_profiles() -> str:
    """Device profiles, link classes and populations that come with the testbed."""
    catalogue_of = ROOT / "testbed" / "catalog"
    devices = profiles.read(catalogue_of / "devices.yaml").devices
    links = profiles.read(catalogue_of / "links.yaml").links
    parts = ["# Device profiles and link classes", "As `testbed profiles` lists them, with sources."]
    for title, entries in (("Devices", devices), ("Links", links)):
        parts.append(f"## {title}")
        for name, entry in entries.items():
            figures = ", ".join(f"{key} {_plain(value)}" for key, value in entry.figures().items())
            parts.append(f"**`{name}`** {entry.description}: {figures}. Source: {entry.source}")
    parts.append("## Populations")
    for row in surveys.population_rows(profiles.population_names()):
        head = ("weight", *(key for key in row["kinds"][0] if key != "weight"))
        rows = [tuple(_plain(one.get(key)) for key in head) for one in row["kinds"]]
        parts.append(f"**`{row['name']}`** {row['description']} Source: {row['source']}")
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def tables() -> str:
    """The columns of every table, from their definitions."""
    parts = [
        "# Tables",
        "The columns of the tables that `testbed export` writes and that `analysis.load.Run` has. "
        "Exported Parquet files have these definitions as metadata of each column "
        '(`pyarrow.parquet.read_schema("updates.parquet").field("bytes").metadata`). '
        "Device time counts from the start of the run clock. The unit 1 is that of counts and ratios. "
        "A cumulative column says from when on it counts; all other values stand for themselves.",
    ]
    for name, found in COLUMNS.items():
        rows = [
            (f"`{key}`", column.unit or "text", column.sign, column.cumulative, column.meaning)
            for key, column in found.items()
        ]
        head = ("column", "unit", "sign", "cumulative since", "meaning")
        parts += [f"## `{name}`", table(head, rows)]
    return "\n\n".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items()) + ")"
    return str(value)


def python() -> str:
    """Names that `testbed` exports, and the public modules (mkdocstrings fills them in)."""
    import testbed

    exported = [getattr(testbed, name) for name in testbed.__all__]
    names = [f"{one.__module__}.{one.__qualname__}" for one in exported if hasattr(one, "__qualname__")]
    return "\n\n".join(["# Python", *(f"::: {name}" for name in [*names, *PYTHON])])


def topology(schema: dict[str, Any]) -> str:
    """The topology file, from its JSON Schema: a table for each kind of mapping in it."""
    whole = with_common_keys(schema)
    parts = [
        "# Topology",
        "Every key of a topology file, made of the schema that `testbed schema` prints. "
        "Required keys are bold.",
    ]
    for name, definition in _reachable(whole):
        heading = f"## {_shown_name(name)}"
        parts += [heading, _cell(definition.get("description", "")), _keys(definition, whole)]
    return "\n\n".join(filter(None, parts))


def with_common_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """With one mapping in place of all rules, and of all tasks: the keys that all of them have."""
    definitions, properties = dict(schema["$defs"]), dict(schema["properties"])
    for key, (title, description, page) in _VARIANTS.items():
        choice = next(
            one for one in (properties[key], *properties[key].get("anyOf", ())) if "oneOf" in one
        )
        options = [option["$ref"] for option in choice["oneOf"] if "$ref" in option]
        kinds = [definitions[option.removeprefix("#/$defs/")] for option in options]
        common = {"name"}
        common |= {
            name
            for name, inner in kinds[0]["properties"].items()
            if all(kind["properties"].get(name) == inner for kind in kinds)
        }
        found = {name: inner for name, inner in kinds[0]["properties"].items() if name in common}
        found["name"] = {"description": f"One of [these]({page}), or `module:Class` of your own code"}
        required = [name for name in kinds[0]["required"] if name in common]
        definitions[title] = {"description": description, "properties": found, "required": required}
        told = {k: v for k, v in properties[key].items() if k == "description"}
        properties[key] = {"$ref": f"#/$defs/{title}", **told}
    return schema | {"$defs": definitions, "properties": properties}


def _shown_name(definition: str) -> str:
    """Name of a part of the topology on the page: `Link` for the definition `LinkSettings`."""
    return definition.removesuffix("Settings")


def _reachable(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Mappings with keys, each once, in the order in which a reader comes across them."""
    waiting, seen = [("Topology", schema)], {"Topology"}
    while waiting:
        name, definition = waiting.pop(0)
        yield name, definition
        for inner in definition["properties"].values():
            for other in _references(inner, schema):
                if other not in seen:
                    seen.add(other)
                    waiting.append((other, schema["$defs"][other]))


def _references(schema: Any, whole: dict[str, Any]) -> Iterator[str]:
    """Names of the mappings with keys that `schema` refers to."""
    if isinstance(schema, list):
        for inner in schema:
            yield from _references(inner, whole)
    elif isinstance(schema, dict):
        name = schema.get("$ref", "").removeprefix("#/$defs/")
        if name and "properties" in whole["$defs"][name]:
            yield name
        elif name:
            yield from _references(whole["$defs"][name], whole)
        for key, inner in schema.items():
            if key in ("anyOf", "oneOf", "items", "additionalProperties", "prefixItems"):
                yield from _references(inner, whole)


def _keys(definition: dict[str, Any], whole: dict[str, Any]) -> str:
    required = definition.get("required", ())
    rows = []
    for key, inner in definition["properties"].items():
        default = "" if key in required or "default" not in inner else _default(inner["default"])
        name = f"**`{key}`**" if key in required else f"`{key}`"
        rows.append((name, _words(inner, whole), default, _meaning(inner, whole)))
    return table(("key", "value", "default", "meaning"), rows)


def _meaning(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    """A key's own description, or that of the only mapping that it takes."""
    names = list(dict.fromkeys(_references(schema, whole)))
    target = whole["$defs"][names[0]] if len(names) == 1 else {}
    return str(schema.get("description") or target.get("description", ""))


def _words(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        target = whole["$defs"][name]
        shown = _shown_name(name)
        return f"[{shown}](#{shown.lower()})" if "properties" in target else _words(target, whole)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        words = list(dict.fromkeys(_words(o, whole) for o in options if o.get("type") != "null"))
        return " or ".join(words if len(words) < 4 else [", ".join(words[:-1]), words[-1]])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    match schema.get("type"):
        case "array":
            inner = schema.get("items") or {"anyOf": schema.get("prefixItems", [])}
            return f"list of {_words(inner, whole)}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"names with {_words(inner, whole)}" if isinstance(inner, dict) else "mapping"
        case "string":
            return f"such as `{schema['examples'][0]}`" if "examples" in schema else "text"
        case "integer" | "number" as kind:
            return {"integer": "whole number", "number": "number"}[kind] + _bounds(schema)
        case "boolean":
            return "`true` or `false`"
    return "text"


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "to",
        "exclusiveMaximum": "below",
    }
    return "".join(
        f" {word} {schema[key]:g}" for key, word in words.items() if schema.get(key, _HUGE) < _HUGE
    )


def _default(value: Any) -> str:
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "" if isinstance(value, dict) else f"`{value}`"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown; empty without rows."""
    if not rows:
        return ""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
