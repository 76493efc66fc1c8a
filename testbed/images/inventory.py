"""What images of ours the engine has, who uses them, and the removal of those that nobody does.

Building an image removes none: another checkout, version or user may work with it.
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
"""Tags of ours, and, after a registry's name, those that a Swarm's nodes pull."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An image of ours, by one of its tags."""

    image: str
    """Tag."""
    size: int
    """Bytes, with what it shares with other images."""
    alone: int
    """Bytes that it shares with none."""
    user: str
    """`containers`, or the path of the checkout, code or Dockerfile that it was built for; empty: nobody
    uses it."""
    kept: bool
    """Whether no pruning removes it: a container uses it, or it is of this checkout and version."""

    @property
    def row(self) -> dict[str, Any]:
        """For a table."""
        sizes = {"size MB": round(self.size / 1e6), "of it alone MB": round(self.alone / 1e6)}
        return {"image": self.image, **sizes, "used by": self.user or "nobody"}


def listed(client: docker.DockerClient) -> list[Listed]:
    """All of ours, the largest first. Raises HostError."""
    here = set(images.current_tags(images.FOLDER, images.AGENTS).values())
    with _as_host_error("list the images"):
        found = client.df()["Images"] or []
        in_containers = {str(one["ImageID"]) for one in client.api.containers(all=True)}
    return entries(found, here, images.registered(), in_containers)


def entries(
    found: Sequence[Mapping[str, Any]],
    here: Collection[str],
    registered: Mapping[str, str],
    in_containers: Collection[str],
) -> list[Listed]:
    """Those of ours among `found`, as the engine lists them with their use of the disk. `here` are the
    tags of this checkout, `registered` those that are in use, with whose, `in_containers` the ids of the
    images that containers of anyone were started from."""
    ours = []
    for one in found:
        used = one["Id"] in in_containers
        size, shared = int(one["Size"]), max(0, int(one["SharedSize"]))  # -1: not known
        for tag in one.get("RepoTags") or ():
            if (match := _OURS.fullmatch(tag)) is not None:
                plain = match[1] or tag
                user = "containers" if used else registered.get(plain, "")
                if plain in here and not used:
                    user = "this checkout"
                ours.append(Listed(tag, size, size - shared, user, used or plain in here))
    return sorted(ours, key=lambda one: (-one.size, one.image))


def prune(client: docker.DockerClient, *, everything: bool) -> tuple[list[Listed], int]:
    """Remove the images of ours that nobody uses, with `everything` also those of other checkouts, own
    code and Dockerfiles, and what builds left over an hour ago. What a container uses stays. Returns
    what went, and how many bytes that has freed. Raises HostError."""
    with _as_host_error("remove images"), images.one_at_a_time():
        before = int(client.df()["LayersSize"])
        gone = removed(client, removable(listed(client), everything=everything))
        images.remove_untagged(client, images.LABEL, until="1h")  # others may be building
        return gone, max(0, before - int(client.df()["LayersSize"]))


def removed(client: docker.DockerClient, chosen: Sequence[Listed]) -> list[Listed]:
    """Remove the `chosen` ones; return those that went. Raises ERRORS."""
    gone = []
    for one in chosen:
        with suppress(APIError):  # a container has come to use it
            client.images.remove(one.image)
            gone.append(one)
    return gone


def removable(found: Sequence[Listed], *, everything: bool) -> list[Listed]:
    """Those that `prune` removes."""
    return [one for one in found if not one.kept and (everything or not one.user)]


@contextmanager
def _as_host_error(what: str) -> Iterator[None]:
    try:
        yield
    except docker_engine.ERRORS as error:
        raise HostError(f"The Docker engine could not {what}: {error}") from error
