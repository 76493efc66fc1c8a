"""The container in which init and client of a real device run, if its group has `container`.

It has the device's own network, because the network is what is measured, and no capabilities. Of the
machine's files, it sees the device's folder, and can change only the client's. It needs only Python 3.9.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from agents.remote.program import CONTAINER, DISK, LABEL

INIT = ("-m", "agents.device.main", "init.json")
"""Run the init in the device's folder."""
_FOLDER = "/device"


def command(engine: str, image: str, folder: Path, user: list[str]) -> list[str]:
    """`engine`: `docker` or `podman`. `folder`: of the device. `user`: as in `user_options`."""
    return [
        *(engine, "run", "--rm", "--interactive", "--pull=never", "--log-driver=none"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--tmpfs=/tmp"),
        *("--network=host", f"--label={LABEL}={folder}", f"--cidfile={folder / CONTAINER}"),
        *user,
        # Z is for SELinux: only this container may use the folder.
        *(f"--volume={folder}:{_FOLDER}:ro,Z", f"--volume={folder / DISK}:{_FOLDER}/{DISK}:Z"),
        # The image has the agents, compiled; those in the folder are for the keeper.
        *(f"--workdir={_FOLDER}", "--env=PYTHONSAFEPATH=1", "--env=HOME=/tmp"),
        *(image, "python3", *INIT),
    ]


def user_options(engine: str) -> list[str]:
    """Return the options with which files belong to this user, who owns the folder."""
    user = f"--user={os.getuid()}:{os.getgid()}"
    if engine == "podman":
        return [user] if os.getuid() == 0 else ["--userns=keep-id", user]
    asked = subprocess.run(
        [engine, "info", "--format", "{{.SecurityOptions}}"], stdout=subprocess.PIPE, check=False
    )
    return ["--user=0:0"] if b"rootless" in asked.stdout else [user]
