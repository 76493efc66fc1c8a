"""A run in virtual time from Python, for notebooks and scripts.

run = simulate(Path("topologies/theory/area-every.yaml"), seed=3)
run.updates.groupby("client").size()
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import yaml

from analysis.load import Run, load
from testbed import topology
from testbed.run import up
from testbed.rundir.directory import RunDirectory, new_run_id
from testbed.view import View


def simulate(
    wanted: str | Path, *, runs: str | Path = "runs", data: str | Path | None = None, **changes: Any
) -> Run:
    """Run a topology, a file or its YAML text, in virtual time to its end.

    `changes` take the place of its top-level entries: `seed=3`, `rule={"name": "fedavg"}`. The run
    directory lies in `runs`. `data` is the folder of datasets as parquet files, TESTBED_DATA where it
    is not given; what is not there is fetched from the hub. Raises BadInputError, HostError,
    RunFailedError.
    """
    text = wanted.read_text(encoding="utf-8") if isinstance(wanted, Path) else wanted
    name = str(wanted) if isinstance(wanted, Path) else "<topology>"
    if changes:
        text = yaml.safe_dump({**yaml.safe_load(text), **changes}, sort_keys=False)
    root = data or os.environ.get("TESTBED_DATA")
    options = up.Options(runtime="virtual", data_root=Path(root) if root else None)
    parsed, plan = up.planned_here(topology.parse(text, name), options)
    with warnings.catch_warnings():  # in a notebook it says that it lacks its widgets: we show no bars
        warnings.simplefilter("ignore")
        import tqdm.auto  # noqa: F401
    directory = RunDirectory.create(Path(runs), new_run_id(parsed.name))
    up.run(parsed, plan, directory, options, View())
    return load(directory.path)
