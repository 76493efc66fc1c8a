"""`testbed fidelity`: how faithful the emulation is on this host, over a grid of shares and links."""

from __future__ import annotations

from pathlib import Path

from testbed import rundir, up
from testbed.controller import View
from testbed.rundir import RunDirectory
from testbed.up import Options, Outcome

_GRIDS = Path(__file__).parent / "catalog"
_CPU, _LINKS = _GRIDS / "fidelity-cpu.yaml", _GRIDS / "fidelity-links.yaml"


def run(runtime: str | None, runs: Path, view: View) -> list[Outcome]:
    """One run over CPU shares and, in containers, one over links; their directories go to `runs`.

    Raises TestbedError.
    """
    outcomes = []
    for grid in (_CPU, _LINKS):
        options = Options(runtime)
        if grid == _LINKS and up.chosen_runtime(options) != "docker":
            continue
        topology, plan = up.planned(grid, options)
        directory = RunDirectory.create(runs, rundir.new_run_id(topology.name))
        outcomes.append(up.run(topology, plan, directory, options, view))
    return outcomes
