"""Files that a reader sees whole or not at all, whenever the writer dies."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which becomes `path` in one step where nothing is raised. Also
    when two do this at once."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save(path: Path, data: bytes) -> None:
    """Write `data` so that it is on the disk as `path`, all of it, when this returns."""
    with whole(path) as partial, partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())
