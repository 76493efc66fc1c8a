"""Root file system with a few Debian packages, made without a container registry."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from testbed.errors import HostError
from testbed.host.subprocesses import run

SUITE = "bookworm"
IMAGE = f"debian:{SUITE}-slim"
"""Debian's official image, which is used if a registry answers."""

OPTIONS = (
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


def bootstrap(packages: Sequence[str], architecture: str, scratch: Path, stop: threading.Event) -> Path:
    """Return a tar archive of Debian's essential packages and `packages`.

    `architecture`: name of the architecture in Debian and Docker. Root is not needed, because mmdebstrap
    uses a user namespace, whose users must be able to reach the folder for its temporary files. Raises
    HostError if the archive cannot be made.
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
