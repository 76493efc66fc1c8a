"""The user's cache, kept from run to run: datasets, wheels, this host's speed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from agents.disk import files


def folder() -> Path:
    """`$XDG_CACHE_HOME/testbed`, by default under ~/.cache. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "testbed"


def keep(path: Path, text: str) -> None:
    """Write a file of the cache whole; where that is not possible, it is found out again next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")
