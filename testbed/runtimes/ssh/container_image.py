"""Image of the containers on real devices: that of the agents, with packages of the user's own code.
Sent to devices that lack it."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.errors import HostError
from testbed.host import cache, docker_engine

if TYPE_CHECKING:
    from testbed.topology import Topology


def tag(topology: Topology) -> str:
    """Return the tag of the image, without asking an engine."""
    from testbed.images import tags
    from testbed.images.device_images import additions

    agent, own = tags.current_tags(tags.FOLDER, tags.AGENTS)["agent"], additions(topology)
    if own is None or not own.requirements:
        return agent
    return tags.added_tags(own, agent)["requirements"]


def problem(image: str, engine: str, machine: str) -> str | None:
    """Why this host cannot send `image` to a device whose `engine` lacks it; None if it can. `machine`:
    of the device, as `uname -m` prints it."""
    mend = (
        "run `testbed images build` of this version of the testbed there, or remove container from the "
        "topology, so that a virtual environment is made"
    )
    if machine != os.uname().machine:
        return (
            f"its {engine} lacks {image}, which this host can only build for {os.uname().machine}, not "
            f"for {machine}: {mend}"
        )
    with docker_engine.connect_if_present() as here:
        if here is not None:
            return None
    return (
        f"its {engine} lacks {image}, and no Docker engine answers on this host to build it: start one, "
        f"or {mend}"
    )


@contextmanager
def archive(topology: Topology, progress: Callable[[str], None]) -> Iterator[Path]:
    """Compressed archive of the image, built if missing, in a context that removes the file. Raises
    HostError."""
    from testbed import images
    from testbed.images.device_images import additions

    image = tag(topology)
    with (
        closing(docker_engine.connect()) as engine,
        tempfile.NamedTemporaryFile(dir=cache.folder()) as file,
    ):
        images.ensure(engine, progress, additions(topology))
        progress(f"Packing {image} for real devices")
        try:
            with gzip.open(file, "wb", compresslevel=1) as packed:
                for chunk in engine.images.get(image).save(named=True):
                    packed.write(chunk)
        except docker_engine.ERRORS as error:
            raise HostError(f"The Docker engine cannot save {image}: {error}") from error
        file.flush()
        yield Path(file.name)
