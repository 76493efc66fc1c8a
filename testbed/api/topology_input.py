"""Conversion of topologies that are passed from Python (path, text, mapping or object) to text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed import sweeps
from testbed.errors import BadInputError
from testbed.topology import Topology, yamlfile

TopologyLike = str | Path | Mapping[str, Any] | Topology
"""A topology: path of a file, text (with line breaks), mapping, or `Topology`. Paths in a text or
mapping are relative to the working directory."""


@dataclass(frozen=True, slots=True)
class TopologyInput:
    name: str
    """Path of the topology's file, or a placeholder. It is used in errors, and to find files in the same
    folder.
    """
    text: str
    """YAML."""


def data_root(data: str | Path | None) -> Path | None:
    """If `data` is None, take the environment variable TESTBED_DATA."""
    root = data or os.environ.get("TESTBED_DATA")
    return Path(root) if root else None


def text_of(
    wanted: TopologyLike | TopologyInput, changes: Mapping[str, Any] | None = None
) -> TopologyInput:
    """`changes`: of top-level entries. Raises BadInputError."""
    match wanted:
        case TopologyInput():
            given = wanted
        case Topology():
            given = TopologyInput(wanted.source.name, wanted.to_yaml())
        case Mapping():
            given = TopologyInput("<topology>", yamlfile.write(plain_values(wanted), "<topology>"))
        case str() if "\n" in wanted:
            given = TopologyInput("<topology>", wanted)
        case str() | Path():
            given = TopologyInput(str(wanted), yamlfile.read_text(Path(wanted)))
        case _:
            raise BadInputError(
                f"expected a topology as path, text, mapping or Topology, not {type(wanted).__name__}"
            )
    if not changes:
        return given
    data = yamlfile.parse(given.text, given.name).data
    if not isinstance(data, Mapping):
        raise BadInputError(f"{given.name}: expected a mapping of the topology's entries")
    return TopologyInput(given.name, yamlfile.write(plain_values({**data, **changes}), "<topology>"))


def with_settings(given: TopologyInput, settings: Sequence[str]) -> TopologyInput:
    """A setting is `PATH=VALUE` with a path such as `rule.buffer_size` or `devices[0].cpu`, and a value
    in YAML. Raises BadInputError."""
    if not settings:
        return given
    data = yamlfile.parse(given.text, given.name).data
    for text in settings:
        path, equals, value = text.partition("=")
        where = sweeps.parse_path(path.strip())
        if not equals or where is None:
            raise BadInputError(
                f"--set {text}: expected a key and a value such as rule.buffer_size=8 or "
                "'devices[0].cpu=0.2'"
            )
        try:
            data = yamlfile.replace_value(data, where, yamlfile.parse(value, f"--set {path}").data)
        except LookupError as error:
            raise BadInputError(f"--set {text}: {error.args[0]}") from None
    changed = yamlfile.write(plain_values(data), given.name)
    return TopologyInput(f"{given.name} with --set", changed)


def plain_values(value: Any) -> Any:
    """Convert paths to texts, tuples and ranges to lists, mappings to dicts, numpy values to Python
    values."""
    if isinstance(value, Mapping):
        return {key: plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain_values(inner) for inner in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value
