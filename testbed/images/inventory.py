"""List of the testbed's images on the engine, with their users, and removal of unused images.

Building never removes an image, because another checkout, version or user may need it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import APIError

from testbed import images
from testbed.errors import HostError
from testbed.host import docker_engine

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
    """Whether `prune` always keeps the image, because a container uses it, or because it belongs to this
    checkout and version."""

    @property
    def row(self) -> dict[str, Any]:
        sizes = {"size MB": round(self.size / 1e6), "of it alone MB": round(self.alone / 1e6)}
        return {"image": self.image, **sizes, "used by": self.user or "nobody"}


def list_images(client: docker.DockerClient) -> list[StoredImage]:
    """Largest first. Raises HostError."""
    here = set(images.current_tags(images.FOLDER, images.AGENTS).values())
    with _as_host_error("list the images"):
        found = client.df()["Images"] or []
        in_containers = {str(one["ImageID"]) for one in client.api.containers(all=True)}
    return image_entries(found, here, images.registered_images(), in_containers)


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


def prune(client: docker.DockerClient, *, everything: bool) -> tuple[list[StoredImage], int]:
    """Remove unused images, and unused layers that are more than an hour old.

    `everything`: whether to remove images of other checkouts, code and Dockerfiles, too. Images that a
    container uses are kept. Returns the removed images and the number of bytes freed. Raises HostError.
    """
    with _as_host_error("remove images"), images.build_lock():
        before = int(client.df()["LayersSize"])
        gone = remove_images(client, removable_images(list_images(client), everything=everything))
        images.remove_untagged(client, images.LABEL, until="1h")  # others may be building
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
