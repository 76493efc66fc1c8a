"""Packs from Python: a run or a sweep as one archive that runs again on another machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from agents.disk import files
from agents.events import COMPLETE
from testbed import packs
from testbed.api.topology_input import data_root
from testbed.data import data_files, datasets
from testbed.errors import BadInputError, TestbedError, writable_file
from testbed.packs import DATA, SWEEP, TOPOLOGY, DataEntry, PackIndex, contents
from testbed.packs.contents import Contents
from testbed.packs.contents import Part as Part
from testbed.plan.machines import Measurements
from testbed.run import live_runs, provenance
from testbed.rundir import finding
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, Virtual, load
from testbed.topology.yamlfile import Boundary
from testbed.traits import RUNTIMES, is_simulated, runtime_names

FOLDER = "packs"
"""Folder in the folder of runs into which packs are unpacked."""
_PACKAGE = "edge-fl-testbed"
_WALL_CLOCK = "wall_clock"


@dataclass(frozen=True, slots=True)
class PackResult:
    file: Path
    """The archive."""
    is_sweep: bool
    bytes: int
    """Size of the archive."""
    sha256: str
    """Hexadecimal digits, of the archive."""
    runs: tuple[str, ...]
    """Ids."""
    files: int
    """Number of files in the archive."""
    left_out: tuple[str, ...]
    """A sentence for each part of the runs that the pack does not have."""
    remarks: tuple[str, ...]
    """Sentences on what is missing or incomplete."""


@dataclass(frozen=True, slots=True)
class OpenedPack:
    path: Path
    folder: Path
    index: PackIndex
    trusted: bool

    @property
    def start(self) -> Path:
        return self.folder / (TOPOLOGY if self.index.kind == "run" else SWEEP)

    def data_root(self, given: Path | None) -> Path | None:
        """Return `given`, or the data in the pack if `given` is None."""
        return self.folder / DATA if given is None and self.index.has_data else given

    @property
    def limits(self) -> Boundary:
        return Boundary(self.folder, self.trusted)

    def check_data(self, root: Path | None) -> None:
        """Data that this machine has to download is not compared. `root`: data root. Raises
        BadInputError."""
        missing: list[DataEntry] = []
        for one in self.index.data:
            if one.in_data_root and root is None:
                continue
            path = (root or Path()) / one.path if one.in_data_root else self.folder / DATA / one.path
            try:
                same = files.sha256(path) == one.sha256
            except FileNotFoundError:
                if not one.in_data_root:
                    missing.append(one)
                continue
            except OSError as error:
                raise BadInputError(f"{path} cannot be read: {error.strerror}") from error
            if not same:
                raise BadInputError(
                    f"{path} has other content than the data of the packed run: put the same file "
                    "there, or run the topology with your data: testbed "
                    f"{'up' if self.index.kind == 'run' else 'sweep'} {self.start}"
                )
        if missing:
            raise BadInputError(f"the pack leaves out its data: copy {self._missing_data(missing)}")

    def _missing_data(self, missing: Sequence[DataEntry]) -> str:
        """Say which files to copy, and where to: a single file with its checksum, or the folders of
        several."""
        if len(missing) == 1:
            (one,) = missing
            return (
                f"{Path(one.path).name} ({one.bytes:,} bytes, SHA-256 {one.sha256[:12]}…) to "
                f"{self.folder / DATA / one.path}"
            )
        by_name: dict[str, list[DataEntry]] = {}
        for one in missing:
            by_name.setdefault(one.path.partition("/")[0], []).append(one)
        return "; ".join(
            f"{one[0].dataset} ({len(one):,} files are missing, {sum(e.bytes for e in one):,} bytes) to "
            f"{self.folder / DATA / name}"
            for name, one in by_name.items()
        )

    def remarks(self) -> list[str]:
        """Sentences on differences between this machine and the packed runs."""
        names = ("python", _PACKAGE, "torch", "numpy", "blas", "processor")
        other = provenance.other_versions(self.index.versions, names)
        told = [f"Unpacked into {self.folder}"]
        if other:
            told.append(f"The pack was made with {', '.join(other)}: results may differ")
        return told

    def measured(self) -> dict[str, Virtual]:
        """Return name of the sweep's cell -> durations that the packed runs in virtual time used."""
        found = {}
        with suppress(TestbedError, OSError, ValueError, KeyError, AttributeError):
            cells = json.loads((self.folder / "index.json").read_bytes())["cells"].values()
            for cell in cells:
                virtual = Measurements.read(self.folder / Path(str(cell["run"])).name).virtual
                if virtual != Virtual():
                    found[str(cell["cell"])] = virtual
        return found

    def run_by_cell(self) -> dict[tuple[Any, Any], str]:
        """Return the ids by label and seed of their cells."""
        found = {}
        for run in self.index.runs:
            facts = RunDirectory(self.folder / run).read_manifest()
            found[facts.get("label"), facts.get("seed")] = run
        return found

    def records_are_equal(self, run: Path, packed: str = "") -> bool | None:
        """Compare byte for byte, but for the wall clock. None if one of the runs was not simulated, or
        did not reach its end. `packed`: id of the packed run in a sweep."""
        both = [RunDirectory(self.folder / packed), RunDirectory(run)]
        for one in both:
            facts = one.read_manifest()
            if not is_simulated(facts.get("runtime")) or facts.get("outcome") not in COMPLETE:
                return None
        with both[0].events.open("rb") as old, both[1].events.open("rb") as new:
            return all(_comparable(a) == _comparable(b) for a, b in zip_longest(old, new))


def _comparable(line: bytes | None) -> Any:
    if line is None or _WALL_CLOCK.encode() not in line:
        return line
    record = json.loads(line)
    record.pop(_WALL_CLOCK, None)
    return record


def is_pack(given: object) -> bool:
    return isinstance(given, str | Path) and "\n" not in str(given) and packs.is_pack(Path(given))


def open_pack(
    path: str | Path,
    kind: str,
    *,
    trusted: bool,
    runs: str | Path,
    on_progress: Callable[[str], object] = lambda _: None,
) -> OpenedPack:
    """Nothing of the archive is imported or started.

    `kind`: `run` or `sweep`. `trusted`: whether programs in the pack may run. `runs`: folder of runs.
    The archive is unpacked into its folder `packs`. Raises BadInputError, HostError.
    """
    index, folder = packs.unpack(Path(path), Path(runs) / FOLDER, on_progress)
    if index.runtime is not None and index.runtime not in RUNTIMES:
        raise BadInputError(f"{path} is of another runtime than {runtime_names()}: {index.runtime!r}")
    if index.kind != kind:
        command = "up" if index.kind == "run" else "sweep"
        raise BadInputError(f"{path} is the pack of a {index.kind}: testbed {command} {path}")
    return OpenedPack(Path(path), folder, index, trusted)


def pack(
    run: str | Path,
    to: str | Path | None = None,
    *,
    include: Sequence[Part] = (),
    data: str | Path | None = None,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
) -> PackResult:
    """Write a run, or a sweep with its finished runs, to one archive. `testbed.up` or `testbed.sweep`
    runs it again from the archive, also on another machine.

    `run`: id or directory of a run, or folder of a sweep. `to`: file to write; None for the name of the
    run with the suffix `.zip`, in the working directory. `include`: parts that a pack leaves out
    otherwise: `models`, `telemetry`, `logs`, `inputs` (recorded for a replay), `data`. `data`: folder
    with the datasets that the run read. `on_progress` is called with lines on the progress of large
    packs. Raises BadInputError.
    """
    folder = finding.folder_of_runs(str(run), Path(runs))
    if folder is None:
        found = contents.of_run(live_runs.locate(str(run), Path(runs)), include)
    else:
        found = contents.of_sweep(folder, include)
    target = writable_file(Path(f"{found.name}.zip" if to is None else to))
    root = data_root(data)
    listed = _data(found, root, include="data" in include)
    facts = [one.read_manifest() for one in found.runs]
    versions = {str(key): str(value) for key, value in (facts[0].get("versions") or {}).items()}
    commit = facts[0].get("git_commit")
    created = [one["created"] for one in facts if isinstance(one.get("created"), float | int)]

    index = PackIndex(
        kind=found.kind,
        name=found.name,
        runtime=found.runtime,
        versions=versions,
        commit=commit if isinstance(commit, str) else None,
        runs=[one.run for one in found.runs],
        left_out=found.left_out,
        data=listed,
        has_data="data" in include and bool(listed),
        files={},
    )
    written = packs.write(found.files, target, index, max(created, default=None), on_progress)
    return PackResult(
        target,
        found.kind == "sweep",
        target.stat().st_size,
        files.sha256(target),
        tuple(index.runs),
        len(written) + 1,
        tuple(found.left_out),
        tuple(found.remarks),
    )


def _data(found: Contents, root: Path | None, *, include: bool) -> list[DataEntry]:
    """If `include` is set, add the files to the pack; otherwise add a sentence that they are left out.
    `root`: data root."""
    entries: dict[str, DataEntry] = {}
    for topology in _topologies(found):
        try:
            for one, path in _data_files(topology, root, found.data_paths):
                entries[one.path] = one
                if include:
                    found.add(f"{DATA}/{one.path}", path)
        except (TestbedError, OSError) as error:
            found.remarks.append(f"the data is not listed: {error}")
    if include:
        contents.check_names(found)
    elif entries:
        names = ", ".join(dict.fromkeys(one.dataset for one in entries.values()))
        found.left_out.append(f"data ({names}), listed with checksums: add it with --with data")
    return list(entries.values())


def _topologies(found: Contents) -> list[Topology]:
    """Return one topology per task. One that cannot be read is left out, with a remark."""
    by_task = {str(one.read_manifest().get("task")): one.topology for one in reversed(found.runs)}
    read = []
    for path in by_task.values():
        try:
            read.append(load(path))
        except TestbedError as error:
            found.remarks.append(f"the data is not listed, because {path} cannot be read: {error}")
    return read


def _data_files(
    topology: Topology, root: Path | None, names: Mapping[str, str]
) -> list[tuple[DataEntry, Path]]:
    """Data from the hub has no files. `names`: path of data that the topology names -> name in the
    folder `DATA`."""
    chosen = datasets.source(topology)
    if not isinstance(chosen, datasets.Columns):
        return []
    with datasets.located_errors(topology):
        splits = data_files.local_splits(chosen.data, root)
    listed = []
    for path in dict.fromkeys(splits.files if splits else ()):
        own = chosen.data.path
        if own is None:
            name = path.relative_to(root or Path()).as_posix()
        else:
            below = path.relative_to(own).as_posix()
            name = names.get(own, Path(own).name) + ("" if below == "." else f"/{below}")
        entry = DataEntry(
            chosen.name, name, own is None, path.stat().st_size, files.sha256(path.resolve())
        )
        listed.append((entry, path.resolve()))
    return listed
