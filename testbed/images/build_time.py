"""Estimate of how long a build of images takes, from the last build of each image on this host."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress

from testbed import console
from testbed.host import cache

_FILE = "image-seconds.json"
"""Seconds that the last build of each kind of image took, in the cache."""


class BuildTime:
    """`str` returns the time left as text, such as `about 90 s left`. The text is empty if one of the
    images was never built on this host."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._left = set(kinds)
        self._seconds: dict[str, float] = {}
        with suppress(OSError, ValueError, TypeError):
            self._seconds = dict(json.loads((cache.folder() / _FILE).read_bytes()))
        self._mark = time.monotonic()

    def record_built(self, kind: str) -> None:
        """The build time is the time since the previous image was finished, or since the start of the
        build."""
        now = time.monotonic()
        self._left.discard(kind)
        self._seconds[kind], self._mark = round(now - self._mark, 1), now
        cache.keep(cache.folder() / _FILE, json.dumps(self._seconds))

    def __str__(self) -> str:
        if not self._left <= self._seconds.keys():
            return ""
        return console.time_left_text(sum(self._seconds[kind] for kind in self._left))
