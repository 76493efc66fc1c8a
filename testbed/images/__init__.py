"""Container images: which images this version needs, with tags computed from their inputs, the packages
of their Debian base, and which images are in use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from testbed import bundle
from testbed.errors import HostError
from testbed.host import cache
from testbed.host.processes import run

SUITE = "bookworm"
DEBIAN_IMAGE = f"debian:{SUITE}-slim"
"""Debian's official image, which is used if a registry answers."""

DEBIAN_OPTIONS = (
    # No apt: nothing is installed into the image later.
    "--variant=essential",
    "--quiet",
    "--dpkgopt=force-unsafe-io",
    '--aptopt=Acquire::Languages "none"',
    # Not by dpkg's path-exclude, for which mmdebstrap starts a filter in Python for each package.
    '--customize-hook=cd "$1/usr/share" && rm -rf doc/* info/* locale/* man/*',
)
_MEMORY = Path("/dev/shm")  # noqa: S108  (mmdebstrap makes a folder of its own there)
_MEMORY_BYTES = 2 << 30
"""Free memory with which the files are made in memory. They take less than 0.5 GB."""


def bootstrap_debian(
    packages: Sequence[str], architecture: str, scratch: Path, stop: threading.Event
) -> Path:
    """Return a tar archive of Debian's essential packages and `packages`.

    `architecture`: name of the architecture in Debian and Docker. Root is not needed, because mmdebstrap
    uses a user namespace, whose users must be able to reach the folder for its temporary files. Raises
    HostError if the archive cannot be made.
    """
    if shutil.which("mmdebstrap") is None:
        raise HostError(
            f"No registry with {DEBIAN_IMAGE} answers, and mmdebstrap, which makes the base image from "
            "Debian's packages, is not installed: run 'sudo apt-get install mmdebstrap uidmap', or give "
            "the Docker engine access to a registry."
        )
    archive = scratch / "base.tar"
    command = ["mmdebstrap", *DEBIAN_OPTIONS, f"--architectures={architecture}"]
    with archive.open("wb") as output:
        include = f"--include={','.join(packages)}"
        run([*command, include, SUITE, "-"], stop=stop, output=output, temporary=_folder_in_memory())
    return archive


def _folder_in_memory() -> Path | None:
    """Programs can be started in it. None if there is none with enough space. On a disk, thousands of
    small files and their removal take as long as all else."""
    try:
        found = os.statvfs(_MEMORY)
    except OSError:
        return None
    free = min(found.f_bavail * found.f_frsize, psutil.virtual_memory().available)
    return _MEMORY if free >= _MEMORY_BYTES and not found.f_flag & os.ST_NOEXEC else None


# Tags of the container images, computed from their inputs. Computing a tag only reads files.
#
# base -> libraries -> agent, and base -> broker. A run with its own code adds agent -> requirements ->
# code. If the code has no requirements, the run adds agent -> code. For devices with a GPU there is a
# second chain with CUDA: base -> libraries-cuda -> agent-cuda -> ...
#
# A tag is a hash of everything in the image, including the tag of the image's parent. So an image that
# exists is up to date, and a change rebuilds only the images that depend on it.

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
    tags = {"base": _tag("base", build_files(folder, "base"), repr(DEBIAN_OPTIONS))}
    for kind in ("libraries", "agent", "broker", "libraries-cuda", "agent-cuda"):
        modules = module_files(sources) if kind.removesuffix(CUDA) == "agent" else {}
        tags[kind] = _tag(kind, build_files(folder, kind) | modules, tags[_PARENTS[kind]])
    return tags


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


_REGISTER = "images-in-use"
"""Folder in the cache. It has one file per checkout, code or Dockerfile, which lists images in use."""


def register_images(tags: Tags, own: str = "") -> None:
    """`own`: path of code or Dockerfile; empty for this checkout."""
    name = hashlib.sha256(f"{FOLDER}{own}".encode()).hexdigest()[:12]
    entry = {"folder": own or str(FOLDER), "tags": [*tags.values()]}
    cache.keep(cache.folder() / _REGISTER / f"{name}.json", json.dumps(entry))


def registered_images() -> dict[str, str]:
    """Return tag -> path of the checkout, code or Dockerfile that uses it.

    Entries whose path no longer exists are left out.
    """
    registers = [json.loads(path.read_bytes()) for path in (cache.folder() / _REGISTER).glob("*.json")]
    return {
        tag: one["folder"] for one in registers if Path(one["folder"]).exists() for tag in one["tags"]
    }
