"""The documents refer to what exists: by links between them, and by paths of the project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.together

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:agents|analysis|testbed|docs|tests|topologies)/[^\s`<]*)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def prose(path: Path) -> str:
    """The text of `path` without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """What the headings of `path` are called in links."""
    found = _HEADING.findall(prose(path))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def paths(document: Path) -> set[str]:
    """Paths of the project that are named between backticks, outside blocks of code."""
    return set(_PATH.findall(prose(document)))


def broken_links(document: Path) -> Iterator[str]:
    for link in _LINK.findall(prose(document)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert list(broken_links(document)) == []


def test_every_page_is_linked() -> None:
    linked = {
        (document.parent / link.partition("#")[0]).resolve()
        for document in DOCUMENTS
        for link in _LINK.findall(prose(document))
    }
    assert {path for path in ROOT.glob("docs/*") if path not in linked} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_paths_exist(document: Path) -> None:
    assert sorted(path for path in paths(document) if not (ROOT / path).exists()) == []


def test_the_map_names_the_folders() -> None:
    named = paths(ROOT / "ARCHITECTURE.md")
    assert len(named) > 30
    folders = {path.parent for path in (ROOT / "testbed").glob("*/__init__.py")}
    assert {folder for folder in folders if f"testbed/{folder.name}/" not in named} == set()


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(
        "# A title\n[a](a.md#a-title) [b](b.md) [c](#gone) [d](https://d.e)\n```\n[f](f)\n```\n"
    )
    assert list(broken_links(document)) == ["b.md", "#gone"]
