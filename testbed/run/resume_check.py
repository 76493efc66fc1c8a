"""Check that the files that a run started from are unchanged when the run is resumed.

The files are the files of the plan, and the file with the model's initial state. The user's own code is
checked by `preparing.check_code`. The manifest has digests of the files. The folder `state/` has copies,
so that an error can say what differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from agents.disk import files
from agents.texts import quantity
from testbed.errors import BadInputError, reading_run
from testbed.rundir.directory import RunDirectory
from testbed.topology import yamlfile
from testbed.topology.yamlfile import Where

_NAMED = 5
"""Differences that an error lists."""
_SHOWN = 60
"""Characters of a value."""
_NOTHING = object()


def save(directory: RunDirectory) -> None:
    directory.state.mkdir(mode=0o700, exist_ok=True)
    for path in _files(directory):
        if path.is_file():
            (directory.state / path.name).write_bytes(path.read_bytes())
    start = {"start": _digest(directory.start)} if directory.start.is_file() else {}
    directory.write_manifest(topology=_digest_of(_read(directory, directory.path)), **start)


def _files(directory: RunDirectory) -> tuple[Path, ...]:
    return directory.topology, directory.profiles, directory.measured


def _read(directory: RunDirectory, folder: Path) -> Any:
    """Raises BadInputError."""
    topology, *others = (folder / path.name for path in _files(directory))
    data = yamlfile.read(topology).data
    beside = {path.name: yamlfile.read(path).data for path in others if path.is_file()}
    return data | beside if isinstance(data, dict) else data


def check(directory: RunDirectory) -> None:
    """Raises BadInputError if a file that the run started from has changed."""
    manifest = directory.read_manifest()
    now = _read(directory, directory.path)
    if _digest_of(now) != manifest.get("topology"):
        raise BadInputError(
            f"{directory.topology} is not the topology that the run began with"
            f"{_differences(directory)}. A resumed run needs the same topology: undo the change, or "
            "start a new run with it"
        )
    with reading_run(directory.path):
        found = _digest(directory.start) if directory.start.exists() else None
    if found != manifest.get("start"):
        raise BadInputError(
            f"{directory.start}, the state that the run's module starts from, has changed since the run "
            "began: put a copy back, or start a new run"
        )


def _differences(directory: RunDirectory) -> str:
    path, now = directory.state / directory.topology.name, _read(directory, directory.path)
    try:
        began = _read(directory, directory.state)
    except BadInputError:
        return f" (the change is not known: {path} cannot be read)"
    if _digest_of(began) != directory.read_manifest().get("topology"):
        return f" (the change is not known: {path}, or the digest in the manifest, was changed, too)"
    found = list(_describe_differences(began, now, ()))
    more = f"; {quantity(len(found) - _NAMED, 'more difference')}" if len(found) > _NAMED else ""
    return f": {'; '.join(found[:_NAMED])}{more}"


def _describe_differences(began: Any, now: Any, where: Where) -> Iterator[str]:
    """Yield sentences such as `rule.buffer_size was 2, and is 7`."""
    if isinstance(began, dict) and isinstance(now, dict):
        for key in {**began, **now}:
            yield from _describe_differences(
                began.get(key, _NOTHING), now.get(key, _NOTHING), (*where, key)
            )
    elif isinstance(began, tuple) and isinstance(now, tuple):
        for index in range(max(len(began), len(now))):
            before, after = (each[index] if index < len(each) else _NOTHING for each in (began, now))
            yield from _describe_differences(before, after, (*where, index))
    elif now is _NOTHING:
        yield f"{yamlfile.dotted_path(where)} was {_format_value(began)}, and is missing"
    elif began is _NOTHING:
        yield f"{yamlfile.dotted_path(where)} is new, {_format_value(now)}"
    elif _canonical(began) != _canonical(now):
        yield f"{yamlfile.dotted_path(where)} was {_format_value(began)}, and is {_format_value(now)}"


def _format_value(value: Any) -> str:
    text = _canonical(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _digest_of(data: Any) -> str:
    """Comments and the order of keys are ignored."""
    return hashlib.sha256(_canonical(data).encode("utf-8", "surrogatepass")).hexdigest()


def _digest(path: Path) -> str:
    with files.open_regular(path) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
