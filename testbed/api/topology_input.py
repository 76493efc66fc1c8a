"""Topologies as users of Python give them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import BadInputError
from testbed.topology import Topology, yamlfile

TopologyLike = str | Path | Mapping[str, Any] | Topology
"""A file's path; its text, which has line breaks; what is in it, as a mapping; or a topology that was
read. Paths in what is no file are relative to the working directory."""


@dataclass(frozen=True, slots=True)
class TopologyInput:
    name: str
    """Its path, or a stand-in for one: in errors, and for what lies beside it."""
    text: str
    """YAML."""


def data_root(data: str | Path | None) -> Path | None:
    """The folder of datasets: `data`, else TESTBED_DATA; None: there is none."""
    root = data or os.environ.get("TESTBED_DATA")
    return Path(root) if root else None


def text_of(
    wanted: TopologyLike | TopologyInput, changes: Mapping[str, Any] | None = None
) -> TopologyInput:
    """`wanted`, where `changes` take the place of its top-level entries. Raises BadInputError."""
    match wanted:
        case TopologyInput():
            given = wanted
        case Topology():
            given = TopologyInput(wanted.source.name, wanted.to_yaml())
        case Mapping():
            given = TopologyInput("<topology>", yamlfile.write(plain(wanted), "<topology>"))
        case str() if "\n" in wanted:
            given = TopologyInput("<topology>", wanted)
        case str() | Path():
            given = TopologyInput(str(wanted), yamlfile.read_text(Path(wanted)))
        case _:
            raise BadInputError(
                f"a topology is a path, its text, a mapping or a Topology, not a {type(wanted).__name__}"
            )
    if not changes:
        return given
    data = yamlfile.parse(given.text, given.name).data
    if not isinstance(data, Mapping):
        raise BadInputError(f"{given.name}: expected a mapping of the topology's entries")
    return TopologyInput(given.name, yamlfile.write(plain({**data, **changes}), "<topology>"))


def plain(value: Any) -> Any:
    """Paths as texts, tuples and ranges as lists, mappings as dicts, numpy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value
