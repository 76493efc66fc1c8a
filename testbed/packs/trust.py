"""Checks of an unpacked pack: whether it would run programs of its own, or reach other machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from testbed.errors import BadInputError
from testbed.packs.contents import outside_paths
from testbed.packs.layout import SWEEP, TOPOLOGY
from testbed.topology import Topology, paths, yamlfile

_CODE = "code"


def check_files(folder: Path, *, trusted: bool) -> None:
    """Raise BadInputError if reading the topology or the sweep in `folder` would run code of the pack
    and `trusted` is not set, or if they name files outside of `folder`. Call this before they are read
    as a topology, because that imports the user's code."""
    for name in (TOPOLOGY, SWEEP):
        if not (folder / name).is_file():
            continue
        data = yamlfile.read(folder / name).data
        for text in outside_paths(data):
            raise BadInputError(f"{folder / name} names {text}, a file outside of the pack: refused")
        if not trusted and any(value is not None for value in _values(data, _CODE)):
            raise _untrusted(folder, ["own code, which is imported and trained here"])


def _values(data: Any, key: str) -> Iterator[Any]:
    """Yield the values of `key`, at any place in a topology or sweep. A path of keys that begins with
    `key` counts, too."""
    for name, value in paths.keys(data):
        if name == key or name.startswith((f"{key}.", f"{key}[")):
            yield value


def check_topologies(topologies: Iterable[Topology], folder: Path, *, trusted: bool) -> None:
    """Raise BadInputError if a run of a topology would start programs of the pack or reach other
    machines and `trusted` is not set, or if a topology names files outside of `folder`."""
    found: dict[str, None] = {}
    for topology in topologies:
        for text in _outside(topology, folder):
            raise BadInputError(f"{folder} names {text}, a file outside of the pack: refused")
        found |= dict.fromkeys(_reasons(topology))
    if found and not trusted:
        raise _untrusted(folder, list(found))


def _untrusted(folder: Path, reasons: list[str]) -> BadInputError:
    return BadInputError(
        f"the pack has {'; '.join(reasons)}. That would run with your rights: look at {folder}, and add "
        "--trust if you would run it as a script"
    )


def _reasons(topology: Topology) -> Iterator[str]:
    if topology.user_code is not None:
        yield "own code, which is imported and trained here"
    for group in topology.devices:
        if group.image is not None:
            yield f"an image of its own ({Path(group.image).name})"
        if group.hosts:
            yield f"devices on other machines ({', '.join(group.hosts)})"
    if topology.runtime.registry is not None:
        yield f"a registry to push images to ({topology.runtime.registry})"


def _outside(topology: Topology, folder: Path) -> Iterator[str]:
    """Yield the paths in `topology` that are not in `folder`. Reading a topology makes paths
    absolute."""
    found: list[str] = []
    root = folder.absolute()

    def look(_: str, text: str) -> None:
        if text.startswith("/") and not Path(text).is_relative_to(root):
            found.append(text)

    paths.replace(topology.model_dump(mode="json", by_alias=True), look)
    yield from found
