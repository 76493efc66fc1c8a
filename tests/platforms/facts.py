"""Facts about a platform, read from the machine itself. `python -m tests.platforms.facts` prints them as
JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.host import docker_engine, kernel
from tests.platforms.machine import Completed, Machine

_TIMEOUT_SECONDS = 60.0
_NO_ENGINE = {"engine": "none", "cgroup": "—", "driver": "—"}
_CONTAINERD_STORE = "io.containerd.snapshotter.v1"
"""Storage driver type in `docker info` if containerd keeps the images."""


def of(machine: Machine) -> dict[str, str]:
    """Read the facts of `machine`. Raises RuntimeError with the output if its Python fails."""
    done: Completed = machine.run("python -m tests.platforms.facts", timeout=_TIMEOUT_SECONDS)
    if done.exit_code:
        raise RuntimeError(f"the facts cannot be read (exit code {done.exit_code}):\n{done.output}")
    facts: dict[str, str] = json.loads(done.output.splitlines()[-1])
    return facts


def here() -> dict[str, str]:
    """The facts of the machine that this process runs on."""
    netem, _ = kernel.supports(kernel.NETEM)
    with docker_engine.connect_if_present() as client:
        engine = _NO_ENGINE if client is None else _engine(client.version(), client.info())
    return {
        **engine,
        "kernel": platform.release(),
        "netem": {True: "yes", False: "no", None: "unknown"}[netem],
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "cores": str(os.cpu_count()),
    }


def _engine(version: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, str]:
    components = {each["Name"]: each["Version"] for each in version.get("Components") or ()}
    name = "Podman" if "Podman Engine" in components else "Docker"
    runtime = f", runc {components['runc']}" if "runc" in components else ""
    status = dict(info.get("DriverStatus") or ())
    store = ", containerd image store" if status.get("driver-type") == _CONTAINERD_STORE else ""
    return {
        "engine": f"{name} {version['Version']}{runtime}{store}",
        "cgroup": f"v{info.get('CgroupVersion', '1')}{_hybrid()}",
        "driver": str(info["CgroupDriver"]),
    }


def _hybrid() -> str:
    """A remark if this host mounts cgroup v2 beside v1."""
    kinds = {line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    return " (hybrid)" if {"cgroup", "cgroup2"} <= kinds else ""


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(here())}\n")
