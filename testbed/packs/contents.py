"""The files of a pack: which files of a run or a sweep it has, and under which names.

Only files that are known by name are taken, so that nothing else that lies in a run's directory gets
into a pack. What may hold secrets or private updates (`work/`, `state/`, `hosts.json`) is never taken.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agents.disk import files
from agents.events import COMPLETE
from agents.texts import quantity
from testbed import packs
from testbed.errors import BadInputError, reading_run
from testbed.packs import DATA, SWEEP, TOPOLOGY
from testbed.rundir import finding
from testbed.rundir.directory import RunDirectory
from testbed.sweeps import KEPT_BESIDE, KEPT_FOLDER, check_not_running
from testbed.topology import profiles, units, yamlfile
from testbed.topology.schema import FLEET
from testbed.traits import is_simulated

Part = Literal["models", "telemetry", "logs", "inputs", "data"]
"""Parts of a run that a pack leaves out by default."""
_MAX_INDEX_BYTES = 256 * 2**20
_MAX_MANIFEST_BYTES = 1 * 2**30
_PRIVATE = ("controller",)
"""Keys of a manifest that are left out: they say something of the machine's processes."""


@dataclass(slots=True)
class Contents:
    kind: Literal["run", "sweep"]
    name: str
    """Id of the run, or name of the sweep."""
    runs: list[RunDirectory]
    runtime: str | None = None
    """None if the runs had different runtimes."""
    files: dict[str, Path | bytes] = field(default_factory=dict)
    """Name in the archive -> file with the content, or the content itself."""
    left_out: list[str] = field(default_factory=list)
    """A sentence for each part that the pack does not have."""
    remarks: list[str] = field(default_factory=list)
    """Sentences for the user."""
    data_paths: dict[str, str] = field(default_factory=dict)
    """Path of a data file or folder that the topology names -> its name in the folder `DATA`."""

    def add(self, name: str, source: Path | bytes) -> None:
        """A path must be a regular file and no link. Otherwise it is left out, with a remark."""
        if isinstance(source, Path) and not stat.S_ISREG(source.lstat().st_mode):
            self.remarks.append(f"{source} is no regular file, and is left out")
            return
        self.files[name] = source


def of_run(directory: RunDirectory, parts: Sequence[Part]) -> Contents:
    """Raises BadInputError if the run is still executed, or if its directory is damaged."""
    _check_ended(directory)
    manifest = directory.read_manifest()
    runtime = _text(manifest.get("runtime"))
    contents = Contents("run", directory.run, [directory], runtime)
    if manifest.get("outcome") not in COMPLETE:
        contents.remarks.append(f"{directory.run} has not reached its end: its records are incomplete")
    sources = _SourceFiles(contents, directory.path, has_fleet=directory.fleet.is_file())
    if directory.start.is_file():
        sources.known[_initial_of(directory)] = directory.start.name
        contents.add(directory.start.name, directory.start)
    with reading_run(directory.path):
        _add_yaml(contents, directory.topology, TOPOLOGY, sources)
        _add_folder(contents, directory.code, "code")
        for path in (directory.profiles, directory.fleet):
            if path.is_file():
                contents.add(path.name, path)
        if directory.measured.is_file() and is_simulated(runtime):
            contents.add(directory.measured.name, directory.measured)
        elif directory.measured.is_file():
            contents.left_out.append(
                "measured.yaml: the CPU shares of profiles are computed where the pack is run"
            )
        _add_records(contents, directory, "", parts)
    _check_paths(contents)
    return contents


def of_sweep(folder: Path, parts: Sequence[Part]) -> Contents:
    """The sweep with its finished runs. Raises BadInputError if the sweep is still executed, or if its
    folder lacks the sweep's file."""
    check_not_running(folder)
    own = folder / KEPT_FOLDER
    if not (own / SWEEP).is_file():
        raise BadInputError(
            f"{folder} has no {KEPT_FOLDER}/{SWEEP}: run `testbed sweep` with the sweep's file again "
            "(finished runs are not repeated), then pack"
        )
    with reading_run(folder):
        index = files.from_json(files.read(folder / "index.json", _MAX_INDEX_BYTES))
        entries = [entry for entry in index["cells"].values() if entry.get("outcome") in COMPLETE]
        names = {Path(str(entry["run"])).name for entry in entries}
    runs = [RunDirectory(folder / name) for name in sorted(names) if (folder / name).is_dir()]
    if not runs:
        raise BadInputError(f"{folder} has no finished run: nothing to pack")
    runtimes = {_text(run.read_manifest().get("runtime")) for run in runs}
    contents = Contents(
        "sweep", folder.resolve().name, runs, runtimes.pop() if len(runtimes) == 1 else None
    )
    if unfinished := len(index["cells"]) - len(entries):
        contents.remarks.append(f"{quantity(unfinished, 'run')} of the sweep did not finish")
    sources = _SourceFiles(contents, own, has_fleet=(own / FLEET).is_file())
    with reading_run(folder):
        _add_yaml(contents, own / SWEEP, SWEEP, sources)
        _add_yaml(contents, own / TOPOLOGY, TOPOLOGY, sources)
        for path in sorted(own.glob("code*/")):
            _add_folder(contents, path, path.name)
        for name in KEPT_BESIDE:
            if (own / name).is_file():
                contents.add(name, own / name)
        kept_index = {"cells": {key: e for key, e in index["cells"].items() if e in entries}}
        contents.add("index.json", json.dumps(kept_index, indent=2).encode() + b"\n")
        for run in runs:
            _check_ended(run)
            _add_yaml(contents, run.topology, f"{run.run}/{TOPOLOGY}", sources)
            for path in (run.profiles, run.fleet, run.measured):
                if path.is_file():
                    contents.add(f"{run.run}/{path.name}", path)
            _add_records(contents, run, f"{run.run}/", parts)
    contents.left_out = list(dict.fromkeys(contents.left_out))
    _check_paths(contents)
    return contents


def _check_ended(directory: RunDirectory) -> None:
    if directory.controller() is not None:
        raise BadInputError(
            f"{directory.run} is still running: wait for its end, or end it with testbed down "
            f"{directory.run}"
        )


def _initial_of(directory: RunDirectory) -> str:
    """Path of `task.initial` in the run's topology; empty if it names none."""
    data = yamlfile.read(directory.topology).data
    task = data.get("task") if isinstance(data, dict) else None
    return str((task.get("initial") if isinstance(task, dict) else None) or "")


def _add_records(
    contents: Contents, directory: RunDirectory, prefix: str, parts: Sequence[Part]
) -> None:
    """The names begin with `prefix`."""
    facts = files.from_json(files.read(directory.manifest, _MAX_MANIFEST_BYTES))
    facts = {key: value for key, value in facts.items() if key not in _PRIVATE}
    if isinstance(facts.get("host"), dict):
        facts["host"] = {key: value for key, value in facts["host"].items() if key != "name"}
    contents.add(f"{prefix}{directory.manifest.name}", json.dumps(facts, indent=1).encode() + b"\n")
    for path in (directory.events, directory.fidelity):
        if path.is_file():
            contents.add(f"{prefix}{path.name}", path)
    optional: dict[Part, list[Path]] = {
        "models": sorted(directory.models.glob("*.safetensors")),
        "telemetry": [directory.telemetry],
        "logs": sorted(directory.logs.glob("*.log")),
        "inputs": [directory.inputs],
    }
    for part, found in optional.items():
        there = [path for path in found if path.is_file()]
        if part in parts:
            for path in there:
                contents.add(f"{prefix}{path.relative_to(directory.path)}", path)
        elif there:
            size = units.format_size(sum(path.stat().st_size for path in there))
            what = part if prefix else f"{part} ({size})"
            contents.left_out.append(f"{what}: add them with --with {part}")


def _add_yaml(contents: Contents, path: Path, name: str, sources: _SourceFiles) -> None:
    """Make paths lead to files of the pack."""
    data = yamlfile.read(path).data
    text = yamlfile.write(yamlfile.replace_paths(data, sources.packed_name), str(path))
    contents.add(name, text.encode())


def _add_folder(contents: Contents, folder: Path, name: str) -> None:
    """Regular files only. Compiled Python files are left out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if one != "__pycache__")
        for one in sorted(names):
            path = Path(parent, one)
            contents.add(f"{name}/{path.relative_to(folder).as_posix()}", path)


@dataclass(slots=True)
class _SourceFiles:
    contents: Contents
    base: Path
    """Folder of the topology."""
    has_fleet: bool
    """Whether the drawn or recorded devices are kept, so that recorded runs are not needed."""
    known: dict[str, str] = field(default_factory=dict)
    """Path on this machine -> name in the pack."""

    def packed_name(self, key: str, text: str) -> str | None:
        """Add the file that a topology names with `key: text`. Return None if `text` is not the absolute
        path of a file."""
        if not text.startswith("/"):
            self._add_unpacked(key, text)
            return None
        if text not in self.known:
            self.known[text] = self._add(key, Path(text))
        return self.known[text]

    def _add_unpacked(self, key: str, text: str) -> None:
        """Add a file that lies in the run's directory because the run itself was unpacked."""
        path = self.base / text
        if key == "path" and text.startswith(f"{DATA}/"):
            self.contents.data_paths[str(path.absolute())] = text.removeprefix(f"{DATA}/")
        elif key != "code" and not yamlfile.leads_outside(text) and path.is_file():
            self.contents.add(text, path)

    def _add(self, key: str, path: Path) -> str:
        if key == "path":
            name = _free_name(path.name, self.contents.data_paths.values())
            self.contents.data_paths[str(path)] = name
            return f"{DATA}/{name}"
        folder = f"files/{len(self.known) + 1}"
        name = f"{folder}/{path.name}"
        if path.is_file() and key == "image":
            from testbed.images.device_images import BuildContext  # imports the engine's client

            for one in BuildContext.read(path).files:
                self.contents.add(f"{folder}/{one}", path.parent / one)
        elif path.is_file():
            self.contents.add(name, path)
        elif key == "from_run" and finding.find_exact(str(path), path.parent) and not self.has_fleet:
            _add_records(self.contents, RunDirectory(path), f"{name}/", ())
            self.contents.add(f"{name}/{TOPOLOGY}", path / TOPOLOGY)
        elif not (self.has_fleet and key in ("from", "behaviour", "from_run", "from_log")):
            self.contents.remarks.append(f"{path}, which the topology names, is missing: left out")
        return name


def _free_name(name: str, taken: Any) -> str:
    """`name`, or if it is in `taken`, with a number."""
    numbered = (f"{number}-{name}" if number else name for number in range(len(list(taken)) + 1))
    return next(one for one in numbered if one not in taken)


def check_names(contents: Contents) -> None:
    """Raises BadInputError if unpacking would refuse a name."""
    try:
        packs.check_names([packs.INDEX, packs.CRATE, *contents.files])
    except ValueError as error:
        raise BadInputError(f"{contents.name} cannot be packed: {error}; rename one") from error


def _check_paths(contents: Contents) -> None:
    """Raises BadInputError if unpacking would refuse a name of a file, or a path in a topology."""
    check_names(contents)
    for name in (TOPOLOGY, SWEEP):
        content = contents.files.get(name)
        if isinstance(content, bytes):
            for text in outside_paths(yamlfile.parse(content.decode(), name).data):
                raise BadInputError(f"{contents.name} cannot be packed: {name} names {text}")


def outside_paths(data: Any) -> Iterator[str]:
    """Yield the paths in the YAML `data` that lead out of its folder. Names of populations are none."""
    found: list[str] = []

    def look(_: str, text: str) -> None:
        if text not in profiles.population_names() and yamlfile.leads_outside(text):
            found.append(text)

    yamlfile.replace_paths(data, look)
    yield from found


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
