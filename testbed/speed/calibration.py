"""Calibration: the speeds of a core of this host, which turn a device profile's into a CPU share.

Of each kind of work that training consists of, a small piece is timed here; a profile's speeds are
fitted to published training times (`python -m benchmarks.profiles`). A profile without these has gflops,
of High-Performance Linpack, which spends its time in products of double-precision matrices; so these are
measured too. Differences of some per cent remain: Linpack loses a little around its products, and a
host's core may be slower when all are busy.
"""

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
from testbed.speed.kinds import KINDS, Work
from testbed.topology.fields import Count, Model, Positive
from testbed.topology.profiles import DeviceProfile, TrainingSpeeds

_STEADY_SHARE = 0.8
"""Of the highest speed: where the median is below it, other work disturbed most products."""


class Host(Model):
    """The host that a calibration is valid for."""

    cpu: str
    """Model of the processor."""
    cores: Count
    torch: str
    """Version: another one brings another matrix library."""


class Calibration(Model):
    """Gflop/s (FP64) of one core of `host`, on one thread."""

    host: Host
    low: Positive
    median: Positive
    high: Positive
    products: Count
    """How many were timed."""
    training: TrainingSpeeds
    """Speeds of the core in each kind of work, medians too."""
    measured: AwareDatetime

    @property
    def gflops(self) -> float:
        """Of one core: the median.

        The highest comes from moments of a faster clock, and a device works for longer. Of eight
        calibrations on one host, the medians lay within 0.6 % and the highest within 10 %.
        """
        return self.median

    @property
    def is_steady(self) -> bool:
        """Whether most products were about as fast as the fastest."""
        return self.median >= _STEADY_SHARE * self.high

    def scaled(self, factor: float) -> Calibration:
        """Of a core that is `factor` times as fast, in every kind of work."""
        speeds = {kind: getattr(self.training, kind) * factor for kind in KINDS}
        found = {name: getattr(self, name) * factor for name in ("low", "median", "high")}
        return self.model_copy(update={**found, "training": TrainingSpeeds(**speeds)})

    def as_dict(self) -> dict[str, Any]:
        """In one level, for programs."""
        values = self.model_dump(mode="json", exclude={"training": {"error"}})
        return {"gflops": self.gflops, **values.pop("host"), **values, "steady": self.is_steady}

    def summary(self) -> str:
        """In a few lines, for people."""
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
            lines.append(
                "The speed varied: other work, or a clock that changes, got in the way. Measure again."
            )
        return "\n".join(lines)


class _OfNode(Model):
    """Of another machine of a Swarm."""

    node: str
    """Its id."""
    image: str
    """What it was measured with: the tag of the libraries' image."""
    calibration: Calibration


class _Cache(Model):
    format: Literal[2] = 2
    calibrations: tuple[Calibration, ...] = ()
    """One for each host: a home directory may be shared by many."""
    nodes: tuple[_OfNode, ...] = ()


def calibrate(*, refresh: bool = False, seconds: float = 2.0) -> Calibration:
    """This host's calibration: from the cache, else (or with `refresh`) measured for `seconds`.

    It is kept for this host and this torch, unless the folder of the cache cannot be written.
    """
    kept, host = _read(), this_host()
    for calibration in kept.calibrations if not refresh else ():
        if calibration.host == host:
            return calibration
    new = measure(seconds)
    others = tuple(calibration for calibration in kept.calibrations if calibration.host != host)
    _keep(kept.model_copy(update={"calibrations": (*others, new)}))
    return new


def kept_of_nodes(nodes: Iterable[Node], image: str) -> dict[str, Calibration]:
    """The calibrations of other machines that were measured with `image`, by the node's id."""
    cores = {node.id: node.cores for node in nodes}
    return {
        one.node: one.calibration
        for one in _read().nodes
        if one.image == image and one.calibration.host.cores == cores.get(one.node)
    }


def keep_of_nodes(found: Mapping[str, Calibration], image: str) -> None:
    """Keep the calibrations of other machines, by the node's id, for later plans."""
    kept = _read()
    others = (one for one in kept.nodes if one.node not in found)
    new = (_OfNode(node=node, image=image, calibration=one) for node, one in found.items())
    _keep(kept.model_copy(update={"nodes": (*others, *new)}))


def measure(seconds: float = 2.0) -> Calibration:
    """Measure one core of this host on one thread, for about twice as many `seconds`."""
    return of_core(device_benchmark.core(seconds), this_host())


def of_core(found: Mapping[str, Any], host: Host) -> Calibration:
    """Of what `device_benchmark.core` has found on a core of `host`."""
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


def share(
    name: str, profile: DeviceProfile, calibration: Calibration, work: Work | None = None
) -> float:
    """Cores of this host that are as fast as the whole device of the profile called `name`, in steps of
    this `work`; by double-precision products where that or the profile's training is not known.

    Raises BadInputError where the profile has no speed.
    """
    if profile.training is not None and work is not None:
        speeds = profile.training
        if speeds.matrix is None and profile.gflops is not None:
            matrix = _matrix(calibration.training) * profile.gflops / calibration.gflops
            speeds = speeds.model_copy(update={"matrix": matrix})
        return sum(seconds(work, calibration.training).values()) / sum(seconds(work, speeds).values())
    if profile.gflops is None:
        raise BadInputError(
            f"the profile {name} has no gflops, so what share of a core here is as fast is not known: "
            "give cpu, such as cpu: 0.25, or the profile's gflops in a profiles.yaml"
        )
    return profile.gflops / calibration.gflops


def seconds(work: Work, speeds: TrainingSpeeds) -> dict[str, float]:
    """How long each kind of `work` takes at these speeds."""
    own = {**speeds.model_dump(), "matrix": _matrix(speeds)}
    return {kind: getattr(work, kind) / own[kind] for kind in KINDS}


def _matrix(speeds: TrainingSpeeds) -> float:
    if speeds.matrix is None:
        raise ValueError("these speeds have no matrix")
    return speeds.matrix


def this_host() -> Host:
    return Host(
        cpu=device_benchmark.processor(),
        cores=os.cpu_count() or 1,
        torch=importlib.metadata.version("torch"),
    )


def _path() -> Path:
    return cache.folder() / "calibration.json"


def _keep(all_of_it: _Cache) -> None:
    cache.keep(_path(), all_of_it.model_dump_json(indent=2) + "\n")


def _read() -> _Cache:
    """From the cache; nothing where the file is damaged, or another program's or version's."""
    try:
        # Not strict, as JSON has neither tuples nor dates.
        return _Cache.model_validate_json(_path().read_bytes(), strict=False)
    except (OSError, ValueError):
        return _Cache()
