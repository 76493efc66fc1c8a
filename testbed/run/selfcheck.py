"""`testbed calibrate --fidelity`: runs over a grid of CPU shares and links."""

from __future__ import annotations

from pathlib import Path

from testbed.run import planning, up
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import load
from testbed.topology.devices import DeviceGroup
from testbed.traits import refuse_simulated, traits
from testbed.view import View

_GRIDS = Path(__file__).parents[1] / "catalog"
_CPU, _LINKS = _GRIDS / "fidelity-cpu.yaml", _GRIDS / "fidelity-links.yaml"


def run(runtime: str | None, runs: Path, view: View) -> list[RunDirectory]:
    """If the runtime cannot lose packets, links with loss are left out. Raises TestbedError."""
    refuse_simulated(runtime)
    made = []
    options = Options(runtime)
    lossless = traits(planning.choose_runtime(options)).lossless_reason
    for grid in (_CPU, _LINKS):
        topology = load(grid)
        if lossless:
            devices = tuple(filter(_loses_nothing, topology.devices))
            topology = topology.model_copy(update={"devices": devices})
        plan = planning.plan_topology(topology, options)
        planning.check_host(topology, plan)
        directory = RunDirectory.new(runs, topology.name)
        up.run(topology, plan, directory, options, view)
        made.append(directory)
    return made


def _loses_nothing(group: DeviceGroup) -> bool:
    return group.link is None or not group.link.loss
