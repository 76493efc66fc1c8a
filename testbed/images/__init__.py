"""Container images, built if they are missing.

`tags` computes which images this version needs, `building` builds them, and `in_use` remembers which
images are still needed.
"""

from __future__ import annotations

import threading

import docker

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.images.build_time import BuildTime
from testbed.images.building import (
    Builder,
    Progress,
    build_lock,
    engine_build,
    image_exists,
    missing_kinds,
    remove_untagged,
    scratch_folder,
)
from testbed.images.in_use import register_images, registered_images
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
