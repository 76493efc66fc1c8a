"""The user's cache, kept from run to run: datasets, wheels, this host's speed."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """`$XDG_CACHE_HOME/testbed`, by default under ~/.cache. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "testbed"
