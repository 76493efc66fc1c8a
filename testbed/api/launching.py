"""A topology planned on this host, and its run: in this process, or in one of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed import topology as topologies
from testbed import tracking
from testbed.api.topology_input import TopologyInput, TopologyLike, data_root, text_of
from testbed.console import Report, silent
from testbed.dashboard import serving
from testbed.data import preparation
from testbed.errors import BadInputError, HostError, writable_file
from testbed.plan import Plan, by_node, catalog, describe, drawing, here, memory, model_check
from testbed.plan import rounds as expected
from testbed.plan.feasibility import gib
from testbed.run import live_runs, planning
from testbed.run import up as upping
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology
from testbed.tracking.processes import tracked
from testbed.view import View

if TYPE_CHECKING:
    from testbed.data.distribution import Distribution as Distribution
    from testbed.plan.rounds import Round

_LAUNCH = "launch.json"
"""In work/: what the process that controls a run in the background reads."""


@dataclass(frozen=True)
class Launch:
    """A topology, checked and planned on this host: what would be launched, and its run.

    `planned` makes one. Tables are lists of rows, each a mapping from column to value.
    """

    topology: Topology
    plan: Plan
    options: Options = field(repr=False)
    given: TopologyInput = field(repr=False)
    runs: Path = Path("runs")
    resumed: RunDirectory | None = None

    def rounds(self) -> dict[str, Round]:
        """How long a round of each device is expected to take. Raises BadInputError."""
        topology = self.topology
        samples = preparation.known_samples(topology, self.options.data_root)
        return expected.expected(topology, self.plan, model_check.check(topology), samples)

    def devices(self) -> list[dict[str, Any]]:
        """A row for each device, with what it gets and its expected round. Raises BadInputError."""
        return expected.by_device(self.plan, self.rounds())

    def tables(self) -> list[list[dict[str, Any]]]:
        """For people: what each group gets, the rounds expected of it, and who is placed on which node,
        where there are several. Raises BadInputError."""
        tables = [describe(self.plan), expected.by_group(self.plan, self.rounds())]
        return [*tables, by_node(self.plan)] if self.plan.nodes else tables

    def notes(self) -> list[str]:
        """What is worth to be known before a launch, in sentences. Raises BadInputError."""
        remarks = expected.remarks(self.topology, self.rounds())
        return [*self.hints, *self.plan.cpu_notes, *self.plan.notes, *remarks, *self._refusals()]

    @property
    def hints(self) -> tuple[str, ...]:
        """Sentences on words of the version before this one in the topology and its traces. A run that
        is resumed keeps those that it began with."""
        return (*self.topology.hints, *self.plan.hints) if self.resumed is None else ()

    def _refusals(self) -> list[str]:
        """Why this host would refuse the run. Machines that are described are not asked."""
        if self.options.nodes is not None:
            return []
        try:
            planning.check_host(self.plan)
        except HostError as error:
            return [f"`testbed up` would refuse it on this host: {error}"]
        return []

    def memory(self) -> str:
        """What the components of a run need of it, in a sentence."""
        topology, plan = self.topology, self.plan
        model = 4 * model_check.check(topology)
        count, side = len(plan.devices), topology.rule.build().client_side
        steps = topology.update_steps
        client = max(
            memory.client(model, device.local, side, [*device.steps, *steps]) for device in plan.devices
        )
        return (
            f"Memory: a client needs up to {gib(client)} beside its data and what a step computes, the "
            f"aggregator {gib(memory.aggregator(model, count))}, the broker "
            f"{gib(memory.broker(model, count))}"
            + ("; it is not limited in this runtime" if not plan.traits.cgroups else "")
        )

    def drawing(self, to: Path | None = None) -> str:
        """A picture of devices, links and servers, as text; also written to `to` as SVG. Raises
        BadInputError where that cannot be written."""
        picture = drawing.picture(self.topology, self.plan)
        if to is not None:
            writable_file(to, "--draw-to").write_text(drawing.as_svg(picture), encoding="utf-8")
        return drawing.as_text(picture)

    def directory(self) -> RunDirectory:
        """A directory for a run, new or, where one is resumed, its own. Raises BadInputError, and
        HostError if this host would refuse the run."""
        planning.check_host(self.plan)
        return self.resumed or RunDirectory.new(self.runs, self.topology.name)

    def run(self, directory: RunDirectory, view: View) -> None:
        """Run in this process, to the end, as `view` is told; then `directory` has what came of it.

        Trackers, page and metrics go on beside it. One at a time in a process, as own code and
        PyTorch's generator have one state there. Raises BadInputError, HostError, RunFailedError, and
        KeyboardInterrupt; in any case nothing is left running.
        """
        cpus = self.plan.infrastructure_cpus
        with (
            tracked(self.options.track, directory, cpus, view.keep),
            view,
            serving.serve_run(directory, self.plan, self.options, view.keep),
        ):
            upping.run(self.topology, self.plan, directory, self.options, view)

    @contextmanager
    def begun_in(self, directory: RunDirectory) -> Iterator[None]:
        """Inside, the run begins; where it is refused before anything has happened in it, its directory
        is removed."""
        try:
            yield
        except BadInputError:
            if self.resumed is None and not directory.events.exists():
                shutil.rmtree(directory.path, ignore_errors=True)
            raise

    def write(self, directory: RunDirectory) -> None:
        """Write what `read` needs into `directory`."""
        given = {"name": self.given.name, "text": self.given.text}
        options = dataclasses.asdict(self.options)
        launch = json.dumps({"given": given, "options": options}, default=str)
        (directory.work / _LAUNCH).write_text(launch, encoding="utf-8")


def read(directory: RunDirectory) -> Launch:
    """The launch that another process has written into `directory`. Raises BadInputError."""
    launch = json.loads((directory.work / _LAUNCH).read_text(encoding="utf-8"))
    options = launch["options"]
    paths = {name: Path(options[name]) for name in ("data_root", "nodes") if options[name] is not None}
    made = Options(**{**options, **paths, "track": tuple(options["track"])})
    return _planned(TopologyInput(**launch["given"]), made, directory.path.parent, directory)


def planned(
    topology: TopologyLike | TopologyInput | None = None,
    *,
    runtime: str | None = None,
    data: str | Path | None = None,
    oversubscribe: bool = False,
    nodes: Path | None = None,
    track: Sequence[str] = (),
    dashboard: int | None = None,
    metrics: int | None = None,
    verbose: bool = False,
    resume: str | None = None,
    runs: str | Path = "runs",
) -> Launch:
    """Check and plan `topology` (see `up`) on this host, without launching it.

    `nodes`: a file that describes the machines to plan for, where a runtime has several. `dashboard`,
    `metrics`: ports to serve the page and Prometheus metrics on during the run, 0 for a free one; None:
    not at all. `verbose`: clients log each round. `resume`: the interrupted run to continue, of its own
    topology and runtime where none are given. The others are as of `up`. Raises BadInputError that lists
    all that is wrong.
    """
    if track:
        tracking.check(track)
    options = Options(
        runtime,
        oversubscribe,
        data_root(data),
        resume is not None,
        dashboard,
        metrics,
        tuple(dict.fromkeys(track)),
        nodes,
        verbose,
    )
    resumed = None
    if resume is not None and topology is None:
        resumed = live_runs.resumable(Path(runs), resume)
        topology = resumed.topology
        options = replace(options, runtime=runtime or resumed.read_manifest().get("runtime"))
    elif resume is not None or topology is None:
        raise BadInputError(
            "Give a topology file or --resume RUN, and not both (`testbed runs` lists the runs)."
        )
    launch = _planned(text_of(topology), options, Path(runs), resumed)
    serving.check_ports(options)
    return launch


def _planned(
    given: TopologyInput, options: Options, runs: Path, resumed: RunDirectory | None = None
) -> Launch:
    topology = topologies.parse(given.text, given.name)
    plan = planning.plan_topology(topology, options)
    return Launch(topology, plan, options, given, runs, resumed)


def validated(topology: TopologyLike) -> Topology:
    """`topology` (see `up`), checked as far as that needs no look at this host, with what it leaves out
    filled in. Raises BadInputError that lists all errors at once."""
    given = text_of(topology)
    found = topologies.parse(given.text, given.name)
    catalog.read(found)
    here.check_model(found)
    return found


def distribution(
    topology: TopologyLike, *, data: str | Path | None = None, on_progress: Report = silent
) -> Distribution:
    """How many samples and which classes each device of `topology` (see `up`) would have. `data` as of
    `up`; `on_progress` is called with lines on how far it is. Raises BadInputError, HostError."""
    from testbed.data.distribution import distribution as of

    given = text_of(topology)
    found = topologies.parse(given.text, given.name)
    prepared = preparation.prepare(found, data_root(data), on_progress)
    model_check.check_data(found, prepared)
    return of(found, prepared)
