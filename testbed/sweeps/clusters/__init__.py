"""Clusters that run the cells of a sweep (`testbed sweep --on`).

`remote` runs a cell on a worker, `pool` sends cells and puts their results into the sweep's folder;
`dask` and `slurm` have one `Cluster` each.
"""

from __future__ import annotations

import importlib
import importlib.util
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agents import extras
from testbed.errors import BadInputError
from testbed.topology import units

LOCAL = "local"
"""Value of `--on` for runs on this machine."""
DEFAULT_RESULT = "256MiB"


class Cluster(Protocol):
    """Futures are those of `concurrent.futures`."""

    def check(self, *, emulated: bool) -> None:
        """Raises HostError if the workers have another version of the testbed or of Python than this
        machine. `emulated`: whether there are emulated cells. Raises BadInputError if there are, and
        there are workers, and none of them runs emulated cells."""

    def submit(self, job: bytes, *, emulated: bool) -> Future[bytes]:
        """The future's result is the answer of `remote.run`. If a worker is lost, the job is repeated on
        another worker, a limited number of times."""

    def failure(self, error: BaseException) -> str | None:
        """`error`: exception of a cell's future. None if the cluster itself failed."""

    def capacity(self) -> int:
        """Number of jobs that keep all workers busy."""

    def idle_reason(self) -> str | None:
        """None if jobs can run."""

    def close(self) -> None:
        """End all jobs of this sweep, wait for their end, and disconnect. Idempotent."""


@dataclass(frozen=True, slots=True)
class ClusterKind:
    module: str
    class_name: str
    """Class in `module`. Its arguments are a Target, and a folder for files of the cluster."""
    package: str
    """Optional package that `module` imports (agents/extras.py)."""


_DASK = ClusterKind("testbed.sweeps.clusters.dask", "DaskCluster", "distributed")
CLUSTERS = {
    "dask": _DASK,
    "tcp": _DASK,
    "tls": _DASK,
    "slurm": ClusterKind("testbed.sweeps.clusters.slurm", "SlurmCluster", "submitit"),
}
"""Word before the colon in `--on` -> kind of cluster."""


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    """Value of `--on`."""
    scheme: str
    """Key of CLUSTERS."""
    address: str
    """Text after `//`, without options; empty if there is none."""
    settings: dict[str, str]
    max_result: int
    """Bytes of the results of a cell that come back through the scheduler."""


def parse(on: str) -> Target | None:
    """`dask://HOST:PORT?result=1GiB` or `slurm:partition=short`. None for runs on this machine. Raises
    BadInputError, also if the cluster's package is not installed."""
    if on == LOCAL:
        return None
    scheme, _, rest = on.partition(":")
    kind = CLUSTERS.get(scheme)
    expected = (
        "expected local, dask://HOST:PORT, tcp://HOST:PORT, tls://HOST:PORT, slurm or slurm:KEY=VALUE"
    )
    if kind is None:
        raise BadInputError(f"--on {on}: {expected}")
    address, mark, options = (rest, "", "") if rest.startswith("//") else ("", "?", rest)
    if rest.startswith("//"):
        address, mark, options = rest[2:].partition("?")
    if (kind is _DASK) != bool(address):
        raise BadInputError(f"--on {on}: {expected}")
    pairs = [pair.partition("=") for pair in options.replace("&", ",").split(",") if mark and pair]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise BadInputError(f"--on {on}: {name or value!r} has no value, expected KEY=VALUE")
    settings = {name: value for name, _, value in pairs}
    try:
        most = units.size(settings.pop("result", DEFAULT_RESULT))
    except ValueError as error:
        raise BadInputError(f"--on {on}: result: {error}") from None
    if message := extras.missing(kind.package):
        raise BadInputError(f"--on {on}: {message}")
    return Target(on, scheme, address, settings, most)


def connect(target: Target, folder: Path) -> Cluster:
    """`folder`: existing folder for files of the cluster. Raises BadInputError, HostError."""
    kind = CLUSTERS[target.scheme]
    made: Cluster = getattr(importlib.import_module(kind.module), kind.class_name)(target, folder)
    return made
