"""The documents: length, indexes, and whether what they name exists: links, paths, commands, topologies,
Python. `tests/documents.py` has the checks that `make docs` runs too."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import testbed
from testbed import topology
from testbed.errors import BadInputError
from testbed.fleets.settings import GroupSettings
from testbed.sweeps import SweepFile
from testbed.topology import profiles, validation_errors, yamlfile
from tests import browser, documents
from tests.conftest import unavailable
from tests.documents import DOCS, DOCUMENTS, PAGES, ROOT, Block
from tests.waiting import eventually

BASE = {
    "name": "name: base",
    "task": "task: {name: digits-logreg, local: {steps: 1, lr: 0.1}}",
    "rule": "rule: {name: fedavg}",
    "devices": "devices: [{name: pi, count: 4, cpu: 0.1}, {name: village, cpu: 0.1}]",
    "stop": "stop: {after: 1min}",
}
"""Topology into which an excerpt from a page is inserted."""


def of_language(language: str) -> list[Block]:
    return [b for path in DOCUMENTS for b in documents.blocks(path) if b.language == language]


def test_documents_have_no_problems() -> None:
    """Lengths, indexes, links, named paths and tests, commands, shell lines, tables of measurements."""
    assert list(documents.problems()) == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in PAGES}
    assert pages - set(listed) == set(), "add it to `nav` of mkdocs.yml"
    assert len(listed) == len(set(listed))


def test_every_page_and_picture_is_linked() -> None:
    linked = {
        (document.parent / link.partition("#")[0]).resolve()
        for document in DOCUMENTS
        for link in documents.links(document)
    }
    there = {*PAGES, *DOCS.glob("**/*.png"), *DOCS.glob("**/*.svg")} - {DOCS / "index.md"}
    assert {path for path in there if path not in linked} == set()


def test_pages_named_in_the_code_exist() -> None:
    folders = ("agents", "analysis", "benchmarks", "images", "testbed", "tests")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".toml")
    ]
    named = {
        page for path in files for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text("utf-8"))
    }
    assert sorted(page for page in named if not (ROOT / page).exists()) == []


def test_the_table_of_tests_names_each_file_or_its_folder() -> None:
    tests = ROOT / "tests"
    table = (tests / "README.md").read_text(encoding="utf-8")
    folders = [tests / "agents" / folder for folder in re.findall(r"`a/(\w+)/`", table)]
    folders += [tests / folder for folder in re.findall(r"`tests/(\w+)/`", table)]
    named = re.findall(r"test_\w+\*?", table)
    files = {path for path in tests.rglob("test_*.py") if path.parent not in folders}
    assert [path.stem for path in files if not any(fnmatch(path.stem, name) for name in named)] == []
    every = [path.stem for path in tests.rglob("test_*.py")]
    assert [name for name in named if not any(fnmatch(stem, name) for stem in every)] == []


def test_architecture_map_names_the_folders() -> None:
    named = documents.named_paths(ROOT / "ARCHITECTURE.md")
    assert len(named) > 30
    folders = {path.parent for path in (ROOT / "testbed").glob("*/__init__.py")}
    assert {folder for folder in folders if f"testbed/{folder.name}/" not in named} == set()


def test_yaml_examples_are_valid() -> None:
    wrong = []
    for block in of_language("yaml"):
        try:
            check_yaml(block.text)
        except BadInputError as error:
            wrong.append(f"{block}{error}")
    assert wrong == []


def check_yaml(text: str) -> None:
    """A topology or a part of one, a sweep, machines or profiles. Raises BadInputError."""
    data = yamlfile.parse(text).data
    if "topology" in data:
        validation_errors.validate(SweepFile, yamlfile.parse(text))
    elif "nodes" in data:
        profiles.parse_machines(text)
    elif isinstance(fleet := data.get("devices"), dict) and {"from_run", "from_log"} & fleet.keys():
        GroupSettings.model_validate({"name": "recorded", **fleet})  # the record is not here
    elif data.keys() <= {"devices", "links"} and isinstance(data.get("devices", {}), dict):
        profiles.parse(text)
    elif "code" not in data:  # with code: tests/test_own_code.py and tests/testbed/test_own_data.py
        rest = [part for key, part in BASE.items() if key not in data]
        topology.parse("\n".join([*rest, text]))


@pytest.mark.parametrize(
    "text", ["devices: [{name: pi, cpus: 0.1}]", "rule: {name: fedbuf}", "nodes: [{name: a}]"]
)
def test_wrong_yaml_is_detected(text: str) -> None:
    with pytest.raises(BadInputError):
        check_yaml(text)


def test_python_examples_import_existing_names() -> None:
    for node in (node for block in of_language("python") for node in ast.walk(ast.parse(block.text))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("__"):
            for name in node.names:
                if not hasattr(importlib.import_module(node.module), name.name):
                    importlib.import_module(f"{node.module}.{name.name}")  # else a module


def test_functions_of_the_python_page_exist() -> None:
    """The names in the tables of functions, and of the commands as functions."""
    page = (DOCS / "guide" / "python.md").read_text(encoding="utf-8")
    functions = re.findall(r"^\| `(\w+)\(", page.partition("## A run")[0], re.MULTILINE)
    table = page.partition("## The commands as functions")[2]
    cells = [line.split(" | ", 1)[1] for line in table.splitlines() if line.startswith("| `")]
    named = {*functions, *(name for cell in cells for name in re.findall(r"`([a-z_]+)", cell))}
    assert len(named) > 30
    known = {*testbed.__all__, *dir(testbed.RunHandle)}
    assert named - known == set()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built strictly."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.hosts
def test_the_site_has_all_pages_and_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    loaded = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+stylesheet[^>]+https?:")
    assert [page for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []
    named = re.compile(r">[\w./-]+\.md</a>")  # not by its title
    assert [page for page in pages if named.search(page.read_text(encoding="utf-8"))] == []
    for page, word in {
        "rules": "fedbuff",
        "topology": "compression",
        "commands": "--resume",
        "tables": "base_version",
    }.items():
        assert word in (site / "reference" / f"{page}.html").read_text(encoding="utf-8")


@pytest.mark.hosts
@pytest.mark.browser
def test_site_search_works_from_disk(site: Path) -> None:
    if lacking := browser.missing():
        unavailable("browser", f"no {lacking}")
    with browser.opened() as window:
        window.driver.get(f"{(site / 'guide' / 'tutorial.html').as_uri()}?q=fednova")
        results = "return document.querySelectorAll('.md-search-result__link').length"
        eventually(lambda: window.run(results) > 0, 30)


def test_wrong_documents_are_detected(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(
        "# A title\n[a](a.md#a-title) [b](b.md) [c](#gone) [d](https://d.e)\n```\n[f](f)\n```\n"
        "`testbed plan` `testbed plot` `agents/core.py`\n\n    testbed up a.yaml --fast   # comment\n"
        "    make demo && testbed down --all\n\n```sh\n$ testbed plan\n```\n\n| a |\n| --- |\n| 1 |\n"
    )
    assert list(documents.broken_links(document)) == ["b.md", "#gone"]
    found = documents.commands(document)
    assert [arguments for arguments, _ in found] == [
        ["plan"], ["up", "a.yaml", "--fast"], ["down", "--all"], ["plan"], ["plot"]
    ]  # fmt: skip
    wrong = [line.split(":")[0] for line in documents.wrong_commands(document)]
    assert wrong == ["testbed plan", "testbed up a.yaml --fast", "testbed plot"]
    assert list(documents.wrong_shell_lines(document)) == []
    assert list(documents.unsourced_tables(document)) == ["| a |"]
    assert documents.module_names(document) == ["`agents/core.py`"]
    document.write_text(f"{'a' * 121}\n| {'a' * 121} |\n")
    assert list(documents.long_lines(document)) == ["a" * 121]
    document.write_text(
        "# B\n\n## First\n\n    make nothing\n    python -m tests.nothing\n    echo 'open\n\n"
        "| a |\n| --- |\n| 1 |\n\n*`make bench` · two cores · 2026-11-20*\n"
    )
    assert len(list(documents.wrong_shell_lines(document))) == 3
    assert list(documents.unsourced_tables(document)) == []
    assert not documents.begins_with_an_example(document)
