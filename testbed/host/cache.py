"""The user's cache, which persists between runs: datasets, wheels, the speed of this host."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from agents.disk import files


def folder() -> Path:
    """`$XDG_CACHE_HOME/testbed`, by default ~/.cache/testbed. The folder may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "testbed"


def keep(path: Path, text: str) -> None:
    """Write atomically. Errors are ignored, because a missing file is computed again the next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")
