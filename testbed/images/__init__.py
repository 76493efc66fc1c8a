"""The container images, built where they are missing: `tags` says which there are and when one is up to
date, `building` makes them, `in_use` keeps which ones are needed."""

from __future__ import annotations

import docker

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.images.build_time import BuildTime
from testbed.images.building import (
    Builder,
    Progress,
    engine_build,
    exists,
    missing,
    one_at_a_time,
    remove_untagged,
    scratch_folder,
)
from testbed.images.in_use import register, registered
from testbed.images.tags import (
    AGENTS,
    CUDA,
    FOLDER,
    LABEL,
    Images,
    Own,
    Tags,
    current_tags,
    of_agents,
    own_tags,
)

__all__ = [
    "AGENTS",
    "FOLDER",
    "LABEL",
    "Images",
    "Own",
    "Progress",
    "Tags",
    "are_built",
    "current_tags",
    "engine_build",
    "ensure",
    "exists",
    "one_at_a_time",
    "register",
    "registered",
    "remove_untagged",
]


def ensure(
    client: docker.DockerClient,
    progress: Progress,
    own: Own | None = None,
    *,
    force: bool = False,
    cuda: bool = False,
) -> Images:
    """The images for this version of the code, with `cuda` also those for devices with a GPU, and for
    what a run adds to it; builds what is missing, or with `force` all of them with the newest packages,
    and reports each to `progress`.

    Raises HostError with the last lines of pip, mmdebstrap or the engine where one fails; BadInputError
    with those of pip where own requirements cannot be installed.
    """
    every = current_tags(FOLDER, AGENTS)
    register(every)  # those with CUDA too: another run's
    variants = ("", CUDA) if cuda else ("",)
    tags = {kind: tag for kind, tag in every.items() if cuda or not kind.endswith(CUDA)}
    if own is not None:
        added = {
            f"{kind}{variant}": tag
            for variant in variants
            for kind, tag in own_tags(own, tags[f"agent{variant}"]).items()
        }
        tags |= added
        register(added, own.name)
    if force or missing(client, tags):
        try:
            with one_at_a_time(), scratch_folder() as scratch:
                todo = set(tags) if force else missing(client, tags)
                expected = BuildTime(todo)
                Builder(client, tags, scratch, progress, expected, own, force=force).build(todo)
        except docker_engine.ERRORS as error:
            raise HostError(f"The Docker engine failed on an image: {error}") from error
    gpu = tags[of_agents(tags, CUDA)] if cuda else ""
    return Images(tags[of_agents(tags)], tags["broker"], tags["base"], gpu)


def are_built(client: docker.DockerClient) -> bool:
    """Whether the images for this version of the code are there, for devices without a GPU."""
    tags = current_tags(FOLDER, AGENTS)
    return not missing(client, {kind: tag for kind, tag in tags.items() if not kind.endswith(CUDA)})
