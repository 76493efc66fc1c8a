"""Writing and unpacking of a pack's archive (a zip file)."""

from __future__ import annotations

import hashlib
import io
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agents.disk import files
from testbed.console import ProgressReporter
from testbed.errors import BadInputError, HostError
from testbed.packs import layout
from testbed.packs.contents import Contents
from testbed.packs.layout import CRATE, INDEX, FileEntry, PackIndex
from testbed.topology import units

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


@dataclass(frozen=True, slots=True)
class WrittenPack:
    path: Path
    bytes: int
    sha256: str
    """Hexadecimal digits."""
    index: PackIndex


def write(
    contents: Contents,
    to: Path,
    make_index: Callable[[dict[str, FileEntry]], PackIndex],
    make_crate: Callable[[PackIndex], bytes],
    report: Callable[[str], object],
) -> WrittenPack:
    """The file `to` appears when it is complete. Raises BadInputError if the content is too large."""
    total = sum(
        len(one) if isinstance(one, bytes) else one.stat().st_size for one in contents.files.values()
    )
    if total > layout.MAX_BYTES:
        most = units.format_size(layout.MAX_BYTES)
        raise BadInputError(
            f"{contents.name} has {units.format_size(total)} of files, expected at most {most}: leave "
            "out parts that --with adds"
        )
    progress, done = ProgressReporter(report, f"Packing {contents.name}", of_bytes=True), 0
    entries: dict[str, FileEntry] = {}
    with files.atomic_write(to) as partial:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
            for name, source in sorted(contents.files.items()):
                with _opened(source) as file:
                    for size in _copied(file, archive, name, entries):
                        done += size
                        progress(done, total)
            description = make_crate(make_index(entries))
            for _ in _copied(io.BytesIO(description), archive, CRATE, entries):
                pass
            index = make_index(entries)
            archive.writestr(_info(INDEX), layout.encode(index))
        digest, size = sha256_of(partial), partial.stat().st_size
    return WrittenPack(to, size, digest, index)


@contextmanager
def _opened(source: Path | bytes) -> Iterator[IO[bytes]]:
    with io.BytesIO(source) if isinstance(source, bytes) else files.open_regular(source) as file:
        yield file


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
            index, digest = layout.decode(content), hashlib.sha256(content).hexdigest()
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
    if info.file_size > layout.MAX_INDEX_BYTES:
        raise ValueError(f"its {INDEX} is too large")
    with archive.open(info) as file:
        content = file.read(layout.MAX_INDEX_BYTES + 1)
    if len(content) > layout.MAX_INDEX_BYTES:
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
            same = sha256_of(folder / name) == entry.sha256
        except OSError:
            same = False
        if not same:
            raise BadInputError(
                f"{folder / name} has changed since the pack was unpacked: remove {folder}, and it is "
                "unpacked again"
            )


def sha256_of(path: Path) -> str:
    """SHA-256 of a regular file in hexadecimal digits. Raises OSError."""
    with files.open_regular(path) as file:
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
