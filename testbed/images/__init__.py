"""Container images, built if they are missing, listed, and removed if nothing uses them.

`tags` computes which images this version needs, and remembers which are still in use; `building` builds
them."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import APIError

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.images.building import (
    Builder,
    BuildTime,
    Progress,
    build_lock,
    engine_build,
    image_exists,
    missing_kinds,
    remove_untagged,
    scratch_folder,
)
from testbed.images.tags import (
    AGENTS,
    CUDA,
    FOLDER,
    LABEL,
    ImageAdditions,
    Images,
    Tags,
    added_tags,
    agent_kind,
    current_tags,
    register_images,
    registered_images,
)

__all__ = [
    "AGENTS",
    "FOLDER",
    "LABEL",
    "ImageAdditions",
    "Images",
    "Progress",
    "Tags",
    "are_built",
    "build_lock",
    "current_tags",
    "engine_build",
    "ensure",
    "image_exists",
    "register_images",
    "registered_images",
    "remove_untagged",
]

# Container images, built if they are missing.
#
# `tags` computes which images this version needs, `building` builds them, and `in_use` remembers which
# images are still needed.


def ensure(
    client: docker.DockerClient,
    progress: Progress,
    own: ImageAdditions | None = None,
    *,
    force: bool = False,
    cuda: bool = False,
    installed: threading.Event | None = None,
) -> Images:
    """Build missing images, and report each build to `progress`.

    `own`: code and packages that the run adds. `cuda`: whether to build the images for devices with a
    GPU, too. `force`: whether to build all images again, with the newest packages. `installed`: set when
    the Python packages of this host are installed; None if they are.

    Raises HostError, with the last lines of pip, mmdebstrap or the engine, if a build fails. Raises
    BadInputError, with pip's last lines, if the run's own requirements cannot be installed.
    """
    every = current_tags(FOLDER, AGENTS)
    register_images(every)  # with the CUDA images: another run may use them
    variants = ("", CUDA) if cuda else ("",)
    tags = {kind: tag for kind, tag in every.items() if cuda or not kind.endswith(CUDA)}
    if own is not None:
        added = {
            f"{kind}{variant}": tag
            for variant in variants
            for kind, tag in added_tags(own, tags[f"agent{variant}"]).items()
        }
        tags |= added
        register_images(added, own.name)
    if force or missing_kinds(client, tags):
        try:
            with build_lock(), scratch_folder() as scratch:
                todo = set(tags) if force else missing_kinds(client, tags)
                expected = BuildTime(todo)
                builder = Builder(client, tags, scratch, progress, expected, own, force, installed)
                builder.build(todo)
        except docker_engine.ERRORS as error:
            raise HostError(f"The Docker engine failed on an image: {error}") from error
    gpu = tags[agent_kind(tags, CUDA)] if cuda else ""
    return Images(tags[agent_kind(tags)], tags["broker"], tags["base"], gpu)


def are_built(client: docker.DockerClient) -> bool:
    """Whether the images of this version for devices without a GPU exist."""
    tags = current_tags(FOLDER, AGENTS)
    return not missing_kinds(
        client, {kind: tag for kind, tag in tags.items() if not kind.endswith(CUDA)}
    )


# List of the testbed's images on the engine, with their users, and removal of unused images.
#
# Building never removes an image, because another checkout, version or user may need it.

_OURS = re.compile(r"testbed-.*|.+/(testbed-[a-z-]+:[0-9a-f]{12})", re.DOTALL)
"""A registry's name may come first, as in the tags that a Swarm's nodes pull."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One tag of one of the testbed's images."""

    image: str
    size: int
    """Bytes, including layers shared with other images."""
    alone: int
    """Bytes of the layers that no other image shares."""
    user: str
    """`containers`, `this checkout`, or the path of the checkout, code or Dockerfile that the image was
    built for. Empty if the image is unused."""
    is_kept: bool
    """Whether `prune_images` always keeps the image, because a container uses it, or because it belongs
    to this checkout and version."""

    @property
    def row(self) -> dict[str, Any]:
        sizes = {"size MB": round(self.size / 1e6), "of it alone MB": round(self.alone / 1e6)}
        return {"image": self.image, **sizes, "used by": self.user or "nobody"}


def list_images(client: docker.DockerClient) -> list[StoredImage]:
    """Largest first. Raises HostError."""
    here = set(current_tags(FOLDER, AGENTS).values())
    with _as_host_error("list the images"):
        found = client.df()["Images"] or []
        in_containers = {str(one["ImageID"]) for one in client.api.containers(all=True)}
    return image_entries(found, here, registered_images(), in_containers)


def image_entries(
    found: Sequence[Mapping[str, Any]],
    here: Collection[str],
    registered: Mapping[str, str],
    in_containers: Collection[str],
) -> list[StoredImage]:
    """Select the testbed's images from the engine's list with disk usage.

    `here`: tags of this checkout. `registered`: tags in use -> path of their user. `in_containers`: ids
    of images that any container was started from.
    """
    ours = []
    for one in found:
        used = one["Id"] in in_containers
        size, shared = int(one["Size"]), max(0, int(one["SharedSize"]))  # -1: unknown
        for tag in one.get("RepoTags") or ():
            if (match := _OURS.fullmatch(tag)) is not None:
                plain = match[1] or tag
                user = "containers" if used else registered.get(plain, "")
                if plain in here and not used:
                    user = "this checkout"
                ours.append(StoredImage(tag, size, size - shared, user, used or plain in here))
    return sorted(ours, key=lambda one: (-one.size, one.image))


def prune_images(client: docker.DockerClient, *, everything: bool) -> tuple[list[StoredImage], int]:
    """Remove unused images, and unused layers that are more than an hour old.

    `everything`: whether to remove images of other checkouts, code and Dockerfiles, too. Images that a
    container uses are kept. Returns the removed images and the number of bytes freed. Raises HostError.
    """
    with _as_host_error("remove images"), build_lock():
        before = int(client.df()["LayersSize"])
        gone = remove_images(client, removable_images(list_images(client), everything=everything))
        remove_untagged(client, LABEL, until="1h")  # others may be building
        return gone, max(0, before - int(client.df()["LayersSize"]))


def remove_images(client: docker.DockerClient, chosen: Sequence[StoredImage]) -> list[StoredImage]:
    """Return the removed images. Images that a container has begun to use are kept. Raises one of
    `docker_engine.ERRORS`."""
    gone = []
    for one in chosen:
        with suppress(APIError):  # a container uses it by now
            client.images.remove(one.image)
            gone.append(one)
    return gone


def removable_images(found: Sequence[StoredImage], *, everything: bool) -> list[StoredImage]:
    return [one for one in found if not one.is_kept and (everything or not one.user)]


@contextmanager
def _as_host_error(what: str) -> Iterator[None]:
    try:
        yield
    except docker_engine.ERRORS as error:
        raise HostError(f"The Docker engine could not {what}: {error}") from error
