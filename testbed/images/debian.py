"""A root file system with a few Debian packages, made without a registry."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from testbed.errors import HostError
from testbed.host.subprocesses import run

SUITE = "bookworm"
IMAGE = f"debian:{SUITE}-slim"
"""The official image, for where a registry answers."""

OPTIONS = (
    # Essential packages and ours, no apt: nothing is installed into it later.
    "--variant=essential",
    "--quiet",
    "--dpkgopt=force-unsafe-io",
    '--aptopt=Acquire::Languages "none"',
    *(f"--dpkgopt=path-exclude=/usr/share/{kind}/*" for kind in ("doc", "info", "locale", "man")),
)


def bootstrap(packages: Sequence[str], architecture: str, scratch: Path, stop: threading.Event) -> Path:
    """The tar archive of Debian with `packages`, for `architecture` as Debian and Docker name it.

    Needs no root: mmdebstrap falls back to a user namespace. Its temporary files stay in its own place,
    as that namespace's users must reach them. Raises HostError where it cannot be made.
    """
    if shutil.which("mmdebstrap") is None:
        raise HostError(
            f"No registry answers that has {IMAGE}, and there is no mmdebstrap to make the base image "
            "from Debian's packages: run 'sudo apt-get install mmdebstrap uidmap', or give the Docker "
            "engine a registry."
        )
    archive = scratch / "base.tar"
    command = ["mmdebstrap", *OPTIONS, f"--architectures={architecture}"]
    with archive.open("wb") as output:
        include = f"--include={','.join(packages)}"
        run([*command, include, SUITE, "-"], stop=stop, output=output)
    return archive
