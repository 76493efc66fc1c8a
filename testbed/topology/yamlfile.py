"""Read a YAML file as plain data, with the place of each key and value for error messages, and with
limits for files from elsewhere."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from agents.disk import files
from agents.disk.yaml_loader import Loader
from agents.texts import quantity
from testbed.errors import BadInputError

BOUNDARY_KEY = "boundary"
"""Key of the validation context. Without limits the value is None, or missing."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Files and programs that a topology, or a sweep with it, may name. The reader of each value
    asks."""

    root: Path
    """No file outside of it may be read."""
    trusted: bool
    """Whether the topology may run programs of its own, and reach other machines."""

    def inside(self, path: Path) -> Path:
        """Raises ValueError."""
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"names {path}, a file outside of the pack: refused")
        return path

    def program(self, what: str) -> None:
        """Raises ValueError unless trusted. `what`: program, or other machine, such as `own code`."""
        if not self.trusted:
            raise ValueError(
                f"names {what}, which would run with your rights: look at {self.root}, and add --trust "
                "if you would run it as a script"
            )


try:  # libyaml is many times as fast
    from yaml import CSafeDumper as _SafeDumper
except ImportError:
    from yaml import SafeDumper as _SafeDumper  # type: ignore[assignment]

Where = tuple[str | int, ...]
"""Keys and indices that lead to a value, such as `("devices", 1, "cpu")`."""

_MAX_BYTES = 4 * 2**20
_MAX_SHOWN = 100
"""Errors to show; also characters to show of a faulty line."""

_MAX_DRAWN = 3
"""Errors to show of the drawn devices of a group."""

_MENDS = {
    "mapping values are not allowed": "put a text with a colon in quotes, and begin all keys of a "
    "mapping in the same column",
    "did not find expected key": "begin all keys of a mapping in the same column, and put a text with a "
    "quote into the other kind of quotes",
    "did not find expected '-'": "begin all entries of a list in the same column, and their keys two "
    "columns further",
    "did not find expected ','": "close the bracket, or add a comma",
    "could not find expected ':'": "write a key as `key: value`",
    "found character that cannot start": "put the text in quotes",
    "found undefined alias": "put a text that begins with * in quotes",
    "found unexpected end of stream": "close the quotes",
    "found unknown escape character": "put a text with a backslash in single quotes",
    "but found another document": "remove the line ---",
}
"""Fixes of a syntax error, by the beginning of libyaml's message."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    line: int
    """The first is 1."""
    column: int
    """The first is 1."""


@dataclass(frozen=True, slots=True)
class Problem:
    place: Place
    message: str
    origin: str = ""
    """Source of the faulty keys of a drawn device, such as `survey.csv:7`."""


class FaultyFileError(BadInputError):
    def __init__(self, message: str, problems: Iterable[Problem]) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class DrawnPlace:
    index: int
    """Index of the device's group in the file."""
    origin: str = ""
    """Source of the drawn keys, such as `survey.csv:7`."""


@dataclass(frozen=True, slots=True)
class Source:
    """All sources compare equal, so that topologies from different files can compare equal."""

    name: str = field(default="<text>", compare=False)
    """Path of the file, or a name of the text, for messages."""
    lines: tuple[str, ...] = field(default=(), compare=False)
    values: Mapping[Where, Place] = field(default_factory=dict, compare=False)
    keys: Mapping[Where, Place] = field(default_factory=dict, compare=False)
    members: tuple[DrawnPlace, ...] = field(default=(), compare=False)
    """Place of each device group, if fleets became groups; empty if the groups are those of the file."""

    def _member(self, where: Where) -> DrawnPlace | None:
        if self.members and where[:1] == ("devices",) and len(where) > 1:
            index = where[1]
            return self.members[index] if isinstance(index, int) else None
        return None

    def place(self, where: Where) -> Place:
        """If the file has no value at `where`, return the place of the innermost value around it."""
        if (member := self._member(where)) is not None:
            where = (where[0], member.index, *where[2:])
        while where and where not in self.values:
            where = where[:-1]
        return self.values.get(where, Place(1, 1))

    def problem(self, where: Where, message: str, *, at_key: bool = False) -> Problem:
        """The text of the problem is `devices[1].cpu: <message>`."""
        member = self._member(where)
        written = where if member is None else (where[0], member.index, *where[2:])
        place = self.keys.get(written) if at_key else None
        name = dotted_path(written)
        if member is not None and member.origin:
            group = dotted_path(written[:2])
            name = f"{group} ({member.origin}){name.removeprefix(group)}"
        text = f"{name}: {message}" if name else message
        return Problem(place or self.place(where), text, "" if member is None else member.origin)

    def error(self, problems: Iterable[Problem]) -> FaultyFileError:
        """The message shows the first problems in the order of the file, with the faulty lines (at most
        `_MAX_SHOWN`), and the number of problems."""
        found = sorted(set(problems), key=lambda problem: (problem.place, problem.message))
        count = quantity(len(found), "error")
        shown = list(_without_repetitions(found))
        more = f", only the first {_MAX_SHOWN} are shown" if len(shown) > _MAX_SHOWN else ""
        message = "\n".join([*map(self._show, shown[:_MAX_SHOWN]), f"{self.name}: {count}{more}"])
        return FaultyFileError(message, found)

    def _show(self, problem: Problem) -> str:
        line, column = problem.place.line, problem.place.column
        heading = f"{self.name}:{line}:{column}: {problem.message}"
        if not 1 <= line <= len(self.lines) or not self.lines[line - 1].strip():
            return heading
        begin = max(0, column - _MAX_SHOWN // 2)  # of the part of a long line to show
        shown = self.lines[line - 1].replace("\t", " ")[begin : begin + _MAX_SHOWN]
        return f"{heading}\n{line:5} | {shown}\n      | {'^':>{column - begin}}"


def _without_repetitions(problems: Iterable[Problem]) -> Iterator[Problem]:
    """At most `_MAX_DRAWN` of the drawn devices of each group are left. The last of them names the
    number of those that are left out."""
    for _, group in itertools.groupby(problems, lambda one: (one.place, bool(one.origin))):
        found = list(group)
        if not found[0].origin or len(found) <= _MAX_DRAWN:
            yield from found
            continue
        *first, last = found[:_MAX_DRAWN]
        yield from first
        rest = quantity(len(found) - _MAX_DRAWN, "more error")
        yield replace(last, message=f"{last.message} ({rest} of drawn devices of this group)")


@dataclass(frozen=True, slots=True)
class Document:
    data: Any
    """dicts, tuples, str, int, float, bool and None."""
    source: Source
    problems: tuple[Problem, ...]
    """Duplicate keys. Other YAML errors are raised while the file is parsed."""

    def value(self, where: Where) -> Any:
        """Raises LookupError."""
        value = self.data
        for key in where:
            value = value[key]
        return value


def replace_value(data: Any, where: Where, value: Any) -> Any:
    """Copy `data`. Missing keys are added. Raises LookupError if `where` leads through a value without
    keys, or past the end of a list."""
    if not where:
        return value
    key, rest = where[0], where[1:]
    if isinstance(key, str):
        if not isinstance(data, Mapping | None):
            raise LookupError(f"{key} cannot be set in a value that has no keys")
        known = data or {}
        return {**known, key: replace_value(known.get(key), rest, value)}
    if not isinstance(data, tuple) or key >= len(data):
        count = len(data) if isinstance(data, tuple) else 0
        raise LookupError(f"[{key}] does not exist: the list has {count} entries, the first is [0]")
    return (*data[:key], replace_value(data[key], rest, value), *data[key + 1 :])


class _Dumper(_SafeDumper):
    """Quotes texts that `Loader` would read as another type."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers


def dotted_path(where: Where) -> str:
    """`devices[1].cpu` for example."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in where)
    return "".join(parts).removeprefix(".")


def write(data: Any, name: str = "<text>") -> str:
    """`parse` reads it back. Raises BadInputError, which calls the data `name`, for values that YAML
    cannot represent."""
    try:
        return yaml.dump(
            data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
        )
    except yaml.YAMLError as error:
        raise BadInputError(f"{name}: cannot be written as YAML: {error}") from error


def read(path: Path) -> Document:
    """Raises BadInputError if the file does not exist or is not YAML."""
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Raises BadInputError if the file cannot be read as UTF-8."""
    try:
        content = files.read(path, _MAX_BYTES)
        if content.startswith(b"PK\x03\x04"):
            raise BadInputError(f"{path} is a pack or another zip file: testbed up or sweep runs a pack")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise BadInputError(
            f"{path}: no such file{_similar_name(path)}; name a topology file, or get examples with "
            "`testbed new examples`"
        ) from None
    except OSError as error:
        reason = "this is a folder: name a file in it" if path.is_dir() else error.strerror
        raise BadInputError(f"{path}: cannot be read: {reason}") from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: byte {error.start} is not UTF-8: save the file in UTF-8") from None


def parse(text: str, name: str = "<text>") -> Document:
    """Errors call the text `name`. Raises BadInputError if the text is empty or not YAML."""
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
    """Converts YAML nodes to data, and records the place of each."""

    def __init__(self, loader: Loader) -> None:
        self.values: dict[Where, Place] = {}
        self.keys: dict[Where, Place] = {}
        self.problems: list[Problem] = []
        self._loader = loader

    def value(self, node: yaml.Node, where: Where) -> Any:
        self.values[where] = _place(node.start_mark)
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return dict(self._items(node, where, set()))
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            return tuple(self.value(item, (*where, i)) for i, item in enumerate(node.value))
        return self._loader.construct_object(node)

    def _items(self, node: yaml.MappingNode, where: Where, known: set[str]) -> Iterator[tuple[str, Any]]:
        """Yield the keys and values of a mapping, including merged ones (`<<`).

        Skip the keys in `known`, because the mapping that merges this mapping has its own values for
        them. Add the mapping's keys to `known`.
        """
        lines: dict[str, int] = {}
        merged: list[yaml.MappingNode] = []
        for key_node, value_node in node.value:
            key = (
                self._loader.construct_object(key_node)
                if isinstance(key_node, yaml.ScalarNode)
                else None
            )
            if not isinstance(key, str):
                raise _error_at(key_node, "a key must be a text; put it in quotes")
            if key == "<<" and key_node.style not in ("'", '"'):
                merged += _mappings_to_merge(value_node)
                continue
            at = (*where, key)
            place = _place(key_node.start_mark)
            if key in lines:
                message = f"{dotted_path(at)}: is also on line {lines[key]}; keep one of the two"
                self.problems.append(Problem(place, message))
            lines[key] = place.line
            if key not in known:
                self.keys[at] = place
                yield key, self.value(value_node, at)
        known.update(lines)
        for other in merged:
            yield from self._items(other, where, known)


def _mappings_to_merge(node: yaml.Node) -> list[yaml.MappingNode]:
    """Mappings that the value of a merge key (`<<: *defaults`) names."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(one, yaml.MappingNode) for one in nodes):
        raise _error_at(
            node, "<< needs keys and values, or a list of them: write a name, as in <<: *fast"
        )
    return list(nodes)


def _error_at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _place(mark: yaml.Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _syntax_problem(error: yaml.YAMLError, lines: tuple[str, ...]) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        before = "\n".join(lines)[: error.position]
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        return Problem(place, f"the character U+{error.character:04X} is not allowed: remove it")
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = Place(1, 1) if mark is None else _place(mark)
    line = lines[place.line - 1] if place.line <= len(lines) else ""
    if line[place.column - 1 : place.column] == "\t":
        return Problem(place, "found a tab, expected spaces: YAML allows only spaces for indentation")
    problem = getattr(error, "problem", None) or str(error)
    if "nesting depth" in problem:  # libyaml has its own limit since 0.2.6
        return Problem(place, "values are nested too deeply")
    context, begins = getattr(error, "context", None), getattr(error, "context_mark", None)
    if context and begins is not None and _place(begins) != place:
        context += f" that begins on line {begins.line + 1}"
    mend = next((mend for begin, mend in _MENDS.items() if problem.startswith(begin)), None)
    message = f"not YAML: {problem}" + (f" ({context})" if context else "")
    return Problem(place, f"{message}; {mend}" if mend else message)


def _similar_name(path: Path) -> str:
    """Return ` (did you mean FILE?)` or an empty text."""
    names = [entry.name for entry in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.parent / match[0]}?)" if match else ""


def with_block(text: str, key: str, block: str) -> str:
    """Replace or append the top-level `key` with its value. Comments and everything else stay unchanged.
    Raises ValueError if `text` is not a mapping in block style."""
    root = Loader(text).get_single_node()
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ValueError("is not a mapping with each key on a line of its own")
    lines = [f"{line}\n" for line in text.splitlines()]
    starts = sorted(key_node.start_mark.line for key_node, _ in root.value)
    begin = next((one.start_mark.line for one, _ in root.value if one.value == key), len(lines))
    end = next((line for line in starts if line > begin), len(lines))
    while end > begin + 1 and (not lines[end - 1].strip() or lines[end - 1][0] == "#"):
        end -= 1  # empty lines and comments before the next key belong to that key
    return "".join([*lines[:begin], block.rstrip("\n") + "\n", *lines[end:]])


PATH_KEYS = frozenset(
    {
        *("behaviour", "code", "csv", "down", "from", "from_log", "from_run", "image", "initial"),
        *("path", "trace", "up"),
    }
)
"""Keys of a topology whose value may be a path. Some of them may also have another value, such as the
rate of a link, or the tag of an image."""


def replace_paths(data: Any, change: Callable[[str, str], str | None], key: str = "") -> Any:
    """Return a copy of `data`, which was read from YAML. `change` gets each key in `PATH_KEYS` with its
    text, and returns the new text, or None to leave the text unchanged.

    Keys of a sweep are paths of keys: the value of `task.initial` belongs to the key `initial`. All
    texts in a list below a key belong to that key. `key`: key of `data` itself.
    """
    if isinstance(data, Mapping):
        return {name: replace_paths(value, change, _last_key(name)) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [replace_paths(value, change, key) for value in data]
    if isinstance(data, str) and key in PATH_KEYS:
        changed = change(key, data)
        return data if changed is None else changed
    return data


def _last_key(name: object) -> str:
    return str(name).rpartition(".")[2].partition("[")[0]


def leads_outside(text: str) -> bool:
    return text.startswith("/") or ".." in PurePosixPath(text).parts


def path_keys(data: Any) -> Iterator[tuple[str, Any]]:
    """A key of a sweep that is a path of keys, such as `task.name`, is yielded as a whole."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield str(name), value
            yield from path_keys(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from path_keys(value)
