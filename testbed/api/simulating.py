"""Runs in virtual time from Python, for notebooks and scripts."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.api.launching import plan_run
from testbed.api.reading import read
from testbed.api.topology_input import TopologyLike, text_of
from testbed.view import View

if TYPE_CHECKING:
    from analysis.load import Run as Result


def simulate(
    topology: TopologyLike, *, runs: str | Path = "runs", data: str | Path | None = None, **changes: Any
) -> Result:
    """Run `topology` (see `up`) in virtual time in this process, to its end; return the run's tables.

    `runs`: folder in which the run directory is made. `data`: folder with datasets as parquet files;
    None for the folder that TESTBED_DATA names, if it is set. Missing datasets are downloaded from the
    hub. `changes`: new values of top-level entries of the topology, such as `seed=3` or `rule={"name":
    "fedavg"}`. A process cannot make several runs at the same time. For parallel runs, use `sweep`, or
    `up` with `runtime="virtual"`. Raises BadInputError, HostError, RunFailedError.
    """
    given = text_of(topology, changes)
    launch = plan_run(given, runtime="virtual", data=data, runs=runs)
    # tqdm, a part of the extra `datasets`, warns in notebooks without widgets, which we do not use.
    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401
    directory = launch.directory()
    with launch.removing_unstarted(directory):
        launch.run(directory, View())
    return read(directory.path)
