"""The index of a pack (`pack.json`): sizes and checksums of its files, the data that the runs read, and
its description as RO-Crate."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta

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


def encode(index: PackIndex) -> bytes:
    return msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"


def decode(content: bytes) -> PackIndex:
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
