"""Manifest of a run: versions, host, images, seeds, and plan, from which the run can be reproduced."""

from __future__ import annotations

import functools
import platform
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from agents import events
from testbed import bundle
from testbed.host import cpus
from testbed.plan import Plan, PlannedDevice
from testbed.plan.agent_configs import RunSpec, importance
from testbed.plan.features import PARTS
from testbed.speed import device_benchmark

_PACKAGES = ("edge-fl-testbed", "torch", "numpy", "paho-mqtt", "safetensors", "docker", "flwr-datasets")


def describe(spec: RunSpec, labels: Mapping[str, list[int]]) -> dict[str, Any]:
    """Entries that are known before the start. `labels`: client -> number of samples of each class;
    clients without an entry are alike."""
    return {
        "format": events.FORMAT,
        "runtime": spec.plan.runtime,
        "rule": spec.topology.rule.name,
        "task": spec.topology.task.name,
        **({"perplexity": True} if spec.topology.task.build().has_perplexity else {}),
        "seed": spec.topology.seed,
        "dilation": spec.plan.dilation,
        "versions": versions(),
        "host": host(),
        "git_commit": git_commit(),
        "cpus": _cpus(spec.plan),
        **_segments(spec.plan),
        "devices": _devices(spec.plan, importance(spec), spec.samples, labels),
        **({"shares": list(spec.plan.cpu_notes)} if spec.plan.cpu_notes else {}),
        **_shaper(spec.plan),
        **_clock(spec.plan),
    }


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Entries that follow from the plan alone, before the data are partitioned."""
    return {**_segments(plan), "devices": _devices(plan, {}, {}, {})}


def _segments(plan: Plan) -> dict[str, Any]:
    return {"segments": list(plan.segments)} if plan.segments else {}


_SOURCES = attrgetter(
    *("group", "cpu", "gflops", "speed", "memory", "power", "host", "timing", "link", "path"),
    *(part.attribute for part in PARTS if part.attribute),
)
"""Attributes of a planned device from which its entry is made."""


def _devices(
    plan: Plan, weights: Mapping[str, float], samples: Mapping[str, int], labels: Mapping[str, list[int]]
) -> dict[str, dict[str, Any]]:
    """Devices that are alike share an entry (`analysis.alike_devices`)."""
    entries: dict[str, dict[str, Any]] = {}
    following, former, entry = "", None, {}
    for device in plan.devices:
        name = device.name
        own = samples.get(name, 0), weights.get(name, 0.0), labels.get(name, [])
        sources = _SOURCES(device), own
        if name == following and sources == former:
            entry["count"] = entry.get("count", 1) + 1
        else:
            entries[name] = entry = _entry(device, *own)
        stem, dash, number = name.rpartition("-")
        following = f"{stem}-{int(number) + 1}" if dash and number.isdecimal() else ""
        former = sources
    return entries


def _entry(device: PlannedDevice, samples: int, importance: float, labels: list[int]) -> dict[str, Any]:
    return {
        "group": device.group,
        "profile": device.profile,
        "cpu": device.cpu,
        "gflops": device.gflops,
        "speed": device.speed,
        "memory": device.memory,
        "power": device.power,
        **{part.attribute: entry for part in PARTS if (entry := part.entry(device)) is not None},
        **({"link": asdict(path)} if (path := device.end_to_end) is not None else {}),
        **({"host": device.host} if device.host is not None else {}),
        **({"shape": asdict(device.shape)} if device.shape is not None else {}),
        "samples": samples,
        "importance": importance,
        "labels": labels,
    }


def _cpus(plan: Plan) -> dict[str, Any] | None:
    """None if devices are simulated."""
    if plan.traits.simulated:
        return None
    return {
        "infrastructure": plan.infrastructure_cpus,
        "devices": plan.device_cpus,
        **({"evaluation": plan.evaluation_cpus} if plan.evaluation_cpus else {}),
        "device_capacity": plan.device_capacity,
        "asked": sum(device.host_cpu for device in plan.emulated_devices),
    }


def _shaper(plan: Plan) -> dict[str, str | None]:
    if plan.shaper is not None:
        return {"shaper": plan.shaper.name, "shaper_why": plan.shaper.why}
    linked = plan.traits.simulated and not all(device.is_direct for device in plan.devices)
    return {"shaper": plan.traits.shaper if linked else None}


def _clock(plan: Plan) -> dict[str, float]:
    """Unix time in seconds at which the host's monotonic clock was 0; empty if devices are simulated.

    The telemetry of the current leg has times of the monotonic clock.
    """
    return {} if plan.traits.simulated else {"monotonic_zero": time.time() - time.monotonic()}


@functools.cache  # a sweep describes thousands of runs, all with the same loaded code
def versions() -> dict[str, str]:
    """Versions on which results depend, and the processor."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "blas": cpus.blas(),
        "processor": device_benchmark.processor(),
    }


def other_versions(theirs: Mapping[str, str], names: Collection[str]) -> list[str]:
    """`torch 2.13.0 (here 2.14.0)` for example. `theirs`: result of `versions` elsewhere, or an earlier
    one, which may lack some."""
    here = versions()
    return [
        f"{name} {theirs[name]} (here {here[name]})"
        for name in names
        if name in theirs and here[name] != theirs[name]
    ]


def host() -> dict[str, Any]:
    return {
        "name": platform.node(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory": psutil.virtual_memory().total,
    }


@functools.cache
def git_commit() -> str | None:
    """With `+` if files differ from the commit; None if it is unknown."""
    if bundle.COMMIT.is_file():  # a wheel
        return bundle.COMMIT.read_text(encoding="ascii").strip()
    try:
        # This file may be an untracked file in another project's checkout.
        _git("ls-files", "--error-unmatch", __file__)
        commit = _git("rev-parse", "HEAD").strip()
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
