"""The code reads plainly: openings of docstrings, names of functions and of classes (docs/writing.md).

`make check` runs this. Reword a new hit, or accept it below with its reason. An exception that no longer
applies is an error.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agents", "analysis", "testbed")

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


@cache
def _trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring: of modules, classes, functions and fields."""
    for node in ast.walk(tree):
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
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in PRONOUNS:
            yield node.name


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    found = {
        f"{path}: {text[:40]}": line
        for path, tree in _trees().items()
        for line, text in docstrings(tree)
        if opening(text)
    }
    assert found.keys() == ACCEPTED_OPENINGS.keys(), "reword them (docs/writing.md)"


def test_functions_are_named_by_verbs_and_nouns() -> None:
    found = {f"{path} {name}" for path, tree in _trees().items() for name in pronouns(tree)}
    assert found == ACCEPTED_FUNCTIONS.keys()


def test_each_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path)
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
    tree = ast.parse(code)
    assert Counter(text for _, text in docstrings(tree)) == {"Of a field.": 1, "Is it.": 1}
    assert [*pronouns(tree)] == ["told"]
