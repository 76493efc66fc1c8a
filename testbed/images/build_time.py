"""How long a build of images will take, by how long each took here the last time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress

from testbed import console
from testbed.host import cache

_FILE = "image-seconds.json"
"""In the cache: seconds by kind of image."""


class BuildTime:
    """Of one build. As text: `about 90 s left`; empty where one of the images was never built here."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._left = set(kinds)
        self._seconds: dict[str, float] = {}
        with suppress(OSError, ValueError, TypeError):
            self._seconds = dict(json.loads((cache.folder() / _FILE).read_bytes()))
        self._mark = time.monotonic()

    def built(self, kind: str) -> None:
        """That image is there, and since the last one, or the beginning, it was waited for."""
        now = time.monotonic()
        self._left.discard(kind)
        self._seconds[kind], self._mark = round(now - self._mark, 1), now
        cache.keep(cache.folder() / _FILE, json.dumps(self._seconds))

    def __str__(self) -> str:
        if not self._left <= self._seconds.keys():
            return ""
        return console.time_left_text(sum(self._seconds[kind] for kind in self._left))
