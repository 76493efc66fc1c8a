"""Surveys: CSV files of joint kinds of devices with weights.

The header names the column `weight` and keys of a device group, such as `profile`, `cpu`, `memory` or
`link.up`. Each row is one kind of device. A cell is a value as in a topology; an empty cell leaves the
key out. Lines that begin with # are comments.
"""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import yaml

from agents.disk.yaml_loader import Loader
from testbed.errors import BadInputError
from testbed.fleets.settings import choose
from testbed.topology import profiles, validation_errors
from testbed.topology.units import read_number
from testbed.topology.yamlfile import FaultyFileError, Place, Problem, Source

DRAWABLE = ("profile", "cpu", "gflops", "timing", "speed", "memory", "link", "think", "availability",
            "power", "thermal", "energy")  # fmt: skip
"""Columns of a survey, also with keys below them (`link.up`)."""
_WEIGHT = "weight"
_MAX_ROWS = 20_000
_ABOUT = ("about", "source", "licence", "date")
"""Comments at the beginning of a population's file."""


class SurveyRow(NamedTuple):
    keys: Mapping[str, Any]
    """Nested keys are mappings."""
    line: int
    """The first line of the file is 1."""
    columns: Mapping[tuple[str, ...], int]
    """Path of a key -> column of its cell in the line, counted in characters from 1."""


@dataclass(frozen=True, slots=True)
class Survey:
    source: Source
    """For error messages."""
    rows: tuple[SurveyRow, ...]
    weights: tuple[float, ...]
    about: Mapping[str, str] = field(default_factory=dict)
    """Comments at the beginning of the file (`_ABOUT`)."""

    def draw(self, rng: np.random.Generator) -> SurveyRow:
        return self.rows[choose(self.weights, rng)]

    def row_source(self, row: SurveyRow) -> Source:
        """Keep the places of the keys of `row`, for errors in these keys."""
        places: dict[Any, Place] = {(): Place(row.line, 1)}
        for path, column in row.columns.items():
            for length in range(len(path) - 1):
                places.setdefault(path[: length + 1], Place(row.line, column))
            places[path] = Place(row.line, column)
        return Source(self.source.name, self.source.lines, places)


def read_population(name: str) -> Survey:
    """Raises BadInputError if the catalogue has no population with this name."""
    if name not in profiles.population_names():
        raise BadInputError(
            f"no population is called {name!r}: {profiles.suggestion(name, profiles.population_names())}"
        )
    path = profiles.POPULATIONS / f"{name}.csv"
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, name: str) -> Survey:
    """Errors call the text `name`. The values of keys other than the weight are not checked. Raises
    FaultyFileError with all errors and their lines."""
    lines = tuple(text.splitlines())
    source = Source(name, lines)
    about = dict(_comments(lines))
    table = list(_cells(lines))
    if not table:
        problem = Problem(
            Place(1, 1),
            "the survey is empty, expected a header such as weight,profile,link.class and a row per "
            "kind of device",
        )
        raise source.error([problem])
    line, header, _ = table[0]
    if problems := list(_header_problems(line, header)):
        raise source.error(problems)
    if len(table) == 1:
        raise source.error([Problem(Place(line, 1), "no row follows the header, expected at least one")])
    if len(table) > _MAX_ROWS:
        message = f"found {len(table) - 1:,} rows, expected at most {_MAX_ROWS - 1:,}: merge equal kinds"
        raise source.error([Problem(Place(line, 1), message)])
    rows, weights, problems = [], [], []
    for number, cells, begins in table[1:]:
        try:
            row, weight = _row(header, number, cells, begins)
        except _CellError as error:
            problems.append(Problem(Place(number, error.column), str(error)))
            continue
        rows.append(row)
        weights.append(weight)
    if not problems and not any(weights):
        place = Place(line, 1 + sum(len(one) + 1 for one in header[: header.index(_WEIGHT)]))
        problems.append(Problem(place, "weight is 0 in all rows, expected at least one above 0"))
    if problems:
        raise source.error(problems)
    return Survey(source, tuple(rows), tuple(weights), about)


def population_rows(names: Iterable[str]) -> list[dict[str, Any]]:
    found = ((name, read_population(name)) for name in names)
    return [
        {
            "name": name,
            "kind": "population",
            "description": survey.about.get("about", ""),
            "source": survey.about.get("source", ""),
            "licence": survey.about.get("licence", ""),
            "date": survey.about.get("date", ""),
            "kinds": [
                {"weight": weight, **row.keys}
                for weight, row in zip(survey.weights, survey.rows, strict=True)
            ],
        }
        for name, survey in found
    ]


def population_text(names: Sequence[str], *, whole: bool) -> str:
    """Write a line per population, or all details if `whole` is set."""
    found = [(name, read_population(name)) for name in names]
    if not whole:
        width = max(len(name) for name in (*names, "population"))
        lines = [f"{'population':{width}}  kinds  keys"]
        for name, survey in found:
            keys = dict.fromkeys(".".join(path) for row in survey.rows for path in row.columns)
            lines.append(f"{name:{width}}  {len(survey.rows):<5}  {', '.join(keys)}")
        return "\n".join(lines)
    blocks = []
    for name, survey in found:
        facts = [
            textwrap.fill(f"{key}: {text}", 80, initial_indent="    ", subsequent_indent="      ")
            for key, text in survey.about.items()
        ]
        table = [line for line in survey.source.lines if line.strip() and not line.startswith("#")]
        blocks.append("\n".join([name, *facts, "", *(f"    {line}" for line in table)]))
    return "\n\n".join(blocks)


def check_names(survey: Survey, known: profiles.Profiles) -> Iterator[Problem]:
    for row in survey.rows:
        link = row.keys.get("link")
        named = (
            (("profile",), row.keys.get("profile"), known.devices, "device profile"),
            (
                ("link", "class"),
                link.get("class") if isinstance(link, Mapping) else None,
                known.links,
                "link class",
            ),
        )
        for path, name, entries, what in named:
            if isinstance(name, str) and name not in entries:
                column = row.columns.get(path, row.columns.get(path[:1], 1))
                guess = profiles.suggestion(name, entries)
                yield Problem(
                    Place(row.line, column),
                    f"{'.'.join(path)}: there is no {what} called {name!r}; {guess}",
                )


def problems_of(error: BadInputError) -> tuple[Problem, ...]:
    """Empty if the error has no places."""
    return error.problems if isinstance(error, FaultyFileError) else ()


class _CellError(ValueError):
    def __init__(self, column: int, message: str) -> None:
        super().__init__(message)
        self.column = column


def _comments(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield those in `_ABOUT`. A comment continues in the lines that are indented by more than one
    space."""
    name, texts = "", list[str]()
    for line in lines:
        if not line.startswith("#"):
            break
        head, colon, rest = line[1:].strip().partition(":")
        if colon and head in _ABOUT:
            if name:
                yield name, " ".join(texts)
            name, texts = head, [rest.strip()]
        elif name and line.startswith("#  "):
            texts.append(line[1:].strip())
    if name:
        yield name, " ".join(texts)


def _cells(lines: Sequence[str]) -> Iterator[tuple[int, list[str], list[int]]]:
    """Yield the number of each line with content, its cells, and the column at which each begins."""
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        cells = next(csv.reader([line], skipinitialspace=True))
        begins, column = [], 0
        for cell in cells:
            found = line.find(cell, column)
            column = found if found >= 0 else column
            begins.append(column + 1)
            column += len(cell)
        yield number, [cell.strip() for cell in cells], begins


def _header_problems(line: int, header: Sequence[str]) -> Iterator[Problem]:
    column = 1
    for index, name in enumerate(header):
        place = Place(line, column)
        column += len(name) + 1
        if name in header[:index]:
            yield Problem(place, f"the column {name!r} occurs twice: remove one of the two")
        elif name != _WEIGHT and name.split(".")[0] not in DRAWABLE:
            guess = validation_errors.did_you_mean(name, (_WEIGHT, *DRAWABLE))
            expected = f"expected {_WEIGHT} and keys of a device: {', '.join(DRAWABLE)}"
            yield Problem(place, f"found the column {name!r:.40}, {guess or expected}")
    if _WEIGHT not in header:
        yield Problem(Place(line, 1), "there is no column weight: add one with the weight of each row")
    elif len(header) < 2:
        yield Problem(
            Place(line, 1), "there is no column but weight: add at least one key such as profile"
        )


def _row(
    header: Sequence[str], number: int, cells: Sequence[str], begins: Sequence[int]
) -> tuple[SurveyRow, float]:
    if len(cells) != len(header):
        raise _CellError(1, f"found {len(cells)} cells, expected {len(header)}: {', '.join(header)}")
    keys: dict[str, Any] = {}
    columns: dict[tuple[str, ...], int] = {}
    weight = 0.0
    for name, cell, column in zip(header, cells, begins, strict=True):
        if name == _WEIGHT:
            weight = _weight(cell, column)
        elif cell:
            path = tuple(name.split("."))
            columns[path] = column
            try:
                value = as_written(Loader(cell).get_single_data())
            except (yaml.YAMLError, RecursionError):
                message = f"{name}: found {cell!r:.40}, expected a value as in a topology"
                raise _CellError(column, message) from None
            if not set_key(keys, path, value):
                raise _CellError(column, f"{name}: another column sets a value around this key")
    return SurveyRow(keys, number, columns), weight


def _weight(cell: str, column: int) -> float:
    try:
        return read_number(cell, "weight")
    except ValueError as error:
        raise _CellError(column, str(error)) from None


def as_written(value: Any) -> Any:
    """A topology has tuples after it has been read. A link given as a text becomes a mapping when it is
    merged."""
    if isinstance(value, Mapping):
        return {key: as_written(one) for key, one in value.items()}
    return tuple(map(as_written, value)) if isinstance(value, list | tuple) else value


def set_key(keys: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Return False if a value without keys is on the way. `link: lte` counts as `link: {class: lte}`."""
    if path == ("link",) and isinstance(value, str):
        path = ("link", "class")
    for key in path[:-1]:
        inner = keys.setdefault(key, {})
        if not isinstance(inner, dict):
            return False
        keys = inner
    if isinstance(keys.get(path[-1]), dict):
        return False
    keys[path[-1]] = value
    return True
