"""The index of a pack (`pack.json`): size and checksum of each file, the data that the runs read, and
what was left out. Also the rules for names of files, and the limits of sizes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Annotated, Literal

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
