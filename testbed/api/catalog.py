"""Catalog of rules, selections, tasks and profiles. Descriptions come from the docstrings of the
source."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from agents.rules import RULES
from agents.rules.interface import Rule
from agents.selection import SELECTIONS
from agents.tasks import TASKS
from testbed.errors import BadInputError, writable_file
from testbed.topology.fields import docstrings
from testbed.topology.profiles import Profiles
from testbed.topology.units import format_duration
from testbed.topology.validation_errors import did_you_mean

_WIDTH = 80
_UNBROKEN = "\N{NO-BREAK SPACE}"
_WORDS = {bool: "true or false", float: "number", int: "whole number", str: "text"}


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    type: str
    """Words such as `number, or null`."""
    required: bool
    default: Any
    """In the notation of a topology; None if the parameter is required, or if the default is null."""
    description: str
    """Docstring of the field; empty if it has none."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    name: str
    about: str
    """Docstring of the class."""
    parameters: tuple[Parameter, ...]

    @property
    def facts(self) -> dict[str, str | None]:
        """Properties such as `paper` or `dataset`; None for a property that the entry does not have."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in CatalogEntry.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionEntry(CatalogEntry):
    """A selection of the clients that train next."""

    paper: str | None
    """Paper that describes the selection; None if the selection is not from a paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleEntry(CatalogEntry):
    """An aggregation rule."""

    equation: str | None
    """Equation in the paper of the rule; None if the rule is not from a paper."""
    paper: str | None
    """Paper that describes the rule; None if the rule is not from a paper."""
    fednova: str
    """Whether the rule supports FedNova: `yes`, `no`, or `depends on the parameters`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry(CatalogEntry):
    """A learning task."""

    dataset: str | None
    """Name of the task's dataset; None if the task makes the data itself, or the topology names the
    data."""


E = TypeVar("E", bound=CatalogEntry)


def rules() -> list[RuleEntry]:
    """Return the aggregation rules, sorted by name."""
    return [_rule(name, cls) for name, cls in sorted(RULES.items())]


def selections() -> list[SelectionEntry]:
    """Return the selections of the clients that train next, sorted by name."""
    return [
        SelectionEntry(name, *_described(cls), paper=cls.paper or None)
        for name, cls in sorted(SELECTIONS.items())
    ]


def tasks() -> list[TaskEntry]:
    """Return the learning tasks, sorted by name."""
    return [
        TaskEntry(name, *_described(cls), dataset=None if cls.dataset is None else str(cls.dataset))
        for name, cls in sorted(TASKS.items())
    ]


def find(name: str, entries: Iterable[E], what: str) -> E:
    """`what`: kind of the entries. Raises BadInputError that has a similar name, or all names."""
    known = {entry.name: entry for entry in entries}
    if name in known:
        return known[name]
    guess = did_you_mean(name, list(known)) or f"there are {', '.join(known)}."
    raise BadInputError(f"no {what} is called {name!r}: {guess}")


def profiles() -> Profiles:
    """Return the device profiles and link classes of the testbed, of the user, and of the working
    directory. Raises BadInputError if a profiles file has errors."""
    from testbed.topology import profiles as reader

    return reader.load(Path())


def populations() -> list[str]:
    from testbed.topology import profiles as reader

    return reader.population_names()


def profile_rows(shown: Profiles, populations: Sequence[str] = ()) -> list[dict[str, Any]]:
    from testbed.fleets import surveys
    from testbed.topology import profiles as reader

    return [*reader.rows(shown), *surveys.population_rows(populations)]


def profile_text(shown: Profiles, *, whole: bool, populations: Sequence[str] = ()) -> str:
    """Return one line per profile, or all details if `whole` is set. `populations`: names of populations
    to add."""
    from testbed.fleets import surveys
    from testbed.topology import profiles as reader

    parts = [reader.details(shown) if whole else reader.listing(shown)]
    if populations:
        parts.append(surveys.population_text(populations, whole=whole))
    if shown.devices:
        parts.append(reader.EMULATED)
    return "\n\n".join(filter(None, parts))


def add_profile(
    name_or_file: str,
    to: str | Path = "profiles.yaml",
    *,
    seconds: float = 8.0,
    on_progress: Callable[[str], object] = lambda _: None,
) -> list[str]:
    """Add device profiles to the file `to`; return their names.

    If `name_or_file` is a file that the program of `profile_script` has written, the profiles in this
    file are added. Otherwise this machine is measured for `seconds` per kind of work, and its profile is
    called `name_or_file`. `on_progress` is called with progress lines. Raises BadInputError.
    """
    from testbed.speed import device_benchmark
    from testbed.topology import profiles

    writable_file(Path(to))  # first, because measuring takes minutes
    if (file := Path(name_or_file)).is_file():
        entries = file.read_text(encoding="utf-8")
    elif not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", name_or_file):
        raise BadInputError(
            f"--add {name_or_file}: no such file, and not a valid profile name (at most 40 lower-case "
            "letters, digits and -)"
        )
    else:
        on_progress("All cores are measured at once: close other programs meanwhile.")
        found = device_benchmark.measure(seconds, on_progress)
        entries = device_benchmark.profile_text(name_or_file, found)
        for line in device_benchmark.remarks(found):
            on_progress(line)
    return profiles.add_own_profile(Path(to), entries, name_or_file)


def profile_script(to: str | Path) -> Path:
    """Write the program that measures a device to the file `to`; return the file's path. Copy the file
    to the device and run it there. The program needs only Python and PyTorch."""
    from testbed.speed import device_benchmark

    path = writable_file(Path(to), "--script")
    path.write_text(Path(device_benchmark.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a topology, for editors."""
    from testbed.topology import json_schema

    return json_schema()


def brief(entry: CatalogEntry) -> str:
    """Name, facts, and the parameters with their defaults."""
    parameters = ", ".join(map(_with_default, entry.parameters)) or "no parameters"
    return f"{_heading(entry)}\n{_wrap(parameters, '    ', '  ')}"


def full(entry: CatalogEntry) -> str:
    """Name, facts, docstring of the class, and every parameter."""
    blocks = [_heading(entry), *map(_reflow, entry.about.split("\n\n"))]
    if entry.parameters:
        blocks.append("\n".join(["Parameters", *map(_block, entry.parameters)]))
    return "\n\n".join(blocks)


def _described(cls: type) -> tuple[str, tuple[Parameter, ...]]:
    """Return what the source of a class says: its docstring and its parameters."""
    return inspect.cleandoc(cls.__doc__ or ""), tuple(_parameters(cls))


def _rule(name: str, cls: type[Rule]) -> RuleEntry:
    takes: Any = cls.takes_fednova  # a property if it depends on the parameters
    fednova = {True: "yes", False: "no"}.get(takes, "depends on the parameters")
    return RuleEntry(name, *_described(cls), equation=cls.equation, paper=cls.paper, fednova=fednova)


def _parameters(cls: type) -> Iterator[Parameter]:
    hints = typing.get_type_hints(cls, include_extras=True)
    descriptions = docstrings(cls)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING
        default: Any = None if required else field.default
        hint = hints[field.name]
        if _is_duration(hint) and isinstance(default, float):
            default = format_duration(default)
        yield Parameter(
            field.name, _type_text(hint), required, default, descriptions.get(field.name, "")
        )


def _is_duration(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return "s" in get_args(hint)[1:]
    return any(_is_duration(option) for option in get_args(hint))


def _type_text(hint: Any) -> str:
    """`float | None` is `number, or null`. Unknown types are shown as code."""
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            return "duration" if _is_duration(hint) else _type_text(arguments[0])
        case origin if origin is Literal:
            return _join_with_or([str(choice) for choice in arguments])
        case origin if origin is Union or origin is types.UnionType:
            options = [_type_text(option) for option in arguments if option is not type(None)]
            return _join_with_or(options) + (", or null" if type(None) in arguments else "")
        case origin if origin is tuple:
            return f"list of {_plural(arguments[0])}"
    return _WORDS.get(hint, str(hint))


def _plural(hint: Any) -> str:
    words = _type_text(hint)
    return words.replace("list of", "lists of", 1) if words.startswith("list of") else f"{words}s"


def _join_with_or(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _with_default(parameter: Parameter) -> str:
    if parameter.required:
        return parameter.name
    return f"{parameter.name}:{_UNBROKEN}{_yaml_text(parameter.default)}"


def _yaml_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _heading(entry: CatalogEntry) -> str:
    facts = [f"{name}: {value}" for name, value in entry.facts.items() if value not in (None, "no")]
    return "\n".join([entry.name, *(_wrap(fact, "    ", "  ") for fact in facts)])


def _block(parameter: Parameter) -> str:
    default = "required" if parameter.required else f"default {_yaml_text(parameter.default)}"
    lines = [_wrap(f"{parameter.name}: {parameter.type}; {default}", "    ", "  ")]
    if parameter.description:
        lines.append(_wrap(parameter.description, "        "))
    return "\n".join(lines)


def _reflow(paragraph: str) -> str:
    """If the paragraph has indented lines (equations, lists), wrap each line separately."""
    lines = paragraph.splitlines()
    if not any(line.startswith(" ") for line in lines):
        return _wrap(" ".join(lines), "")
    indents = [line[: len(line) - len(line.lstrip())] for line in lines]
    return "\n".join(map(_wrap, lines, indents, itertools.repeat("  ")))


def _wrap(text: str, indent: str, hanging: str = "") -> str:
    wrapper = textwrap.TextWrapper(_WIDTH, indent, indent + hanging, break_on_hyphens=False)
    return wrapper.fill(text.strip()).replace(_UNBROKEN, " ")
