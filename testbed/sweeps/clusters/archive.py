"""A folder of regular files as bytes (a zip file), with a limit on the size of its content."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from testbed.topology import units

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class TooLargeError(Exception):
    pass


def pack(folder: Path, most: int) -> bytes:
    """Return a zip file. Raises TooLargeError if the regular files have more than `most` bytes."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    _check(sum(path.stat().st_size for path in found), most)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in found:
            archive.writestr(str(path.relative_to(folder)), path.read_bytes())
    return packed.getvalue()


def unpack(packed: bytes, folder: Path, most: int) -> None:
    """Raises TooLargeError if the content has more than `most` bytes, and ValueError if `packed` is
    damaged or a file's name leads out of `folder`."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            _check(sum(entry.file_size for entry in archive.infolist()), most)
            for entry in archive.infolist():
                if entry.flag_bits & 1 or entry.compress_type not in _METHODS:
                    raise ValueError(f"{entry.filename!r} is encrypted, or compressed in another way")
                name = PurePosixPath(entry.filename)
                if name.is_absolute() or ".." in name.parts or "\\" in entry.filename:
                    raise ValueError(f"the name {entry.filename!r} leads out of the folder")
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as file:
                    content = file.read(entry.file_size + 1)  # the entry may be larger than it claims
                if len(content) != entry.file_size:
                    raise ValueError(f"{entry.filename!r} has another size than its entry")
                path.write_bytes(content)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise ValueError(f"damaged zip file: {error}") from error


def _check(size: int, most: int) -> None:
    if size > most:
        raise TooLargeError(f"{units.format_size(size)}, expected at most {units.format_size(most)}")
