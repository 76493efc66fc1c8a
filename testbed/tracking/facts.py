"""What a tracker is told of a run beside its figures."""

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
    """Its id."""
    study: str
    """The topology's name: runs of one belong together."""
    began: float
    """Unix time at device time 0, in seconds."""
    parameters: Mapping[str, str | int | float | bool]
    """The resolved topology: `task.local.lr`, `devices.pi.cpu`, by the name of the device group."""
    tags: Mapping[str, str]
    """Rule, task, runtime, number of devices, host, commit."""


def read(directory: RunDirectory, began: float) -> Facts:
    """Of a run that has a plan. Raises BadInputError, KeyError."""
    manifest = directory.read_manifest()
    topology = yamlfile.read(directory.topology).data
    known = {name: manifest.get(name) for name in ("rule", "task", "runtime", "commit", "sweep")}
    known |= {"devices": len(manifest["devices"]), "host": manifest.get("host", {}).get("name")}
    return Facts(
        run=directory.run,
        study=str(topology["name"]),
        began=began,
        parameters=dict(_flat("", topology)),
        tags={f"testbed.{name}": str(value) for name, value in known.items() if value is not None},
    )


def files(directory: RunDirectory, *, model: bool) -> list[Path]:
    """Those to keep of a run that is over; also the final model where `model`."""
    found = [directory.manifest, directory.topology, directory.fidelity]
    if model:
        found.append(directory.models / "final.safetensors")
    return [path for path in found if path.is_file()]


def _flat(name: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    """`value`, in it lists and mappings, by dotted names; a list of scalars is a text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        if all(isinstance(inner, Mapping) and "name" in inner for inner in value):
            for inner in value:
                rest = {key: one for key, one in inner.items() if key != "name"}
                yield from _flat(f"{name}.{inner['name']}", rest)
        else:
            yield name, str([*value])
    elif value is not None:
        yield name, value
