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
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime

from testbed.errors import BadInputError
from testbed.host import cache
from testbed.plan import elementary
from testbed.plan.work import KINDS, Work
from testbed.topology.fields import Count, Model, Positive
from testbed.topology.profiles import DeviceProfile, Training

_KIND_PART = 0.25
"""Of the seconds for the double-precision products, for each kind of work in training."""
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
    training: Training
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


class _Cache(Model):
    format: Literal[2] = 2
    calibrations: tuple[Calibration, ...] = ()
    """One for each host: a home directory may be shared by many."""


def calibrate(*, refresh: bool = False, seconds: float = 2.0) -> Calibration:
    """This host's calibration: from the cache, else (or with `refresh`) measured for `seconds`.

    It is kept for this host and this torch, unless the folder of the cache cannot be written.
    """
    path, host = cache.folder() / "calibration.json", this_host()
    kept = _read(path)
    for calibration in kept if not refresh else ():
        if calibration.host == host:
            return calibration
    new = measure(seconds)
    others = tuple(calibration for calibration in kept if calibration.host != host)
    text = _Cache(calibrations=(*others, new)).model_dump_json(indent=2) + "\n"
    cache.keep(path, text)
    return new


def measure(seconds: float = 2.0) -> Calibration:
    """Time products of matrices on one thread, for about `seconds`.

    In CPU time, as that is what a device gets a share of: work of others on this host does not count.
    """
    import torch  # late: a second, that a calibration from the cache does not need

    def speed(kind: str) -> float:
        found = elementary.times(elementary.piece(kind), _KIND_PART * seconds, time.thread_time)
        return elementary.WORK[kind] / statistics.median(found)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = elementary.times(elementary.double_product(), seconds, time.thread_time)
        speeds = [2 * elementary.SIZE**3 / each / 1e9 for each in times]
        training = Training(**{kind: speed(kind) for kind in KINDS})
    finally:
        torch.set_num_threads(threads)
    return Calibration(
        host=this_host(),
        low=min(speeds),
        median=statistics.median(speeds),
        high=max(speeds),
        products=len(speeds),
        training=training,
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


def seconds(work: Work, speeds: Training) -> dict[str, float]:
    """How long each kind of `work` takes at these speeds."""
    own = {**speeds.model_dump(), "matrix": _matrix(speeds)}
    return {kind: getattr(work, kind) / own[kind] for kind in KINDS}


def _matrix(speeds: Training) -> float:
    if speeds.matrix is None:
        raise ValueError("these speeds have no matrix")
    return speeds.matrix


def this_host() -> Host:
    return Host(
        cpu=elementary.processor(), cores=os.cpu_count() or 1, torch=importlib.metadata.version("torch")
    )


def _read(path: Path) -> tuple[Calibration, ...]:
    """From the cache; nothing where the file is damaged, or another program's or version's."""
    try:
        # Not strict, as JSON has neither tuples nor dates.
        return _Cache.model_validate_json(path.read_bytes(), strict=False).calibrations
    except (OSError, ValueError):
        return ()
