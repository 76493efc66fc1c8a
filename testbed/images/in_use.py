"""Which images this user's checkouts, own code and Dockerfiles use, kept in the cache: `prune` leaves
them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from testbed.host import cache
from testbed.images.tags import FOLDER, Tags

_REGISTER = "images-in-use"
"""Folder of the cache, with a file for each checkout: which images it uses."""


def register(tags: Tags, own: str = "") -> None:
    """Keep in the cache which images this checkout uses, or with it the `own` code or Dockerfile of that
    path: `prune` leaves them."""
    name = hashlib.sha256(f"{FOLDER}{own}".encode()).hexdigest()[:12]
    entry = {"folder": own or str(FOLDER), "tags": [*tags.values()]}
    cache.keep(cache.folder() / _REGISTER / f"{name}.json", json.dumps(entry))


def registered() -> dict[str, str]:
    """What this user's checkouts, own code and Dockerfiles use, as far as these are still there: the
    path of one of them, by tag."""
    registers = [json.loads(path.read_bytes()) for path in (cache.folder() / _REGISTER).glob("*.json")]
    return {
        tag: one["folder"] for one in registers if Path(one["folder"]).exists() for tag in one["tags"]
    }
