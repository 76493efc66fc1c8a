"""Parameters, tags and files of a run, which a tracker receives beside figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.rundir.directory import RunDirectory
from testbed.topology import yamlfile


@dataclass(frozen=True, slots=True)
class Facts:
    run: str
    study: str
    """Name of the topology, by which trackers group runs."""
    began: float
    """Unix time at device time 0, in seconds."""
    parameters: Mapping[str, str | int | float | bool]
    """Resolved topology by dotted names, such as `task.local.lr`, or `devices.pi.cpu` for the group
    `pi`."""
    tags: Mapping[str, str]
    """Rule, task, runtime, number of devices, host and commit."""


def read(directory: RunDirectory, began: float) -> Facts:
    """`began`: Unix time at device time 0, in seconds. Raises BadInputError or KeyError."""
    manifest = directory.read_manifest()
    topology = yamlfile.read(directory.topology).data
    known = {name: manifest.get(name) for name in ("rule", "task", "runtime", "commit", "sweep")}
    known |= {"devices": len(manifest["devices"]), "host": manifest.get("host", {}).get("name")}
    return Facts(
        run=directory.run,
        study=str(topology["name"]),
        began=began,
        parameters=dict(_flatten("", topology)),
        tags={f"testbed.{name}": str(value) for name, value in known.items() if value is not None},
    )


def files(directory: RunDirectory, *, model: bool) -> list[Path]:
    found = [directory.manifest, directory.topology, directory.fidelity]
    if model:
        found.append(directory.models / "final.safetensors")
    return [path for path in found if path.is_file()]


def _flatten(name: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    """Join nested keys by dots. A list of scalars becomes a text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        if all(isinstance(inner, Mapping) and "name" in inner for inner in value):
            for inner in value:
                rest = {key: one for key, one in inner.items() if key != "name"}
                yield from _flatten(f"{name}.{inner['name']}", rest)
        else:
            yield name, str([*value])
    elif value is not None:
        yield name, value
