"""Checks of the documentation: `python -m tests.documents` prints each shelf's words, and what is wrong.

Pages refer to what exists: by links between them, by paths of the project, and by the commands that they
show. Each shelf has a limit of words and an index that names its pages. `make docs` runs this.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer.main

from testbed.cli.main import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LIMITS = {"guide": 12_000, "concepts": 8_000, "evidence": 10_000}
"""Words of each shelf at most. What a program writes into a page does not count."""
OWN_LIMITS = {DOCS / "concepts" / "related-work.md": 2_500}
"""Pages that do not count on their shelf, with the words of each at most."""
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), ROOT / "conformance" / "README.md", *PAGES]
LINE = 120
"""Characters of a line at most, except in tables and long links."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(
    r"`((?:agents|analysis|conformance|testbed|docs|tests|topologies|benchmarks)/[^\s`<]*)`"
)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|\n\n)((?:    [^\n]*\n)+)")
_INLINE = re.compile(r"`(testbed [^`\n]+)`")
_GENERATED = re.compile(r"<!-- (?:\S+: begin|begin \S+) -->.*?<!-- (?:\S+: end|end \S+) -->", re.DOTALL)
_INDEX_LINE = re.compile(r"^- \[[^\]]+\]\(([\w./-]+\.md)\): \S.*$", re.MULTILINE)
_SOURCE = re.compile(r"^\*.+ · .+ · 20\d\d-\d\d-\d\d(?: to (?:20\d\d-)?(?:\d\d-)?\d\d)?\*$")
"""The line below a table of measurements: command · machine · date."""
_MODULE = re.compile(r"`(?:agents|analysis|testbed)/[^`]*`")
_SHELL = {"|", "&&", "||", ";", ">", "&"}
_SHELL_LANGUAGES = {"", "sh", "bash", "console"}


class Block(NamedTuple):
    """A block of code in a document; `language` is "" if the block is indented or names none."""

    document: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:\n{self.text}"


def prose(path: Path) -> str:
    """Return the text of `path` without its blocks of code."""
    return _FENCED.sub("", path.read_text(encoding="utf-8"))


def blocks(path: Path) -> Iterator[Block]:
    """Yield the blocks of code, fenced and indented."""
    text = path.read_text(encoding="utf-8")
    for indent, language, block in _FENCED.findall(text):
        yield Block(path, language, re.sub(f"^{indent}", "", block, flags=re.MULTILINE))
    for block in _INDENTED.findall(_FENCED.sub("", text)):
        yield Block(path, "", re.sub("^    ", "", block, flags=re.MULTILINE))


def anchors(path: Path) -> set[str]:
    """Return the names that the headings of `path` have in links."""
    headings = _HEADING.findall(prose(path))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named_paths(document: Path) -> set[str]:
    """Return the paths of the project that stand between backticks, outside blocks of code."""
    return set(_PATH.findall(prose(document)))


def absent_tests(document: Path) -> list[str]:
    """Return names of tests in the text that no file and no function of the tests has."""
    named = set(re.findall(r"`(test_\w+)(?:\.py)?`", prose(document)))
    return sorted(named - _tests()) if named else []


@functools.cache
def _tests() -> set[str]:
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = (re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE) for file in files)
    return {file.stem for file in files}.union(*functions)


def links(document: Path) -> list[str]:
    """Return the targets of all links."""
    return _LINK.findall(prose(document))


def broken_links(document: Path) -> Iterator[str]:
    """Yield links to files and headings that do not exist."""
    for link in links(document):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def commands(document: Path) -> Iterator[tuple[list[str], bool]]:
    """Yield the arguments of `testbed` in `document`, and whether they are complete, as in a block."""
    for block in blocks(document):
        if block.language in _SHELL_LANGUAGES:
            for line in block.text.replace("\\\n", " ").splitlines():
                yield from ((arguments, True) for arguments in _arguments(line))
    for text in _INLINE.findall(prose(document)):
        yield from ((arguments, False) for arguments in _arguments(text))


def _arguments(line: str) -> Iterator[list[str]]:
    """Yield what follows `testbed` in a line of a shell, for each `testbed` that the line runs."""
    for program, arguments in _programs(line):
        if Path(program).name == "testbed" and all(map(str.isprintable, arguments)):
            yield [re.sub(r"^\[|\]$|…$|\.\.\.\]?$", "", word) for word in arguments]


def _programs(line: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each program that a line of a shell runs, with its arguments."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:  # not a line of a shell
        return
    while words:
        end = next((i for i, word in enumerate(words) if word in _SHELL), len(words))
        program, *arguments = [word for word in words[:end] if not re.match(r"\w+=", word)] or [""]
        yield program, arguments
        words = words[end + 1 :]


@functools.cache
def command_line() -> Any:
    """Return the commands of `testbed`."""
    return typer.main.get_command(app)


def complaint(arguments: list[str], *, complete: bool) -> str | None:
    """Return what is wrong with the form of `testbed`'s arguments; their values are not checked."""
    command: Any = command_line()
    rest = list(arguments)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        command, name = command.get_command(typer.Context(command), rest[0]), rest.pop(0)
        if command is None:
            return f"there is no command {name}"
    if hasattr(command, "commands"):
        return None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # of --help
            command.make_context("testbed", rest)
    except typer.Exit:
        return None
    except Exception as error:  # noqa: BLE001  (typer's own click is private)
        kind = type(error).__name__
        allowed = (
            ["BadParameter"] if complete else ["BadParameter", "MissingParameter", "BadOptionUsage"]
        )
        return None if kind in allowed else str(error)
    return None


def wrong_commands(document: Path) -> Iterator[str]:
    """Yield commands and options of `testbed` that do not exist."""
    for arguments, complete in commands(document):
        if wrong := complaint(arguments, complete=complete):
            yield f"testbed {shlex.join(arguments)}: {wrong}"


def wrong_shell_lines(document: Path) -> Iterator[str]:
    """Yield lines of a shell that do not parse, or run a make target or a module that does not exist.

    Indented blocks are lines of a shell, and so are fenced blocks in `sh`, `bash` and `console`."""
    for block in blocks(document):
        if block.language not in _SHELL_LANGUAGES or (not block.language and not _is_indented(block)):
            continue
        lines = re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)
        check = ["bash", "-n"]
        said = subprocess.run(check, input=lines, capture_output=True, text=True, check=False)
        if said.returncode:
            yield f"{block.text.strip()}: {said.stderr.strip()}"
        for line in lines.replace("\\\n", " ").splitlines():
            for program, arguments in _programs(line):
                if wrong := _missing(program, arguments):
                    yield f"{line.strip()}: {wrong}"


def _is_indented(block: Block) -> bool:
    return block.text not in [text for _, _, text in _FENCED.findall(block.document.read_text("utf-8"))]


def _missing(program: str, arguments: list[str]) -> str | None:
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        wrong = [name for name in arguments if "=" not in name and name not in targets]
        return f"the Makefile has no target {wrong[0]}" if wrong else None
    if Path(program).name in ("python", "python3") and arguments[:1] == ["-m"]:
        module = arguments[1] if len(arguments) > 1 else ""
        ours = module.partition(".")[0] in ("benchmarks", "tests")
        if ours and importlib.util.find_spec(module) is None:
            return f"there is no module {module}"
    return None


def shelf_pages(shelf: str) -> list[Path]:
    """Return the pages of a shelf that count, the index among them; the pages of papers and benchmark
    are evidence."""
    pages = sorted((DOCS / shelf).rglob("*.md"))
    if shelf == "evidence":
        pages += sorted((DOCS / "papers").glob("*.md")) + sorted((DOCS / "benchmark").glob("*.md"))
    return [page for page in pages if page not in OWN_LIMITS]


def words(page: Path) -> int:
    """Return how many words `page` has, with its code, without what a program writes into it.

    A word has a letter or a digit: the bars of tables are none."""
    text = _GENERATED.sub("", page.read_text(encoding="utf-8"))
    return sum(1 for word in text.split() if re.search(r"\w", word))


def too_long() -> Iterator[str]:
    """Yield shelves and pages that are over their limits."""
    for shelf, limit in LIMITS.items():
        total = sum(map(words, shelf_pages(shelf)))
        if total > limit:
            yield f"docs/{shelf} has {total:,} words, {limit:,} are allowed: condense, or move it"
    for page, limit in OWN_LIMITS.items():
        if page.exists() and words(page) > limit:
            yield f"{page.relative_to(ROOT)} has {words(page):,} words, {limit:,} are allowed"


def wrong_index(shelf: str) -> Iterator[str]:
    """Yield what is wrong with a shelf's index: no line `- [Title](page.md): what` for a page."""
    index = DOCS / shelf / "index.md"
    text = index.read_text(encoding="utf-8")
    listed = [(index.parent / name).resolve() for name in _INDEX_LINE.findall(text)]
    there = {page for page in shelf_pages(shelf) if page.parent == index.parent and page != index}
    there |= {page for page in OWN_LIMITS if page.parent == index.parent and page.exists()}
    for page in sorted(there - set(listed)):
        yield f"{index.relative_to(ROOT)} has no line for {page.name}"
    for page in sorted({page for page in listed if listed.count(page) > 1}):
        yield f"{index.relative_to(ROOT)} has two lines for {page.name}"


def unsourced_tables(page: Path) -> Iterator[str]:
    """Yield tables of measurements without the line below them that says command, machine and date."""
    text = _GENERATED.sub("", prose(page))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        below = text.partition(table)[2].lstrip("\n").partition("\n\n")[0].replace("\n", " ").strip()
        if not _SOURCE.match(below):
            yield table.partition("\n")[0]


def begins_with_an_example(page: Path) -> bool:
    """Return whether a block of code comes before the first heading below the title."""
    text = page.read_text(encoding="utf-8")
    example = min((at for at in (text.find("```"), text.find("\n\n    ")) if at >= 0), default=len(text))
    heading = text.find("\n## ")
    return example < (heading if heading >= 0 else len(text))


def module_names(page: Path) -> list[str]:
    """Return the names of modules and their files outside of blocks of code."""
    return sorted(set(_MODULE.findall(prose(page))))


def long_lines(page: Path) -> Iterator[str]:
    """Yield lines of more than `LINE` characters, except in tables and with links."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if len(line) > LINE and line[0] != "|" and "://" not in line:
            yield line


def problems() -> Iterator[str]:
    """Yield all that is wrong with the documents."""
    yield from too_long()
    for shelf in LIMITS:
        yield from wrong_index(shelf)
    for document in DOCUMENTS:
        name = document.relative_to(ROOT)
        yield from (f"{name}: link to {link}, which does not exist" for link in broken_links(document))
        yield from (f"{name}: {wrong}" for wrong in wrong_shell_lines(document))
        if document.name != "CHANGELOG.md":
            yield from (f"{name}: {wrong}" for wrong in wrong_commands(document))
        absent = sorted(path for path in named_paths(document) if not (ROOT / path).exists())
        yield from (f"{name}: there is no {path}" for path in [*absent, *absent_tests(document)])
    for page in (page for page in PAGES if page.parent.name != "papers"):
        name = page.relative_to(ROOT)
        yield from (f"{name}: line of over {LINE} characters: {line}" for line in long_lines(page))
    for page in (DOCS / "evidence").glob("*.md"):
        yield from (f"{page.relative_to(ROOT)}: no command, machine and date below {table}"
                    for table in unsourced_tables(page))  # fmt: skip
    for page in (DOCS / "guide").glob("*.md"):
        if page.name != "index.md" and not begins_with_an_example(page):
            yield f"{page.relative_to(ROOT)}: no example before the first heading"
        yield from (f"{page.relative_to(ROOT)} names the module {name}" for name in module_names(page))


def main() -> int:
    """Print the words of each shelf and all problems; 1 if there are any."""
    for shelf, limit in LIMITS.items():
        print(f"docs/{shelf}: {sum(map(words, shelf_pages(shelf))):,} of {limit:,} words")
    wrong = list(problems())
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
