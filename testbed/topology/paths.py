"""Paths in the YAML of topologies and sweeps: finding and replacing them, so that a copy of the YAML
finds its files in another folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

PATH_KEYS = frozenset(
    {
        *("behaviour", "code", "csv", "down", "from", "from_log", "from_run", "image", "initial"),
        *("path", "trace", "up"),
    }
)
"""Keys of a topology whose value may be a path. Some of them may also have another value, such as the
rate of a link, or the tag of an image."""


def replace(data: Any, change: Callable[[str, str], str | None], key: str = "") -> Any:
    """Return a copy of `data`, which was read from YAML. `change` gets each key in `PATH_KEYS` with its
    text, and returns the new text, or None to leave the text unchanged.

    Keys of a sweep are paths of keys: the value of `task.initial` belongs to the key `initial`. All
    texts in a list below a key belong to that key. `key`: key of `data` itself.
    """
    if isinstance(data, Mapping):
        return {name: replace(value, change, _last_key(name)) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [replace(value, change, key) for value in data]
    if isinstance(data, str) and key in PATH_KEYS:
        changed = change(key, data)
        return data if changed is None else changed
    return data


def _last_key(name: object) -> str:
    return str(name).rpartition(".")[2].partition("[")[0]


def leads_outside(text: str) -> bool:
    return text.startswith("/") or ".." in PurePosixPath(text).parts


def keys(data: Any) -> Iterator[tuple[str, Any]]:
    """A key of a sweep that is a path of keys, such as `task.name`, is yielded as a whole."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield str(name), value
            yield from keys(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from keys(value)
