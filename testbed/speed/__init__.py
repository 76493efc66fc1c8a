"""Speeds of this host and of other machines in the kinds of work of a training, by calibration of one
core."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime

from testbed.errors import BadInputError
from testbed.host import cache
from testbed.host.nodes import Node
from testbed.speed import device_benchmark
from testbed.topology.fields import Count, Model, NotNegative, Positive
from testbed.topology.profiles import DeviceProfile, TrainingSpeeds

KINDS = ("convolution", "depthwise", "matrix", "memory")
"""A device or host has a separate speed for each."""


class Work(Model):
    convolution: NotNegative
    """Gflop of convolutions that are not depthwise."""
    depthwise: NotNegative
    """Gflop of grouped convolutions, which are mainly depthwise."""
    matrix: NotNegative
    """Gflop."""
    memory: NotNegative
    """GB that all other operations read and write."""


# Training consists of a few kinds of work. A small piece of each kind is timed here. The speeds of a
# profile are fitted to published training times (`python -m benchmarks.profiles`). A profile without
# such speeds has gflops of High-Performance Linpack, which spends its time in products of
# double-precision matrices. Therefore such products are timed here, too.
#
# Differences of some per cent remain. Linpack spends some time outside of its products. A host's core
# may be slower while all cores are busy.

_STEADY_SHARE = 0.8
"""Lowest ratio of the median speed to the highest. A lower ratio means that other work disturbed most
products."""


class CalibratedHost(Model):
    """A calibration is valid for one host only."""

    cpu: str
    cores: Count
    """Logical cores."""
    torch: str
    """Another version of PyTorch has another matrix library."""


class _CoreSpeeds(Model):
    low: Positive
    """Slowest matrix product, Gflop/s (FP64)."""
    median: Positive
    """Gflop/s (FP64)."""
    high: Positive
    """Fastest matrix product, Gflop/s (FP64)."""
    products: Count
    """Number of matrix products that were timed."""
    training: TrainingSpeeds
    """Median speeds: in GB/s for memory, and otherwise in Gflop/s (FP32)."""
    measured: AwareDatetime


class HostSpeed(CalibratedHost, _CoreSpeeds):
    """One core of this host, for programs."""

    gflops: Positive
    """Speed that device profiles are compared with, Gflop/s (FP64)."""
    steady: bool
    """Whether most products were about as fast as the fastest product."""


class Calibration(_CoreSpeeds):
    """One core of `host`, with one thread."""

    host: CalibratedHost

    @property
    def gflops(self) -> float:
        """Median speed of one core.

        A core reaches the highest speed only while its clock is faster than usual, which does not last
        as long as the work of a device. In eight calibrations on one host, the medians differed by at
        most 0.6 %, and the highest speeds by 10 %.
        """
        return self.median

    @property
    def is_steady(self) -> bool:
        """Whether most products were about as fast as the fastest."""
        return self.median >= _STEADY_SHARE * self.high

    def scaled(self, factor: float) -> Calibration:
        speeds = {kind: getattr(self.training, kind) * factor for kind in KINDS}
        found = {name: getattr(self, name) * factor for name in ("low", "median", "high")}
        return self.model_copy(update={**found, "training": TrainingSpeeds(**speeds)})

    def flat(self) -> HostSpeed:
        """On one level, for programs."""
        values = {**vars(self), **vars(self.host), "gflops": self.gflops, "steady": self.is_steady}
        return HostSpeed(**{name: values[name] for name in HostSpeed.model_fields})

    def summary(self) -> str:
        """A few lines for people."""
        lines = [
            f"One core of this host: {self.gflops:.1f} Gflop/s in double precision",
            f"    {self.products} products: lowest {self.low:.1f}, median {self.median:.1f}, "
            f"highest {self.high:.1f}",
            f"    in training: convolutions {self.training.convolution:.1f} Gflop/s, depthwise "
            f"{self.training.depthwise:.1f},",
            f"    matrix products {self.training.matrix:.1f}, memory {self.training.memory:.1f} GB/s",
            f"    {self.host.cpu}, {self.host.cores} cores, torch {self.host.torch}",
            f"    measured on {self.measured:%Y-%m-%d %H:%M %Z}",
        ]
        if not self.is_steady:
            lines.append("The speed varied: other programs ran, or the clock changed. Measure again.")
        return "\n".join(lines)


class _NodeCalibration(Model):
    node: str
    image: str
    """Tag. The speed depends on the libraries in the image."""
    calibration: Calibration


class _Cache(Model):
    format: Literal[2] = 2

    calibrations: tuple[Calibration, ...] = ()
    """One per host. There may be several, because hosts may share a home directory."""
    nodes: tuple[_NodeCalibration, ...] = ()


def calibrate(*, refresh: bool = False, seconds: float = 2.0) -> Calibration:
    """Look in the cache unless `refresh` is true.

    `seconds` is the duration of the matrix products. The result is stored in the cache for this host and
    this version of PyTorch, unless the cache's folder is not writable.
    """
    kept, host = _read(), calibrated_host()
    for calibration in kept.calibrations if not refresh else ():
        if calibration.host == host:
            return calibration
    new = measure(seconds)
    others = tuple(calibration for calibration in kept.calibrations if calibration.host != host)
    _keep(kept.model_copy(update={"calibrations": (*others, new)}))
    return new


def cached_for_nodes(nodes: Iterable[Node], image: str) -> dict[str, Calibration]:
    """Return node id -> calibration that was measured with `image`."""
    cores = {node.id: node.cores for node in nodes}
    return {
        one.node: one.calibration
        for one in _read().nodes
        if one.image == image and one.calibration.host.cores == cores.get(one.node)
    }


def cache_for_nodes(found: Mapping[str, Calibration], image: str) -> None:
    """`found`: by node id, all measured with `image`."""
    kept = _read()
    others = (one for one in kept.nodes if one.node not in found)
    new = (_NodeCalibration(node=node, image=image, calibration=one) for node, one in found.items())
    _keep(kept.model_copy(update={"nodes": (*others, *new)}))


def measure(seconds: float = 2.0) -> Calibration:
    """Measure one core with one thread. This takes about twice `seconds`."""
    return from_core(device_benchmark.core(seconds), calibrated_host())


def from_core(found: Mapping[str, Any], host: CalibratedHost) -> Calibration:
    """`found`: result of `device_benchmark.core` on a core of `host`."""
    speeds = found["gflops"]
    return Calibration(
        host=host,
        low=min(speeds),
        median=statistics.median(speeds),
        high=max(speeds),
        products=len(speeds),
        training=TrainingSpeeds(**found["training"]),
        measured=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
    )


def cpu_share(
    name: str, profile: DeviceProfile, calibration: Calibration, work: Work | None = None
) -> float:
    """Cores of this host that are together as fast as the whole device of the profile `name`.

    Speeds are compared for training steps of this `work`. If `work` is None (unknown), or the profile
    has no training speeds, speeds of double-precision matrix products are compared. Raises BadInputError
    if the profile has no speed.
    """
    if profile.training is not None and work is not None:
        speeds = profile.training
        if speeds.matrix is None and profile.gflops is not None:
            matrix = _matrix(calibration.training) * profile.gflops / calibration.gflops
            speeds = speeds.model_copy(update={"matrix": matrix})
        return sum(work_seconds(work, calibration.training).values()) / sum(
            work_seconds(work, speeds).values()
        )
    if profile.gflops is None:
        raise BadInputError(
            f"the profile {name} has no gflops, so that the equally fast CPU share is unknown: give "
            "cpu, such as cpu: 0.25, or the profile's gflops in a profiles.yaml"
        )
    return profile.gflops / calibration.gflops


def work_seconds(work: Work, speeds: TrainingSpeeds) -> dict[str, float]:
    own = {**speeds.model_dump(), "matrix": _matrix(speeds)}
    return {kind: getattr(work, kind) / own[kind] for kind in KINDS}


def _matrix(speeds: TrainingSpeeds) -> float:
    if speeds.matrix is None:
        raise ValueError("these speeds have no matrix")
    return speeds.matrix


def calibrated_host() -> CalibratedHost:
    return CalibratedHost(
        cpu=device_benchmark.processor(),
        cores=os.cpu_count() or 1,
        torch=importlib.metadata.version("torch"),
    )


def _path() -> Path:
    return cache.folder() / "calibration.json"


def _keep(all_of_it: _Cache) -> None:
    cache.keep(_path(), all_of_it.model_dump_json(indent=2) + "\n")


def _read() -> _Cache:
    """Return an empty cache if the file is missing, damaged, or of another version."""
    try:
        # Not strict: JSON has neither tuples nor dates.
        return _Cache.model_validate_json(_path().read_bytes(), strict=False)
    except (OSError, ValueError):
        return _Cache()
