"""Calibration: the speed of a core of this host, which turns a device profile's speed into a CPU share.

A profile's gflops are those of High-Performance Linpack, which spends its time in products of
double-precision matrices; so that is what is measured here. Two differences remain, of some per cent
each: Linpack loses a little around its products, and a host's core may be slower when all are busy.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime

from agents import files
from testbed.errors import BadInputError
from testbed.host import cache
from testbed.topology.fields import Count, Model, Positive
from testbed.topology.profiles import DeviceProfile

_SIZE = 1024
"""Rows of a matrix: three of 8 MB each do not fit into the caches that a core has for itself."""
_MIN_PRODUCTS = 3
"""However long one takes."""
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
        values = self.model_dump(mode="json")
        return {"gflops": self.gflops, **values.pop("host"), **values, "steady": self.is_steady}

    def summary(self) -> str:
        """In a few lines, for people."""
        lines = [
            f"One core of this host: {self.gflops:.1f} Gflop/s in double precision",
            f"    {self.products} products: lowest {self.low:.1f}, median {self.median:.1f}, "
            f"highest {self.high:.1f}",
            f"    {self.host.cpu}, {self.host.cores} cores, torch {self.host.torch}",
            f"    measured on {self.measured:%Y-%m-%d %H:%M %Z}",
        ]
        if not self.is_steady:
            lines.append(
                "The speed varied: other work, or a clock that changes, got in the way. Measure again."
            )
        return "\n".join(lines)


class _Cache(Model):
    format: Literal[1] = 1
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
    with suppress(OSError):  # it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return new


def measure(seconds: float = 2.0) -> Calibration:
    """Time products of matrices on one thread, for about `seconds`.

    In CPU time, as that is what a device gets a share of: work of others on this host does not count.
    """
    import torch  # late: a second, that a calibration from the cache does not need

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        shape = (_SIZE, _SIZE)
        left, right = (torch.rand(shape, dtype=torch.float64, generator=generator) for _ in range(2))
        product = torch.empty(shape, dtype=torch.float64)
        torch.mm(left, right, out=product)  # sets the matrix library up
        speeds: list[float] = []
        end = time.monotonic() + seconds
        while len(speeds) < _MIN_PRODUCTS or time.monotonic() < end:
            begin = time.thread_time()
            torch.mm(left, right, out=product)
            speeds.append(2 * _SIZE**3 / (time.thread_time() - begin) / 1e9)
    finally:
        torch.set_num_threads(threads)
    return Calibration(
        host=this_host(),
        low=min(speeds),
        median=statistics.median(speeds),
        high=max(speeds),
        products=len(speeds),
        measured=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
    )


def share(name: str, profile: DeviceProfile, calibration: Calibration) -> float:
    """Cores of this host that are as fast as the whole device of the profile called `name`.

    Raises BadInputError where the profile has no speed.
    """
    if profile.gflops is None:
        raise BadInputError(
            f"the profile {name} has no gflops, so what share of a core here is as fast is not known: "
            "give cpu, such as cpu: 0.25, or the profile's gflops in a profiles.yaml"
        )
    return profile.gflops / calibration.gflops


def this_host() -> Host:
    return Host(cpu=_cpu_model(), cores=os.cpu_count() or 1, torch=importlib.metadata.version("torch"))


def _cpu_model() -> str:
    """As the kernel calls it; on Arm the kernel names the board, if anything."""
    facts: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    named = (facts.get(key) for key in ("model name", "Model", "Hardware"))
    return next(filter(None, named), None) or platform.processor() or platform.machine()


def _read(path: Path) -> tuple[Calibration, ...]:
    """From the cache; nothing where the file is damaged, or another program's or version's."""
    try:
        # Not strict, as JSON has neither tuples nor dates.
        return _Cache.model_validate_json(path.read_bytes(), strict=False).calibrations
    except (OSError, ValueError):
        return ()
