"""Tags of the container images, as hashes of all that goes into them. Pure but for reading files.

base -> libraries -> agent, and base -> broker. For a user's own code there are more on top: agent ->
requirements -> code, as far as a run has these. For devices with a GPU there is a second chain beside
that, libraries-cuda -> agent-cuda -> ...

A tag is a hash of all that goes into the image, its parent's tag included: an image that exists is up to
date, and a change rebuilds only the images that depend on it.
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
"""Label of every image and layer of ours; its value is the kind: `base`, `libraries`, ..."""
OWN = ("requirements", "code")
"""Kinds of images with what a run adds."""
CUDA = "-cuda"
"""What the kinds of image for devices with a GPU end with."""
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
"""Kind of image -> the one that it is built on; without requirements, code is built on agent."""
Tags = Mapping[str, str]
"""Kind of image -> its tag, parents first."""


@dataclass(frozen=True, slots=True)
class Images:
    """Tags of the images that a run starts containers from."""

    agent: str
    """With own code, where the run has some."""
    broker: str
    base: str
    """What both are built on."""
    gpu: str = ""
    """As `agent`, with CUDA; empty where no device of the run has a GPU."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Of the device groups that have one of their own (`testbed.images.own`)."""


@dataclass(frozen=True, slots=True)
class Own:
    """What a run adds to the agents' image."""

    name: str
    """Of what is kept of it: another version of the same supersedes it."""
    digest: str
    """Of the code."""
    copy: Callable[[Path], None]
    """Writes the code into a folder."""
    requirements: tuple[str, ...] = ()
    """Packages, as for pip."""


def current_tags(folder: Path, sources: Path) -> dict[str, str]:
    """The tag of each image, from the inputs in `folder` (as `images/`) and the package `sources`."""
    base = _tag("base", _inputs(folder / "base"), repr(debian.OPTIONS))
    libraries = _tag("libraries", _inputs(folder / "libraries"), base)
    agent = _tag("agent", _inputs(folder / "agent") | modules(sources), libraries)
    broker = _tag("broker", _inputs(folder / "broker"), base)
    of_cuda = _tag("libraries-cuda", recipe(folder, "libraries-cuda"), base)
    agent_of_cuda = _tag("agent-cuda", recipe(folder, "agent-cuda") | modules(sources), of_cuda)
    return {
        "base": base,
        "libraries": libraries,
        "agent": agent,
        "broker": broker,
        "libraries-cuda": of_cuda,
        "agent-cuda": agent_of_cuda,
    }


def recipe(folder: Path, kind: str) -> dict[str, Path]:
    """The files that an image of that kind is built by. One with CUDA has those of the kind without,
    except where it has its own."""
    own = folder / kind
    return _inputs(folder / kind.removesuffix(CUDA)) | (_inputs(own) if own.is_dir() else {})


def own_tags(own: Own, agent: str) -> dict[str, str]:
    """Of the images that `own` adds on top of `agent`."""
    tags, parent = {}, agent
    if own.requirements:
        parent = tags["requirements"] = _tag(
            "requirements", _inputs(FOLDER / "requirements"), f"{parent}\n{own.requirements}"
        )
    tags["code"] = _tag("code", _inputs(FOLDER / "code"), f"{parent}\n{own.digest}")
    return tags


def of_agents(tags: Tags, variant: str = "") -> str:
    """The kind that clients and aggregator are started from."""
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


def modules(package: Path) -> dict[str, Path]:
    """The modules of `package` alone: no byte code, no editor's backups. Path in the image -> here."""
    return {str(path.relative_to(package.parent)): path for path in package.rglob("*.py")}
