"""Register of the images that this user's checkouts, code and Dockerfiles use. The register is in the
cache. `testbed images prune` keeps the registered images."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from testbed.host import cache
from testbed.images.tags import FOLDER, Tags

_REGISTER = "images-in-use"
"""Folder in the cache. It has one file per checkout, code or Dockerfile, which lists images in use."""


def register_images(tags: Tags, own: str = "") -> None:
    """`own`: path of code or Dockerfile; empty for this checkout."""
    name = hashlib.sha256(f"{FOLDER}{own}".encode()).hexdigest()[:12]
    entry = {"folder": own or str(FOLDER), "tags": [*tags.values()]}
    cache.keep(cache.folder() / _REGISTER / f"{name}.json", json.dumps(entry))


def registered_images() -> dict[str, str]:
    """Return tag -> path of the checkout, code or Dockerfile that uses it.

    Entries whose path no longer exists are left out.
    """
    registers = [json.loads(path.read_bytes()) for path in (cache.folder() / _REGISTER).glob("*.json")]
    return {
        tag: one["folder"] for one in registers if Path(one["folder"]).exists() for tag in one["tags"]
    }
