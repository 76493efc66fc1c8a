"""The documents refer to what exists: by links between them, by paths of the project, and by what their
blocks of code say: commands, topologies, Python."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from testbed import topology
from testbed.cli.main import app
from testbed.errors import BadInputError
from testbed.sweeps import SweepFile
from testbed.topology import machines, profiles, validation_errors, yamlfile
from tests import browser
from tests.conftest import unavailable
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))
DOCUMENTS = [*ROOT.glob("*.md"), *PAGES]
LINE = 120

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:agents|analysis|testbed|docs|tests|topologies)/[^\s`<]*)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|\n\n)((?:    [^\n]*\n)+)")
_INLINE = re.compile(r"`(testbed [^`\n]+)`")
_SHELL = {"|", "&&", "||", ";", ">", "&"}

BASE = {
    "name": "name: base",
    "task": "task: {name: digits-logreg, local: {steps: 1, lr: 0.1}}",
    "rule": "rule: {name: fedavg}",
    "devices": "devices: [{name: pi, count: 4, cpu: 0.1}, {name: village, cpu: 0.1}]",
    "stop": "stop: {after: 1min}",
}
"""Topology into which an excerpt from a page is inserted."""


class Block(NamedTuple):
    document: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.name}:\n{self.text}"


def prose(path: Path) -> str:
    """The text of `path` without its blocks of code."""
    return _FENCED.sub("", path.read_text(encoding="utf-8"))


def blocks(path: Path) -> Iterator[Block]:
    """Blocks of code, fenced and indented."""
    text = path.read_text(encoding="utf-8")
    for indent, language, block in _FENCED.findall(text):
        yield Block(path, language, re.sub(f"^{indent}", "", block, flags=re.MULTILINE))
    for block in _INDENTED.findall(_FENCED.sub("", text)):
        yield Block(path, "", re.sub("^    ", "", block, flags=re.MULTILINE))


def of_language(language: str) -> list[Block]:
    return [b for path in DOCUMENTS for b in blocks(path) if b.language == language]


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of `path`."""
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


def commands(document: Path) -> Iterator[tuple[list[str], bool]]:
    """Arguments of `testbed` in `document`, and whether all have to be there, as in a block."""
    for block in blocks(document):
        if block.language in ("", "sh", "bash", "console"):
            for line in block.text.splitlines():
                yield from ((arguments, True) for arguments in _arguments(line))
    for text in _INLINE.findall(prose(document)):
        yield from ((arguments, False) for arguments in _arguments(text))


def _arguments(line: str) -> Iterator[list[str]]:
    """Return the arguments of each `testbed` command in a shell line."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:  # not a line of a shell
        return
    while words:
        end = next((i for i, word in enumerate(words) if word in _SHELL), len(words))
        program, *arguments = words[:end] or [""]
        if Path(program).name == "testbed" and all(map(str.isprintable, arguments)):
            yield [re.sub(r"^\[|\]$|…$|\.\.\.\]?$", "", word) for word in arguments]
        words = words[end + 1 :]


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(app)


def complaint(arguments: list[str], *, complete: bool) -> str | None:
    """Return what is wrong with the arguments' form for `testbed`; values are not checked."""
    command: Any = command_line()
    rest = list(arguments)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        command, name = command.get_command(typer.Context(command), rest[0]), rest.pop(0)
        if command is None:
            return f"there is no command {name}"
    if hasattr(command, "commands"):
        return None
    try:
        command.make_context("testbed", rest)
    except typer.Exit:  # --help
        return None
    except Exception as error:  # noqa: BLE001  (typer's own click is private)
        kind = type(error).__name__
        allowed = (
            ["BadParameter"] if complete else ["BadParameter", "MissingParameter", "BadOptionUsage"]
        )
        return None if kind in allowed else str(error)
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_have_targets(document: Path) -> None:
    assert list(broken_links(document)) == []


def test_every_page_and_picture_is_linked() -> None:
    linked = {
        (document.parent / link.partition("#")[0]).resolve()
        for document in DOCUMENTS
        for link in _LINK.findall(prose(document))
    }
    there = {*PAGES, *ROOT.glob("docs/**/*.png"), *ROOT.glob("docs/**/*.svg")}
    assert {path for path in there if path not in linked} == set()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {path.name for path in PAGES} - set(listed) == set(), "add it to `nav` of mkdocs.yml"
    assert len(listed) == len(set(listed))


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


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_lines_are_short(document: Path) -> None:
    """Tables, which Markdown cannot wrap, and long links are exempt."""
    lines = document.read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > LINE and line[0] != "|" and "://" not in line]
    assert long == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_paths_exist(document: Path) -> None:
    assert sorted(path for path in paths(document) if not (ROOT / path).exists()) == []


def test_architecture_map_names_the_folders() -> None:
    named = paths(ROOT / "ARCHITECTURE.md")
    assert len(named) > 30
    folders = {path.parent for path in (ROOT / "testbed").glob("*/__init__.py")}
    assert {folder for folder in folders if f"testbed/{folder.name}/" not in named} == set()


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=lambda path: path.name
)
def test_commands_exist_with_their_options(document: Path) -> None:
    found = ((args, complaint(args, complete=complete)) for args, complete in commands(document))
    assert [(shlex.join(args), wrong) for args, wrong in found if wrong] == []


def test_wrong_command_is_detected(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(
        "`testbed plan` `testbed plot`\n\n    testbed up a.yaml --fast   # comment\n"
        "    make demo && testbed down --all\n\n```sh\n$ testbed plan\n```\n"
    )
    found = [(args, complaint(args, complete=complete)) for args, complete in commands(document)]
    assert [args for args, _ in found] == [
        ["plan"], ["up", "a.yaml", "--fast"], ["down", "--all"], ["plan"], ["plot"]
    ]  # fmt: skip
    assert sorted(args[0] for args, wrong in found if wrong) == ["plan", "plot", "up"]


@pytest.mark.parametrize("block", of_language("yaml"), ids=lambda block: block.document.stem)
def test_yaml_examples_are_valid(block: Block) -> None:
    check_yaml(block.text)


def check_yaml(text: str) -> None:
    """A topology or a part of one, a sweep, machines or profiles. Raises BadInputError."""
    data = yamlfile.parse(text).data
    if "topology" in data:
        validation_errors.validated(SweepFile, yamlfile.parse(text))
    elif "nodes" in data:
        machines.parse(text)
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


@pytest.mark.parametrize("block", of_language("python"), ids=lambda block: block.document.stem)
def test_python_examples_import_existing_names(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("__"):
            for name in node.names:
                if not hasattr(importlib.import_module(node.module), name.name):
                    importlib.import_module(f"{node.module}.{name.name}")  # else a module


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


def test_the_site_has_all_pages_and_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    loaded = re.compile(r"<(?:script|img|iframe)[^>]+src=\"?https?:|<link[^>]+stylesheet[^>]+https?:")
    assert [page for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []
    named = re.compile(r">[\w-]+\.md</a>")  # not by its title
    assert [page for page in pages if named.search(page.read_text(encoding="utf-8"))] == []
    for page, word in {"rules": "fedbuff", "topology": "compression", "commands": "--resume"}.items():
        assert word in (site / "reference" / f"{page}.html").read_text(encoding="utf-8")


@pytest.mark.browser
def test_site_search_works_from_disk(site: Path) -> None:
    if lacking := browser.missing():
        unavailable("browser", f"no {lacking}")
    with browser.opened() as window:
        window.driver.get(f"{(site / 'tutorial.html').as_uri()}?q=fednova")
        results = "return document.querySelectorAll('.md-search-result__link').length"
        eventually(lambda: window.run(results) > 0, 30)


def test_broken_link_is_detected(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(
        "# A title\n[a](a.md#a-title) [b](b.md) [c](#gone) [d](https://d.e)\n```\n[f](f)\n```\n"
    )
    assert list(broken_links(document)) == ["b.md", "#gone"]
