"""Tags of the container images, computed from their inputs. Computing a tag only reads files.

base -> libraries -> agent, and base -> broker. A run with its own code adds agent -> requirements ->
code. If the code has no requirements, the run adds agent -> code. For devices with a GPU there is a
second chain with CUDA: base -> libraries-cuda -> agent-cuda -> ...

A tag is a hash of everything in the image, including the tag of the image's parent. So an image that
exists is up to date, and a change rebuilds only the images that depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testbed import bundle
from testbed.images import debian

FOLDER, AGENTS = bundle.IMAGES, bundle.AGENTS
LABEL = "testbed.image"
"""The value is the kind of image: `base`, `libraries`, ..."""
OWN = ("requirements", "code")
CUDA = "-cuda"
"""Suffix of the kinds of images for devices with a GPU."""
_PARENTS = {
    "libraries": "base",
    "agent": "libraries",
    "broker": "base",
    "requirements": "agent",
    "code": "requirements",
    "libraries-cuda": "base",
    "agent-cuda": "libraries-cuda",
    "requirements-cuda": "agent-cuda",
    "code-cuda": "requirements-cuda",
}
"""Kind of image -> kind of its parent. Without requirements, the parent of `code` is `agent`."""
Tags = Mapping[str, str]
"""Kind of image -> its tag, parents first."""


@dataclass(frozen=True, slots=True)
class Images:
    """Images that a run starts containers from."""

    agent: str
    """Image of clients and aggregator, with the run's own code."""
    broker: str
    base: str
    """Image that the images of agents and broker are built on."""
    gpu: str = ""
    """Image of clients with CUDA; empty if no device of the run has a GPU."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Device group -> tag of the group's own image (`testbed.images.device_images`), if it has one."""


@dataclass(frozen=True, slots=True)
class ImageAdditions:
    """Added to the agents' image by a run."""

    name: str
    """Name in the register of images in use. A newer entry replaces an older entry of the same name."""
    digest: str
    copy: Callable[[Path], None]
    requirements: tuple[str, ...] = ()
    """In pip's notation."""


def current_tags(folder: Path, sources: Path) -> dict[str, str]:
    """`folder`: build inputs. `sources`: the package `agents`."""
    base = _tag("base", _inputs(folder / "base"), repr(debian.OPTIONS))
    libraries = _tag("libraries", _inputs(folder / "libraries"), base)
    agent = _tag("agent", _inputs(folder / "agent") | module_files(sources), libraries)
    broker = _tag("broker", _inputs(folder / "broker"), base)
    of_cuda = _tag("libraries-cuda", build_files(folder, "libraries-cuda"), base)
    agent_of_cuda = _tag(
        "agent-cuda", build_files(folder, "agent-cuda") | module_files(sources), of_cuda
    )
    return {
        "base": base,
        "libraries": libraries,
        "agent": agent,
        "broker": broker,
        "libraries-cuda": of_cuda,
        "agent-cuda": agent_of_cuda,
    }


def build_files(folder: Path, kind: str) -> dict[str, Path]:
    """Return file name -> path.

    An image with CUDA has the files of its kind without CUDA, too. If both kinds have a file of the same
    name, the file of the kind with CUDA is used.
    """
    own = folder / kind
    return _inputs(folder / kind.removesuffix(CUDA)) | (_inputs(own) if own.is_dir() else {})


def added_tags(own: ImageAdditions, agent: str) -> dict[str, str]:
    """Images on top of `agent`."""
    tags, parent = {}, agent
    if own.requirements:
        parent = tags["requirements"] = _tag(
            "requirements", _inputs(FOLDER / "requirements"), f"{parent}\n{own.requirements}"
        )
    tags["code"] = _tag("code", _inputs(FOLDER / "code"), f"{parent}\n{own.digest}")
    return tags


def agent_kind(tags: Tags, variant: str = "") -> str:
    """Image of clients and aggregator. `variant`: `CUDA` for clients with a GPU, otherwise empty."""
    return f"code{variant}" if f"code{variant}" in tags else f"agent{variant}"


def parent_of(kind: str, tags: Tags) -> str | None:
    parent = _PARENTS.get(kind)
    return parent if parent is None or parent in tags else _PARENTS[parent]


def _tag(kind: str, files: Mapping[str, Path], parent: str) -> str:
    digest = hashlib.sha256(parent.encode())
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return f"testbed-{kind}:{digest.hexdigest()[:12]}"


def _inputs(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.is_file()}


def module_files(package: Path) -> dict[str, Path]:
    """Return path in the image -> path on this host. Byte code and other files are left out."""
    return {str(path.relative_to(package.parent)): path for path in package.rglob("*.py")}
