"""Root file system with a few Debian packages, made without a container registry."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from testbed.errors import HostError
from testbed.host.subprocesses import run

SUITE = "bookworm"
IMAGE = f"debian:{SUITE}-slim"
"""Tag of Debian's official image, which is used if a registry answers."""

OPTIONS = (
    # No apt: nothing is installed into the image later.
    "--variant=essential",
    "--quiet",
    "--dpkgopt=force-unsafe-io",
    '--aptopt=Acquire::Languages "none"',
    *(f"--dpkgopt=path-exclude=/usr/share/{kind}/*" for kind in ("doc", "info", "locale", "man")),
)


def bootstrap(packages: Sequence[str], architecture: str, scratch: Path, stop: threading.Event) -> Path:
    """Make the tar archive of Debian's essential packages and `packages`; return its path.

    `architecture`: name of the architecture in Debian and Docker. Root is not needed, because mmdebstrap
    uses a user namespace. mmdebstrap chooses the folder for its temporary files itself, because the
    users of that namespace must be able to reach the folder. Raises HostError if the archive cannot be
    made.
    """
    if shutil.which("mmdebstrap") is None:
        raise HostError(
            f"No registry with {IMAGE} answers, and mmdebstrap, which makes the base image from "
            "Debian's packages, is not installed: run 'sudo apt-get install mmdebstrap uidmap', or give "
            "the Docker engine access to a registry."
        )
    archive = scratch / "base.tar"
    command = ["mmdebstrap", *OPTIONS, f"--architectures={architecture}"]
    with archive.open("wb") as output:
        include = f"--include={','.join(packages)}"
        run([*command, include, SUITE, "-"], stop=stop, output=output)
    return archive
