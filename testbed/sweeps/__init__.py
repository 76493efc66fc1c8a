"""A sweep: one topology, and what changes from run to run (`testbed sweep`).

    topology: base.yaml                         # path from the sweep file's folder
    variants:                                   # optional: named sets of changes
      fedavg: {rule: {name: fedavg}}
      fedbuff: {rule: {name: fedbuff, buffer_size: 3}, task.local.lr: 0.05}
    grid:                                       # optional: every combination is run
      "devices[0].cpu": [0.1, 0.25]
      seed: [1, 2, 3]
    target: 80%                                 # accuracy whose cost the final table shows
    repeat_invalid: 1                           # maximum number of repeats of a run that is not valid

`from_mapping` reads a sweep with these keys from a mapping. `sweeping.run` runs a sweep from either
source:

    study = from_mapping({"topology": "base.yaml", "grid": {"seed": [1, 2]}}, "study", Path(), options)
    runs = [analysis.load.load(one.path) for one in sweeping.run(study, options, Path("runs/study"))]

A cell is one variant with one combination of the grid. Errors in a cell point to the sweep's file.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from agents.disk import files
from analysis import names
from testbed import topology
from testbed.data import datasets
from testbed.errors import BadInputError
from testbed.plan import Plan
from testbed.plan.machines import FILE as MEASURED
from testbed.run import preparing
from testbed.run.options import Options
from testbed.topology import Topology, profiles, units, validation_errors, yamlfile
from testbed.topology.fields import Model, PositiveShare, expecting
from testbed.topology.profiles import FILE as PROFILES
from testbed.topology.profiles import Profiles
from testbed.topology.schema import FLEET
from testbed.topology.yamlfile import Boundary, Document, FaultyFileError, Place, Problem, Source, Where

_MAX_CELLS = 10_000
_STEP = re.compile(r"([A-Za-z_]\w*)((?:\[\d+\])*)")
_MAX_VALUE_CHARACTERS = 24
"""Characters of a value in a label."""


def _not_empty(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("expected at least one value such as [1, 2, 3]")
    return values


class SweepFile(Model):
    """Keys of a sweep file."""

    topology: str
    """Path relative to the sweep file's folder."""
    variants: dict[str, dict[str, Any]] = Field(default={})
    """Each variant has the new value of each key that it changes, by the key's path."""
    grid: dict[str, Annotated[tuple[Any, ...], AfterValidator(_not_empty)]] = Field(default={})
    """Values to try, by the path of their key. The sweep runs every combination."""
    target: PositiveShare | None = None
    """Accuracy from 0 to 1 whose cost the final table shows."""
    repeat_invalid: Annotated[int, Field(ge=0), expecting("a whole number from 0 on")] = 1
    """Maximum number of times that a run is repeated if it is not valid."""


@dataclass(frozen=True, slots=True)
class KeyChange:
    path: str
    """Key as the user wrote it, such as `devices[0].cpu`."""
    where: Where
    value: Any
    at: Where
    """Place of the value in the sweep's file, for error messages."""
    words: str
    """Text of the value in the cell's label; empty for a change that comes from a variant."""


@dataclass(frozen=True, slots=True)
class SweepCell:
    label: str
    """Text that distinguishes the cell from the other cells of the sweep. The seed is left out."""
    variant: str
    """Empty if the sweep has no variants."""
    changes: tuple[KeyChange, ...]
    topology: Topology
    plan: Plan
    fingerprint: str
    """Hash of the topology, the user's own code and data files, and the runtime."""

    @property
    def name(self) -> str:
        return f"{self.label}, seed {self.topology.seed}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """The cells are planned for this host."""

    name: str
    target: float | None
    """Accuracy from 0 to 1 whose cost the final table shows."""
    cells: tuple[SweepCell, ...]
    """In the order of the sweep's file."""
    repeat_invalid: int
    """Maximum number of times that a run is repeated if it is not valid. Runs in virtual time are always
    valid."""
    document: Document = field(repr=False)
    base: Document = field(repr=False)
    """File of the topology that the cells change."""


def load(path: Path, options: Options, limits: Boundary | None = None) -> Sweep:
    """`limits`: if the file is somebody else's. Raises BadInputError that lists every problem of the
    file and of its cells, each with its place."""
    return _read(yamlfile.read(path), path.stem, path.parent, options, limits)


def from_mapping(mapping: Mapping[str, Any], name: str, folder: Path, options: Options) -> Sweep:
    """`topology` is a path relative to `folder`. Raises BadInputError that lists every problem. The line
    numbers in the message refer to `mapping` in YAML form."""
    return _read(yamlfile.parse(yamlfile.write(mapping, name), name), name, folder, options)


def _read(
    document: Document, name: str, folder: Path, options: Options, limits: Boundary | None = None
) -> Sweep:
    if isinstance(document.data, dict) and "devices" in document.data:
        source = document.source
        message = f"this is a topology, not a sweep: run testbed up {source.name}"
        raise source.error([source.problem((), message)])
    sweep_file = validation_errors.validate(SweepFile, document)
    base = _base(folder, sweep_file, document, limits)
    count = max(1, len(sweep_file.variants)) * math.prod(map(len, sweep_file.grid.values()))
    problems = [*document.problems, *_path_problems(sweep_file, document.source)]
    if count > _MAX_CELLS:
        problems.append(
            document.source.problem(("grid",), f"makes {count:,} runs, expected at most {_MAX_CELLS:,}")
        )
        raise document.source.error(problems)
    cells = _cells(sweep_file, base, document, problems, options, limits)
    return Sweep(name, sweep_file.target, cells, sweep_file.repeat_invalid, document, base)


def _base(folder: Path, sweep_file: SweepFile, document: Document, limits: Boundary | None) -> Document:
    file = folder / sweep_file.topology
    try:
        if limits is not None:
            limits.inside(file)
    except ValueError as error:
        raise document.source.error([document.source.problem(("topology",), str(error))]) from None
    if not os.path.isfile(file):  # noqa: PTH113  (Path's raises OSError for a name that is too long)
        message = f"the file {file} does not exist; give the topology's path from the sweep's folder"
        raise document.source.error([document.source.problem(("topology",), message)])
    topology.load(file, limits)  # its own errors point to this file
    return yamlfile.read(file)


def _path_problems(sweep_file: SweepFile, source: Source) -> Iterator[Problem]:
    """Look for paths that are invalid, paths in a variant and in the grid, and values that are twice in
    a list of the grid."""
    settings: list[Where] = [("grid", path) for path in sweep_file.grid]
    settings += [
        ("variants", name, path) for name, paths in sweep_file.variants.items() for path in paths
    ]
    for at in settings:
        path = str(at[-1])
        if parse_path(path) is None:
            message = "is not a path to a key, expected one such as rule.buffer_size or devices[0].cpu"
            yield source.problem(at, message, at_key=True)
        elif at[0] == "variants" and path in sweep_file.grid:
            yield source.problem(at, "the grid has values for this, too; keep one of them", at_key=True)
    for path, values in sweep_file.grid.items():
        for index, value in enumerate(values):
            if any(type(value) is type(other) and value == other for other in values[:index]):
                yield source.problem(("grid", path, index), "this value is in the list already")


def parse_path(path: str) -> Where | None:
    """`devices[0].cpu` becomes ("devices", 0, "cpu"); None if `path` is invalid."""
    where: list[str | int] = []
    for step in path.split("."):
        match = _STEP.fullmatch(step)
        if match is None:
            return None
        where += [match[1], *map(int, re.findall(r"\d+", match[2]))]
    return tuple(where)


def _cells(
    sweep_file: SweepFile,
    base: Document,
    document: Document,
    path_problems: Iterable[Problem],
    options: Options,
    limits: Boundary | None,
) -> tuple[SweepCell, ...]:
    """Raises FaultyFileError with `path_problems` and all problems of all cells."""
    cells: list[SweepCell] = []
    problems = list(path_problems)
    for label, variant, changes in _combinations(sweep_file):
        changed, misplaced = _apply(base, changes, document.source)
        problems += misplaced
        try:
            read = topology.validate(changed, limits)
            plan = preparing.plan_topology(read, options)
            files = datasets.own_files_digest(read)
        except FaultyFileError as error:  # its places are in the sweep's file
            problems += error.problems
        else:
            fingerprint = _fingerprint(read, plan, files)
            cells.append(SweepCell(label, variant, changes, read, plan, fingerprint))
    if problems:
        raise document.source.error(problems)
    return tuple(_distinct_labels(cells))


def _fingerprint(read: Topology, plan: Plan, files: str) -> str:
    code = read.user_code  # its content counts, not its path
    text = read.to_yaml(None if code is None else code.digest)
    facts = f"{plan.runtime}\n{text}{files}{plan.profiles!r}{plan.measured!r}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _combinations(sweep_file: SweepFile) -> Iterator[tuple[str, str, tuple[KeyChange, ...]]]:
    grid = [
        [
            _change(path, value, ("grid", path, i), _label_part(path, values, i) * (len(values) > 1))
            for i, value in enumerate(values)
        ]
        for path, values in sweep_file.grid.items()
    ]
    for name, paths in (sweep_file.variants or {"": {}}).items():
        own = [_change(path, value, ("variants", name, path)) for path, value in paths.items()]
        for chosen in itertools.product(*grid):
            words = [name, *(change.words for change in chosen if change.path != "seed")]
            yield ", ".join(filter(None, words)), name, (*own, *chosen)


def _change(path: str, value: Any, at: Where, words: str = "") -> KeyChange:
    return KeyChange(path, parse_path(path) or (), value, at, words)


def _label_part(path: str, values: Sequence[Any], index: int) -> str:
    """Text of `values[index]` that distinguishes it from the other values of the key `path`."""
    key, value = path.split(".")[-1], values[index]
    match value:
        case {"name": str(name), **others}:
            return " ".join([name, *(f"{k} {v}" for k, v in others.items() if not isinstance(v, dict))])
        case dict() if (kind := names.choice_of(value)) is not None:
            alike = [one for one in values if names.choice_of(one) == kind]
            return names.choice_text(value, alike if len(alike) > 1 else [{}])
        case dict():
            text = names.differences(value, values)
            return text if 0 < len(text) <= _MAX_VALUE_CHARACTERS else f"{key} #{index + 1}"
        case tuple() | list():
            text = f"{key} {list(value)}"
            return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{key} #{index + 1}"
        case str() if key in ("name", "scheme"):
            return value
    return f"{key} {str(value)[:_MAX_VALUE_CHARACTERS]}"


def _apply(
    base: Document, changes: Iterable[KeyChange], source: Source
) -> tuple[Document, list[Problem]]:
    """Changes with shorter paths are applied first, so that a change of a whole mapping does not undo a
    change of one of its keys. Later errors in unchanged keys point to the key `topology` in the sweep's
    file."""
    data = base.data
    values: dict[Where, Place] = {(): source.place(("topology",))}
    keys: dict[Where, Place] = {}
    problems: list[Problem] = []
    for change in sorted(filter(lambda change: change.where, changes), key=lambda c: len(c.where)):
        place = source.place(change.at)
        try:
            data = yamlfile.replace_value(data, change.where, change.value)
        except LookupError as error:
            at = change.at if change.at[0] == "variants" else change.at[:-1]
            problems.append(source.problem(at, str(error.args[0]), at_key=True))
            continue
        for length in range(1, len(change.where)):
            values.setdefault(change.where[:length], place)
        depth = len(change.at)
        for found, known in ((source.values, values), (source.keys, keys)):
            inside = {at: p for at, p in found.items() if at[:depth] == change.at}
            known |= {(*change.where, *at[depth:]): p for at, p in inside.items()}
        keys[change.where] = source.keys.get(change.at) or source.keys.get(change.at[:-1]) or place
    return Document(data, Source(base.source.name, (), values, keys), ()), problems


def _distinct_labels(cells: list[SweepCell]) -> Iterator[SweepCell]:
    """Cells with the same label get a number in the label, unless they differ only in their seed."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        seedless = cell.topology.model_copy(update={"seed": 0}).to_yaml()
        same = groups.setdefault(cell.label, [])
        if seedless not in same:
            same.append(seedless)
        label = cell.label or cell.topology.rule.name
        number = same.index(seedless) + 1
        yield replace(cell, label=f"{label} #{number}" if number > 1 else label)


# The sweep's file and topology in the sweep's folder, with which the sweep can be run again.
#
# Paths in the copies are absolute, except for the user's own code, of which there is a copy beside them.
# They have a folder of their own, so that no file of the user is replaced if a sweep's folder is the
# user's.

KEPT_FOLDER = "sweep"
"""Folder in the sweep's folder."""
FILE = "sweep.yaml"
TOPOLOGY = "topology.yaml"
KEPT_BESIDE = (PROFILES, MEASURED, FLEET)
"""Files beside the topology that planning reads."""
LOCK = ".lock"
"""File that is locked while the sweep is executed."""
_CODE = "code"


def keep_sweep(sweep: Sweep, folder: Path) -> None:
    made = Path(tempfile.mkdtemp(prefix=f".{KEPT_FOLDER}-", dir=folder))
    try:
        made.chmod(0o755)
        _write_kept(sweep, made)
        target = folder / KEPT_FOLDER
        if (target / FILE).is_file():
            shutil.rmtree(target)
        made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_kept(sweep: Sweep, folder: Path) -> None:
    base = Path(sweep.base.source.name).parent.absolute()
    names: dict[str, str] = {}
    for cell in sweep.cells:
        code = cell.topology.user_code
        if code is not None and str(code.path) not in names:
            names[str(code.path)] = name = f"{_CODE}-{len(names) + 1}" if names else _CODE
            code.copy(folder / name)

    def change(key: str, text: str) -> str | None:
        path = str(base / text)
        if key == _CODE:
            return names.get(path)
        if text in profiles.population_names() or not (base / text).exists():
            return None
        return path

    study = yamlfile.replace_paths(sweep.document.data, change) | {"topology": TOPOLOGY}
    (folder / FILE).write_text(yamlfile.write(study), encoding="utf-8")
    text = yamlfile.write(yamlfile.replace_paths(sweep.base.data, change))
    (folder / TOPOLOGY).write_text(text, encoding="utf-8")
    devices = {name: one for cell in sweep.cells for name, one in cell.plan.profiles.devices.items()}
    links = {name: one for cell in sweep.cells for name, one in cell.plan.profiles.links.items()}
    if devices or links:
        found = Profiles(devices=devices, links=links).model_dump(mode="json", exclude_defaults=True)
        (folder / PROFILES).write_text(yamlfile.write(found), encoding="utf-8")
    for name in (MEASURED, FLEET):
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)


def kept_target(folder: Path) -> float | None:
    """Raises BadInputError."""
    path = folder / KEPT_FOLDER / FILE
    if not path.is_file():
        return None
    data = yamlfile.read(path).data
    value = data.get("target") if isinstance(data, dict) else None
    try:
        return None if value is None else units.share_as_typed(value)
    except ValueError as error:
        raise BadInputError(f"{path}: target: {error}") from error


def check_not_running(folder: Path) -> None:
    """Raises BadInputError."""
    path = folder / LOCK
    if not path.is_file():
        return
    with files.open_regular(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(f"a sweep is running in {folder}: wait until it has ended") from None
