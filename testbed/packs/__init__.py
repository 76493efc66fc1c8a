"""Packs: a run or a sweep as one archive (a zip file) that runs again on another machine.

Here are the archive's index (`pack.json`), its description as RO-Crate, writing and unpacking;
`contents` decides which files a pack has. Its topologies are read within
`testbed.topology.yamlfile.Boundary`: no file outside of the pack, no programs unless trusted."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import stat
import struct
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from agents.disk import files
from testbed.console import ProgressReporter
from testbed.errors import BadInputError, HostError
from testbed.topology import units

INDEX = "pack.json"
"""The only file that the index does not list."""
CRATE = "ro-crate-metadata.json"
TOPOLOGY = "topology.yaml"
SWEEP = "sweep.yaml"
DATA = "data"
"""Folder of the data files, in a pack and where it is unpacked."""
FORMAT = 1
MAX_INDEX_BYTES = 64 * 2**20
MAX_BYTES = 8 * 2**30
"""Bytes of all files together, before compression."""
MAX_FILES = 200_000
_MAX_NAME = 1000
"""Characters of a file's name."""
_MAX_PART = 255
"""Bytes of one part of a file's name, as in Linux."""

_Size = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Text = Annotated[str, Meta(max_length=4096)]


class FileEntry(msgspec.Struct, frozen=True):
    bytes: _Size
    sha256: _Sha256
    """Hexadecimal digits."""


class DataEntry(msgspec.Struct, frozen=True):
    dataset: _Text
    path: Annotated[str, Meta(max_length=_MAX_NAME)]
    """Path relative to the data root, or to the folder `DATA` of the pack (`in_data_root`)."""
    in_data_root: bool
    """Whether the file is in the layout of a data root, and not a file that the topology names."""
    bytes: Annotated[int, Meta(ge=0)]
    sha256: _Sha256
    """Hexadecimal digits."""


class PackIndex(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal[1] = 1
    kind: Literal["run", "sweep"]
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    """Id of the run, or name of the sweep."""
    runtime: Annotated[str, Meta(max_length=50)] | None
    """None if the runs had different runtimes."""
    versions: dict[str, _Text]
    """Package -> version that made the runs."""
    commit: _Text | None
    """Commit of the program that made the runs."""
    runs: list[Annotated[str, Meta(min_length=1, max_length=200)]]
    left_out: list[_Text]
    """A sentence for each part of the runs that the pack does not have."""
    data: list[DataEntry]
    """Data files that were found when the pack was made."""
    has_data: bool
    """Whether the pack has the files in `data`."""
    files: dict[str, FileEntry]
    """Files by name, but for the index."""


class _Format(msgspec.Struct):
    format: int


def encode_index(index: PackIndex) -> bytes:
    return msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"


def decode_index(content: bytes) -> PackIndex:
    """Raises ValueError if `content` is not the index of a pack, or if it names files that a pack may
    not have."""
    version = msgspec.json.decode(content, type=_Format).format
    if version > FORMAT:
        raise ValueError("a newer version of the testbed made it: update the testbed")
    index = msgspec.json.decode(content, type=PackIndex)
    check_names([index.name])
    check_names(index.runs)
    if "/" in index.name or index.name.startswith("."):
        raise ValueError(f"{index.name!r} is not a name for a folder")
    check_names([INDEX, *index.files])
    if (size := sum(entry.bytes for entry in index.files.values())) > MAX_BYTES:
        raise ValueError(f"its files have {size:,} bytes, expected at most {MAX_BYTES:,}")
    for one in index.data:
        check_name(one.path)
    needed = TOPOLOGY if index.kind == "run" else SWEEP
    if needed not in index.files:
        raise ValueError(f"it has no {needed}")
    return index


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError if the files cannot be written into one folder: too many files, a name that
    leads out of the folder, or names that are the same file on some machines."""
    known: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        check_name(name)
        key = unicodedata.normalize("NFC", name).casefold()
        if (other := known.get(key, folders.get(key))) is not None:
            raise ValueError(f"the names {other!r} and {name!r} collide")
        known[key] = name
        if len(known) > MAX_FILES:
            raise ValueError(f"it has more than {MAX_FILES:,} files")
        while "/" in key:
            key = key.rpartition("/")[0]
            if key in known:
                raise ValueError(f"the names {known[key]!r} and {name!r} collide")
            folders[key] = name


def check_name(name: str) -> None:
    """Raises ValueError unless `name` is a relative path that stays in its folder."""
    parts = name.split("/")
    wrong = (
        len(name) > _MAX_NAME
        or "\\" in name
        or any(part in ("", ".", "..") or len(part.encode()) > _MAX_PART for part in parts)
        or any(ord(character) < 32 or ord(character) == 127 for character in name)
    )
    if wrong:
        raise ValueError(f"the name {name[:_MAX_PART]!r} leads out of the folder, or is invalid")


_TESTBED = "#edge-fl-testbed"
_EXECUTION = "#execution"
_TYPES = {
    ".yaml": "application/yaml",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".csv": "text/csv",
    ".py": "text/x-python",
}
"""Other files have `application/octet-stream`."""
_DESCRIPTIONS = {
    "topology.yaml": "Topology: task, rule and devices",
    "sweep.yaml": "Sweep: what differs between the runs",
    "profiles.yaml": "Device profiles and link classes",
    "measured.yaml": "Durations measured on the host",
    "fleet.json": "Keys of drawn or recorded devices",
    "manifest.json": "Versions, host, plan, outcome and verdict of a run",
    "events.jsonl": "Records of a run: one update, version or evaluation per line",
    "fidelity.json": "Requested and measured CPU shares and links",
    "telemetry.jsonl": "CPU, memory and bytes per device and second",
    "pack.json": "Index of the pack, with the checksum of each file",
}
_PROFILE = "https://w3id.org/ro/crate/1.2"
_SHA256 = "https://w3id.org/ro/terms/workflow-run#sha256"
_ROOT = {"@id": "./"}


def describe_as_crate(index: PackIndex, created: float | None) -> bytes:
    """`created`: Unix time, in seconds, at which the newest run was made."""
    what = "A run" if index.kind == "run" else f"A sweep of {len(index.runs)} runs"
    command = "up" if index.kind == "run" else "sweep"
    listed: Mapping[str, FileEntry | None] = {**index.files, INDEX: None}
    root = {
        **_ROOT,
        "@type": "Dataset",
        "datePublished": datetime.fromtimestamp(created or 0.0, UTC).date().isoformat(),
        "name": index.name,
        "description": f"{what} of asynchronous federated learning on emulated edge devices. `testbed "
        f"{command} PACK` runs it again.",
        "license": "No license was stated",
        "mentions": {"@id": _EXECUTION},
        "hasPart": [{"@id": quote(name)} for name in listed],
        "mainEntity": {"@id": TOPOLOGY if index.kind == "run" else SWEEP},
    }
    descriptor = {
        "@id": CRATE,
        "@type": "CreativeWork",
        "conformsTo": {"@id": _PROFILE},
        "about": _ROOT,
    }
    execution = {
        "@id": _EXECUTION,
        "@type": "CreateAction",
        "name": "Execution of the runs",
        "instrument": {"@id": _TESTBED},
        "result": _ROOT,
    }
    crate = {
        "@context": [f"{_PROFILE}/context", {"sha256": _SHA256}],
        "@graph": [root, descriptor, _program(index.versions, index.commit), execution]
        + [_file(name, entry) for name, entry in listed.items()],
    }
    return json.dumps(crate, indent=1, ensure_ascii=False).encode() + b"\n"


def _program(versions: Mapping[str, str], commit: str | None) -> dict[str, Any]:
    packages = [f"{name} {one}" for name, one in versions.items() if name != "processor"]
    return {
        "@id": _TESTBED,
        "@type": "SoftwareApplication",
        "name": "edge-fl-testbed",
        "softwareVersion": versions.get("edge-fl-testbed", "unknown"),
        "softwareRequirements": packages,
        "processorRequirements": versions.get("processor", "unknown"),
        **({} if commit is None else {"identifier": commit}),
    }


def _file(name: str, entry: FileEntry | None) -> dict[str, Any]:
    last = name.rpartition("/")[2]
    suffix = f".{last.rpartition('.')[2]}" if "." in last else ""
    found: dict[str, Any] = {
        "@id": quote(name),
        "@type": "File",
        "name": name,
        "encodingFormat": _TYPES.get(suffix, "application/octet-stream"),
    }
    if last in _DESCRIPTIONS:
        found["description"] = _DESCRIPTIONS[last]
    if entry is not None:
        found |= {"contentSize": str(entry.bytes), "sha256": entry.sha256}
    return found


_CHUNK = 2**20
_MAGIC = b"PK\x03\x04"
_TIME = (1980, 1, 1, 0, 0, 0)
"""Fixed, so that the same files give the same archive."""
_MAX_DIRECTORY_BYTES = 128 * 2**20
"""Bytes that are read at once from an archive: those of its list of files."""
_DIGITS = 12
"""Digits of the index's hash in the name of the folder of an unpacked pack."""
_FREE_BYTES = 256 * 2**20
"""Free bytes to leave on the disk."""
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError),
    *(NotImplementedError, RuntimeError, ValueError, OverflowError),
)


def write(
    contents: Mapping[str, Path | bytes],
    to: Path,
    index: PackIndex,
    created: float | None,
    report: Callable[[str], object],
) -> dict[str, FileEntry]:
    """Return the entries of the written files, but for the index.

    `contents`: name in the archive -> file with the content, or the content itself. The file `to`
    appears when it is complete. `index`: without files. `created`: as in `describe_as_crate`. Raises
    BadInputError if the content is too large.
    """
    total = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in contents.values())
    if total > MAX_BYTES:
        most = units.format_size(MAX_BYTES)
        raise BadInputError(
            f"{index.name} has {units.format_size(total)} of files, expected at most {most}: leave "
            "out parts that --with adds"
        )
    progress, done = ProgressReporter(report, f"Packing {index.name}", of_bytes=True), 0
    entries: dict[str, FileEntry] = {}
    with (
        files.atomic_write(to) as partial,
        zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive,
    ):
        for name, source in sorted(contents.items()):
            opened = io.BytesIO(source) if isinstance(source, bytes) else files.open_regular(source)
            with opened as file:
                for size in _copied(file, archive, name, entries):
                    done += size
                    progress(done, total)
        description = describe_as_crate(replace(index, files=entries), created)
        for _ in _copied(io.BytesIO(description), archive, CRATE, entries):
            pass
        archive.writestr(_info(INDEX), encode_index(replace(index, files=entries)))
    return entries


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _TIME)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    return info


def _copied(
    source: IO[bytes], archive: zipfile.ZipFile, name: str, entries: dict[str, FileEntry]
) -> Iterator[int]:
    """Add the file to `entries`, too. Yield the size of each piece."""
    digest, size = hashlib.sha256(), 0
    with archive.open(_info(name), "w", force_zip64=True) as target:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            target.write(chunk)
            yield len(chunk)
    entries[name] = FileEntry(size, digest.hexdigest())


def is_pack(path: Path) -> bool:
    """Whether it is a zip file. False if it cannot be read."""
    try:
        with files.open_regular(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class _BoundedFile(io.BufferedReader):
    """Refuses to read very much at once: an archive may claim a huge list of files."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY_BYTES:
            raise ValueError("its list of files is too large")
        return super().read(size)


def unpack(path: Path, packs: Path, report: Callable[[str], object]) -> tuple[PackIndex, Path]:
    """Return the pack's index, and its folder in `packs`. If it has been unpacked before, check that the
    files are unchanged.

    Nothing is written outside that folder, and no more than the index says. The folder appears when all
    checksums have been checked. Raises BadInputError if the archive is damaged, or has a file that a
    pack may not have. Raises HostError if there is not enough room on the disk.
    """
    try:
        with _BoundedFile(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            content = _read_index(archive)
            index, digest = decode_index(content), hashlib.sha256(content).hexdigest()
            _check_entries(archive, index)
            target = packs / f"{index.name}-{digest[:_DIGITS]}"
            if target.is_dir():
                _check_unpacked(index, target)
                return index, target
            packs.mkdir(parents=True, exist_ok=True)
            needed = sum(entry.bytes for entry in index.files.values())
            if shutil.disk_usage(packs).free < needed + _FREE_BYTES:
                size = units.format_size(needed)
                raise HostError(
                    f"{packs} has not enough free space for {size}: name another with --runs"
                )
            folder = Path(tempfile.mkdtemp(prefix=f".{index.name}-", dir=packs))
            try:
                folder.chmod(0o755)
                _extract(
                    archive, index, folder, ProgressReporter(report, f"Unpacking {path}", of_bytes=True)
                )
                (folder / INDEX).write_bytes(content)
                folder.rename(target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # not there any more if it was renamed
            return index, target
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInputError(f"{path} cannot be unpacked into {packs}: {reason}") from error
    except _DAMAGED as error:
        raise BadInputError(
            f"{path} is damaged, or is no pack: {error}. Get another copy of it"
        ) from error


def _read_index(archive: zipfile.ZipFile) -> bytes:
    """Raises ValueError if there is none, if it is too large, or if a file would be read in another way
    than `write` wrote it."""
    for info in archive.infolist():
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{info.filename!r} is encrypted, or compressed in another way")
    try:
        info = archive.getinfo(INDEX)
    except KeyError:
        raise ValueError(f"it has no {INDEX}") from None
    if info.file_size > MAX_INDEX_BYTES:
        raise ValueError(f"its {INDEX} is too large")
    with archive.open(info) as file:
        content = file.read(MAX_INDEX_BYTES + 1)
    if len(content) > MAX_INDEX_BYTES:
        raise ValueError(f"its {INDEX} is too large")
    return content


def _check_entries(archive: zipfile.ZipFile, index: PackIndex) -> None:
    """Raises ValueError unless the archive has exactly the files of the index, all of them regular."""
    names = [info.orig_filename for info in archive.infolist()]
    if sorted(names) != sorted([INDEX, *index.files]):
        raise ValueError(f"its files are not those that {INDEX} lists")
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG) or info.is_dir():
            raise ValueError(f"{info.filename!r} is a link, a folder or a device, expected a file")
        if info.filename != INDEX and info.file_size != index.files[info.filename].bytes:
            raise ValueError(f"{info.filename!r} has another size than {INDEX} says")


def _extract(
    archive: zipfile.ZipFile, index: PackIndex, folder: Path, progress: ProgressReporter
) -> None:
    total, done = sum(entry.bytes for entry in index.files.values()), 0
    for name, entry in index.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with archive.open(name) as source, path.open("xb") as target:
            while chunk := source.read(_CHUNK):
                size += len(chunk)
                if size > entry.bytes:  # it may be larger than its entry claims
                    raise ValueError(f"{name!r} has another size than {INDEX} says")
                digest.update(chunk)
                target.write(chunk)
                done += len(chunk)
                progress(done, total)
        if (size, digest.hexdigest()) != (entry.bytes, entry.sha256):
            raise ValueError(f"the checksum of {name!r} is wrong")


def _check_unpacked(index: PackIndex, folder: Path) -> None:
    """Raises BadInputError if a file was changed."""
    for name, entry in index.files.items():
        try:
            same = files.sha256(folder / name) == entry.sha256
        except OSError:
            same = False
        if not same:
            raise BadInputError(
                f"{folder / name} has changed since the pack was unpacked: remove {folder}, and it is "
                "unpacked again"
            )
