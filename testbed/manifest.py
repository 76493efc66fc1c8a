"""What a run was made with: versions, host, images, seeds, the plan. Written once, read for ever."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from agents import events
from testbed.configs import RunSpec, importance

_PACKAGES = ("edge-fl-testbed", "torch", "numpy", "paho-mqtt", "safetensors", "docker", "flwr-datasets")


def describe(spec: RunSpec, labels: dict[str, list[int]]) -> dict[str, Any]:
    """The manifest's entries that are known before the start; `labels` counts each client's classes."""
    weights = importance(spec.topology, spec.samples)
    return {
        "format": events.FORMAT,
        "runtime": spec.plan.runtime,
        "rule": spec.topology.rule.name,
        "task": spec.topology.task.name,
        "seed": spec.topology.seed,
        "dilation": 1,
        "versions": versions(),
        "host": host(),
        "git_commit": git_commit(),
        "cpus": {
            "infrastructure": spec.plan.infrastructure_cpus,
            "devices": spec.plan.device_cpus,
            "device_capacity": spec.plan.device_capacity,
            "asked": sum(device.cpu for device in spec.plan.devices),
        },
        "devices": {
            device.name: {
                "group": device.group,
                "profile": device.profile,
                "cpu": device.cpu,
                "memory": device.memory,
                "samples": spec.samples[device.name],
                "importance": weights[device.name],
                "labels": labels[device.name],
            }
            for device in spec.plan.devices
        },
        "shaper": "tbf" if any(device.link for device in spec.plan.devices) else None,
    }


def controller() -> dict[str, Any]:
    """This process, so that `testbed down` can ask it to end its run."""
    return {"pid": os.getpid(), "started": psutil.Process().create_time()}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def host() -> dict[str, Any]:
    return {
        "name": platform.node(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory": psutil.virtual_memory().total,
    }


def git_commit() -> str | None:
    """The commit that the product runs from; `+` where files differ from it; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changes.returncode else "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
