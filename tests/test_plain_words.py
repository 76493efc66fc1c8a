"""The code reads plainly: openings of docstrings, names of functions and of classes (docs/writing.md).

`make check` runs this. Reword a new hit, or accept it below with its reason. An exception that no longer
applies is an error.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agents", "analysis", "conformance/fl_conformance", "testbed")

OPENINGS = (
    *("And", "Are", "As", "Beside", "Is", "It", "Its", "Likewise", "Of", "So many", "So much", "Such"),
    *("That", "The same", "There", "Those", "Until", "What", "Where", "Who", "Whose", "Within which"),
)
"""Openings of a docstring that say neither what a thing is nor what a function does."""

ACCEPTED_OPENINGS: dict[str, str] = {}
"""Docstrings begun so all the same (`path: first words`), with the reason."""

PRONOUNS = {
    *("anew", "asked", "came", "found", "given", "gone", "heard", "here", "its", "kept", "left", "made"),
    *("of", "own", "said", "say", "seen", "such", "taken", "tell", "tells", "that", "them", "there"),
    *("these", "things", "this", "those", "told", "took", "what", "where", "which", "who", "whole"),
    *("whose", "words"),
}
"""Names of functions that mean nothing without their surroundings."""

ACCEPTED_FUNCTIONS: dict[str, str] = {}
"""Functions named so all the same (`path name`), with the reason."""

ACCEPTED_CLASSES: dict[str, str] = {}
"""Class names that several modules define, with the reason why nobody takes one for the other."""


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements, without the expressions in them: `ast.walk` takes ten times as long."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(inner := getattr(node, field, None), list):
                waiting += inner


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring: of modules, classes, functions and fields."""
    for node in statements(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split())


def opening(text: str) -> str | None:
    """Return the entry of `OPENINGS` that `text` begins with, or None."""
    for words in OPENINGS:
        if text == words or (text.startswith(words) and not text[len(words)].isalnum()):
            return words
    return None


def pronouns(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions and methods that are in `PRONOUNS`."""
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in PRONOUNS:
            yield node.name


@cache
def _modules() -> dict[str, Module]:
    """Return path -> content of each module."""
    return {
        path.relative_to(ROOT).as_posix(): Module.read(path)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@dataclass(frozen=True)
class Module:
    """What the check reads in a module. The syntax tree is not kept: with 500 of them, the garbage
    collector takes most of the time."""

    docstrings: list[tuple[int, str]]
    pronouns: list[str]
    classes: list[str]

    @classmethod
    def read(cls, path: Path) -> Module:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node.name for node in statements(tree) if isinstance(node, ast.ClassDef)]
        return cls([*docstrings(tree)], [*pronouns(tree)], classes)


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    found = {
        f"{path}: {text[:40]}": line
        for path, module in _modules().items()
        for line, text in module.docstrings
        if opening(text)
    }
    assert found.keys() == ACCEPTED_OPENINGS.keys(), "reword them (docs/writing.md)"


def test_functions_are_named_by_verbs_and_nouns() -> None:
    found = {f"{path} {name}" for path, module in _modules().items() for name in module.pronouns}
    assert found == ACCEPTED_FUNCTIONS.keys()


def test_each_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for path, module in _modules().items():
        for name in module.classes:
            places[name.lstrip("_")].append(path)
    several = {name: paths for name, paths in places.items() if len(set(paths)) > 1}
    assert {name: paths for name, paths in several.items() if name not in ACCEPTED_CLASSES} == {}
    assert ACCEPTED_CLASSES.keys() <= several.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Of a client alone.", "Of"),
        ("What it has.", "What"),
        ("So many fit.", "So many"),
        ("Its", "Its"),
        ("Offset in bytes.", None),
        ("Whether the device is present.", None),
        ("Items per batch.", None),
        ("Updates per sum.", None),
    ],
)
def test_opening_is_found_at_word_boundaries(text: str, expected: str | None) -> None:
    assert opening(text) == expected


def test_every_kind_of_docstring_and_function_is_read() -> None:
    code = 'class A:\n    x: int\n    """Of a field."""\n    async def told(self): "Is it."\n'
    nested = """
match 1:
    case 1:
        try:
            pass
        except OSError:
            for _ in ():
                pass
            else:
                def found(): pass
        finally:
            with a: "Such."
"""
    tree = ast.parse(code + nested)
    assert Counter(text for _, text in docstrings(tree)) == {"Of a field.": 1, "Is it.": 1, "Such.": 1}
    assert sorted(pronouns(tree)) == ["found", "told"]
