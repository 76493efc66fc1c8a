"""A run in virtual time from Python, for notebooks and scripts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.api.launching import plan_run
from testbed.api.running import read
from testbed.api.topology_input import TopologyLike, text_of
from testbed.view import View

if TYPE_CHECKING:
    from analysis.load import Run as Result


def simulate(
    topology: TopologyLike, *, runs: str | Path = "runs", data: str | Path | None = None, **changes: Any
) -> Result:
    """Run `topology` (see `up`) in virtual time, in this process, to its end; what it came to.

    `changes` take the place of its top-level entries: `seed=3`, `rule={"name": "fedavg"}`. The run
    directory lies in `runs`. `data` is the folder of datasets as parquet files, TESTBED_DATA where it
    is not given; what is not there is fetched from the hub. One at a time in a process: use `sweep`, or
    `up` with `runtime="virtual"`, for several. Raises BadInputError, HostError, RunFailedError.
    """
    given = text_of(topology, changes)
    launch = plan_run(given, runtime="virtual", data=data, runs=runs)
    with warnings.catch_warnings():  # in a notebook it says that it lacks its widgets: we show no bars
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401
    directory = launch.directory()
    with launch.removing_unstarted(directory):
        launch.run(directory, View())
    return read(directory.path)
