"""A YAML file as plain data, with the place of each key and value, for errors that point at them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agents.disk import files
from agents.disk.yaml_loader import Loader
from agents.texts import quantity
from testbed.errors import BadInputError

try:  # libyaml is many times as fast
    from yaml import CSafeDumper as _SafeDumper
except ImportError:
    from yaml import SafeDumper as _SafeDumper  # type: ignore[assignment]

Where = tuple[str | int, ...]
"""The keys and indices that lead to a value: `("devices", 1, "cpu")`."""

_MAX_BYTES = 4 * 2**20
_MAX_SHOWN = 100
"""Errors, and characters of a line in one."""

_MENDS = {
    "mapping values are not allowed": "put a text with a colon in quotes; the keys of one mapping begin "
    "in the same column",
    "did not find expected key": "the keys of one mapping begin in the same column; put a text with a "
    "quote in the other quotes",
    "did not find expected '-'": "the entries of a list begin in the same column, and their keys two "
    "further on",
    "did not find expected ','": "close the bracket, or add a comma",
    "could not find expected ':'": "write a key as in `key: value`",
    "found character that cannot start": "put the text in quotes",
    "found undefined alias": "put a text that begins with * in quotes",
    "found unexpected end of stream": "close the quotes",
    "found unknown escape character": "put a text with a backslash in single quotes",
    "but found another document": "remove the line ---",
}
"""What to do about an error of YAML's, by how libyaml's message on it begins."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    line: int
    """From 1."""
    column: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in a file, with how to fix it."""

    place: Place
    message: str


class FaultyFileError(BadInputError):
    """All errors in a file."""

    def __init__(self, message: str, problems: Iterable[Problem]) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Source:
    """A file, with the places of its values. Any two compare equal, so that topologies do."""

    name: str = field(default="<text>", compare=False)
    lines: tuple[str, ...] = field(default=(), compare=False)
    values: Mapping[Where, Place] = field(default_factory=dict, compare=False)
    keys: Mapping[Where, Place] = field(default_factory=dict, compare=False)
    hints: tuple[str, ...] = field(default=(), compare=False)
    """Sentences on words of the version before this one (`testbed.topology.old_words`)."""

    def place(self, where: Where) -> Place:
        """Of the value at `where`, or of the nearest one around it that is in the file."""
        while where and where not in self.values:
            where = where[:-1]
        return self.values.get(where, Place(1, 1))

    def problem(self, where: Where, message: str, *, at_key: bool = False) -> Problem:
        """`message` about the value, or the key, at `where`: `devices[1].cpu: <message>`."""
        place = self.keys.get(where) if at_key else None
        name = dotted(where)
        return Problem(place or self.place(where), f"{name}: {message}" if name else message)

    def error(self, problems: Iterable[Problem]) -> FaultyFileError:
        """All `problems` in the order of the file, each with its line, and how many they are."""
        found = sorted(set(problems), key=lambda problem: (problem.place, problem.message))
        count = quantity(len(found), "error")
        more = f", of which the first {_MAX_SHOWN} are shown" if len(found) > _MAX_SHOWN else ""
        message = "\n".join([*map(self._show, found[:_MAX_SHOWN]), f"{self.name}: {count}{more}"])
        return FaultyFileError(message, found)

    def _show(self, problem: Problem) -> str:
        line, column = problem.place.line, problem.place.column
        heading = f"{self.name}:{line}:{column}: {problem.message}"
        if not 1 <= line <= len(self.lines) or not self.lines[line - 1].strip():
            return heading
        begin = max(0, column - _MAX_SHOWN // 2)  # of a long line
        shown = self.lines[line - 1].replace("\t", " ")[begin : begin + _MAX_SHOWN]
        return f"{heading}\n{line:5} | {shown}\n      | {'^':>{column - begin}}"


@dataclass(frozen=True, slots=True)
class Document:
    data: Any
    """Dicts, tuples, str, int, float, bool and None."""
    source: Source
    problems: tuple[Problem, ...]
    """Duplicate keys; all else that YAML forbids raises."""

    def value(self, where: Where) -> Any:
        """What is at `where`; raises LookupError where nothing is."""
        value = self.data
        for key in where:
            value = value[key]
        return value


def replaced(data: Any, where: Where, value: Any) -> Any:
    """`data` with `value` at `where`; missing keys are added. Raises LookupError."""
    if not where:
        return value
    key, rest = where[0], where[1:]
    if isinstance(key, str):
        if not isinstance(data, Mapping | None):
            raise LookupError(f"leads into a value that has no keys, at {key}")
        known = data or {}
        return {**known, key: replaced(known.get(key), rest, value)}
    if not isinstance(data, tuple) or key >= len(data):
        count = len(data) if isinstance(data, tuple) else 0
        raise LookupError(f"the list in the topology has {count} entries, counted from 0: no [{key}]")
    return (*data[:key], replaced(data[key], rest, value), *data[key + 1 :])


class _Dumper(_SafeDumper):
    """Quotes texts that `Loader` would read as something else."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def dotted(where: Where) -> str:
    """`devices[1].cpu`."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in where)
    return "".join(parts).removeprefix(".")


def write(data: Any, name: str = "<text>") -> str:
    """`data` as YAML; `parse` reads the same back. Raises BadInputError, which calls it `name`, where
    YAML cannot hold it."""
    try:
        return yaml.dump(
            data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
        )
    except yaml.YAMLError as error:
        raise BadInputError(f"{name}: not all in it can be written as YAML: {error}") from error


def read(path: Path) -> Document:
    """Raises BadInputError where there is no such file, or no YAML in it."""
    return parse(text_of(path), str(path))


def text_of(path: Path) -> str:
    """What is in the file. Raises BadInputError where it cannot be read as text."""
    try:
        return files.read(path, _MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise BadInputError(
            f"{path}: there is no such file{_nearby(path)}; name a topology file, or let "
            "`testbed new examples` copy some"
        ) from None
    except OSError as error:
        reason = "this is a folder: name a file in it" if path.is_dir() else error.strerror
        raise BadInputError(f"{path}: cannot be read: {reason}") from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: byte {error.start} is not UTF-8: save the file in UTF-8") from None


def parse(text: str, name: str = "<text>") -> Document:
    """Read YAML; `name` is for errors. Raises BadInputError where it is empty or no YAML."""
    lines = tuple(text.splitlines())
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise Source(name, lines).error([Problem(Place(1, 1), _EMPTY)])
        reading = _Reading(loader)
        data = reading.value(node, ())
    except yaml.YAMLError as error:
        raise Source(name, lines).error([_syntax_problem(error, lines)]) from None
    except RecursionError:
        raise BadInputError(f"{name}: values are nested too deeply") from None
    source = Source(name, lines, reading.values, reading.keys)
    return Document(data, source, tuple(reading.problems))


_EMPTY = "the file is empty, expected a topology; `testbed new topology NAME` writes one"


class _Reading:
    """Turns nodes into data, and records the place of each."""

    def __init__(self, loader: Loader) -> None:
        self.values: dict[Where, Place] = {}
        self.keys: dict[Where, Place] = {}
        self.problems: list[Problem] = []
        self._loader = loader
        self._around: list[yaml.Node] = []

    def value(self, node: yaml.Node, where: Where) -> Any:
        if node in self._around:
            raise _error_at(node, "this value contains itself")
        self.values[where] = _place(node.start_mark)
        self._around.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
                return dict(self._items(node, where))
            if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
                return tuple(self.value(item, (*where, i)) for i, item in enumerate(node.value))
            return self._loader.construct_object(node)
        finally:
            self._around.pop()

    def _items(self, node: yaml.MappingNode, where: Where) -> Iterator[tuple[str, Any]]:
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = (
                self._loader.construct_object(key_node)
                if isinstance(key_node, yaml.ScalarNode)
                else None
            )
            if not isinstance(key, str):
                raise _error_at(key_node, "keys are texts; put this one in quotes")
            at = (*where, key)
            place = _place(key_node.start_mark)
            if key in lines:
                message = f"{dotted(at)}: is on line {lines[key]} too; keep one of the two"
                self.problems.append(Problem(place, message))
            lines[key] = place.line
            self.keys[at] = place
            yield key, self.value(value_node, at)


def _error_at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _place(mark: yaml.Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _syntax_problem(error: yaml.YAMLError, lines: tuple[str, ...]) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        before = "\n".join(lines)[: error.position]
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        return Problem(place, f"the character #x{error.character:04x} is not allowed: remove it")
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = Place(1, 1) if mark is None else _place(mark)
    line = lines[place.line - 1] if place.line <= len(lines) else ""
    if line[place.column - 1 : place.column] == "\t":
        return Problem(place, "found a tab, expected spaces: YAML is indented with spaces only")
    problem = getattr(error, "problem", None) or str(error)
    if "nesting depth" in problem:  # libyaml from 0.2.6 on has a limit of its own
        return Problem(place, "values are nested too deeply")
    context, begins = getattr(error, "context", None), getattr(error, "context_mark", None)
    if context and begins is not None and _place(begins) != place:
        context += f" that begins on line {begins.line + 1}"
    mend = next((mend for begin, mend in _MENDS.items() if problem.startswith(begin)), None)
    told = f"not YAML: {problem}" + (f" ({context})" if context else "")
    return Problem(place, f"{told}; {mend}" if mend else told)


def _nearby(path: Path) -> str:
    """A file of nearly the same name, or of the same name with another suffix."""
    names = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.parent / match[0]}?)" if match else ""


def with_block(text: str, key: str, block: str) -> str:
    """YAML `text`, a mapping in blocks, with `block` in place of what it has at the top-level `key`, or
    at its end; comments and all else stay. Raises ValueError where it is no such mapping."""
    root = Loader(text).get_single_node()
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ValueError("is no mapping in blocks, with each key on a line of its own")
    lines = [f"{line}\n" for line in text.splitlines()]
    starts = sorted(key_node.start_mark.line for key_node, _ in root.value)
    begin = next((one.start_mark.line for one, _ in root.value if one.value == key), len(lines))
    end = next((line for line in starts if line > begin), len(lines))
    while end > begin + 1 and (not lines[end - 1].strip() or lines[end - 1][0] == "#"):
        end -= 1  # what is before the next key belongs to that
    return "".join([*lines[:begin], block.rstrip("\n") + "\n", *lines[end:]])
