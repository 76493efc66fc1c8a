"""Planning of a topology on this host, and runs of the plan in this process or in the background."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents import events
from testbed import topology as topologies
from testbed import tracking
from testbed.api import packing
from testbed.api.packing import OpenedPack
from testbed.api.topology_input import TopologyInput, TopologyLike, data_root, text_of, with_settings
from testbed.console import Report, silent
from testbed.dashboard import serving
from testbed.data import preparation
from testbed.errors import BadInputError, HostError, RunFailedError, TestbedError, writable_file
from testbed.host import programs
from testbed.plan import (
    Plan,
    catalog,
    costs,
    device_table,
    drawing,
    model_check,
    node_table,
    plan_tables,
)
from testbed.plan import rounds as expected
from testbed.plan.features import PARTS
from testbed.run import live_runs, preparing
from testbed.run import up as upping
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.rundir.live_files import RecordFollower, last_start
from testbed.topology import Topology
from testbed.topology.units import gib
from testbed.topology.yamlfile import Boundary
from testbed.tracking import tracking_run
from testbed.view import View

if TYPE_CHECKING:
    from testbed.data.distribution import SampleDistribution as SampleDistribution
    from testbed.plan.plan_tables import DeviceRow
    from testbed.plan.rounds import Round

_LAUNCH = "launch.json"
"""File in the folder `work` of the run directory, for the process that controls a run in the
background."""


@dataclass(frozen=True)
class Launch:
    """A topology that `plan_run` has checked and planned on this host. It is ready to run.

    Some methods return tables. A table is a list of rows, and a row is a mapping from column to value.
    """

    topology: Topology
    plan: Plan
    options: Options = field(repr=False)
    topology_input: TopologyInput = field(repr=False)
    """The topology as the user passed it."""
    runs: Path = Path("runs")
    """Folder in which the run directory is created."""
    resumed: RunDirectory | None = None
    """Directory of the run that is resumed; None for a new run."""
    pack: OpenedPack | None = field(default=None, repr=False)
    """Pack that the topology is from; None if it is from no pack, or was changed by settings."""

    def rounds(self) -> dict[str, Round]:
        """Return an estimate of each device's round: name of the device -> estimate. Raises
        BadInputError."""
        topology = self.topology
        samples = preparation.known_samples(topology, self.options.data_root)
        return expected.estimate_rounds(topology, self.plan, model_check.check(topology), samples)

    def devices(self) -> list[DeviceRow]:
        """Return one row per device, with the device's planned resources and its expected round. Raises
        BadInputError."""
        return expected.device_rows(self.plan, self.rounds())

    def tables(self) -> list[list[dict[str, Any]]]:
        """Return the tables that `testbed plan` prints: resources of each group, expected rounds of each
        group and, if there are several nodes, the devices on each node. Raises BadInputError."""
        tables = [device_table(self.plan), expected.group_rows(self.plan, self.rounds())]
        return [*tables, node_table(self.plan)] if self.plan.nodes else tables

    def fleet_tables(self) -> list[list[dict[str, Any]]]:
        """Return the tables of the drawn devices: quantiles and histograms of numbers, and counts of
        names. Empty tables are left out."""
        numbers = plan_tables.key_distributions(self.topology, self.plan)
        tables = plan_tables.quantile_table(numbers), plan_tables.name_table(self.topology, self.plan)
        return [table for table in tables if table]

    def remarks(self) -> list[str]:
        """Return sentences that the user should read before a launch. Raises BadInputError."""
        rounds = self.rounds()
        remarks = [
            *expected.remarks(self.topology, rounds),
            *(one for part in PARTS for one in part.remarks(self.topology, self.plan, rounds)),
        ]
        return [*self.hints, *self.plan.cpu_notes, *self.plan.notes, *remarks, *self._refusals()]

    @property
    def hints(self) -> tuple[str, ...]:
        """Sentences on what the topology leaves open; empty for a resumed run, because its topology
        cannot be changed."""
        return self.topology.fleet.hints if self.resumed is None else ()

    def _refusals(self) -> list[str]:
        """Return the reasons why this host would refuse the run. The list is empty if this host would
        accept the run, or if the plan is for machines that a file describes."""
        if self.options.nodes is not None:
            return []
        try:
            preparing.check_host(self.topology, self.plan)
        except HostError as error:
            return [f"`testbed up` would refuse it on this host: {error}"]
        return []

    def dry_run(self) -> list[str]:
        """Return lines with the commands that the run would run on its real devices. Raises
        BadInputError if it has none."""
        if not self.plan.real_devices:
            raise BadInputError(
                "--dry-run shows the commands for real devices, and this topology has none: `testbed "
                "plan` shows the rest"
            )
        from testbed.runtimes.ssh import inspection

        return inspection.dry_run(self.plan, self.topology)

    def memory(self) -> str:
        """Return a sentence on the memory that the components of the run need."""
        topology, plan = self.topology, self.plan
        model = 4 * model_check.check(topology)
        count, side = len(plan.devices), topology.rule.build().client_side
        steps = topology.update_steps
        client = max(
            costs.client_memory(model, device.local, side, [*device.steps, *steps])
            for device in plan.devices
        )
        message = costs.message_memory(model, side)
        return (
            f"Memory: a client needs up to {gib(client)} without its data and what a step computes, the "
            f"aggregator {gib(costs.aggregator_memory(message, count))}, the broker "
            f"{gib(costs.broker_memory(message, count))}"
            + ("; this runtime does not limit memory" if not plan.traits.cgroups else "")
        )

    def drawing(self, to: Path | None = None) -> str:
        """Return a drawing of devices, links and servers as text. If `to` is set, also write the drawing
        as SVG to that file, with histograms of drawn devices. Raises BadInputError if the file cannot
        be written."""
        picture = drawing.picture(self.topology, self.plan)
        if to is not None:
            fleet = plan_tables.key_distributions(self.topology, self.plan)
            svg = drawing.as_svg(picture, fleet)
            writable_file(to, "--draw-to").write_text(svg, encoding="utf-8")
        return drawing.as_text(picture)

    def directory(self) -> RunDirectory:
        """Create and return a new run directory, or return the directory of the run that is resumed.
        Raises BadInputError. Raises HostError if this host would refuse the run."""
        preparing.check_host(self.topology, self.plan)
        return self.resumed or RunDirectory.new(self.runs, self.topology.name)

    def run(self, directory: RunDirectory, view: View) -> None:
        """Run the launch in this process, and return when the run has ended. `view` receives the
        progress, and `directory` receives the records.

        Trackers, the dashboard and the metrics server are active during the run. A process cannot make
        several runs at the same time, because the user's own code and PyTorch's random generator have
        process-wide state. Raises BadInputError, HostError, RunFailedError and KeyboardInterrupt.
        Nothing is left running in any case.
        """
        cpus = self.plan.infrastructure_cpus
        with (
            tracking_run(self.options.track, directory, cpus, view.keep),
            view,
            serving.serve_run(directory, self.plan, self.options, view.keep),
        ):
            upping.run(self.topology, self.plan, directory, self.options, view)

    @contextmanager
    def removing_unstarted(self, directory: RunDirectory) -> Iterator[None]:
        """Remove the new run directory if the code in the `with` block raises BadInputError before any
        event was recorded. The code in the block starts the run.
        """
        try:
            yield
        except BadInputError:
            if self.resumed is None and not directory.events.exists():
                shutil.rmtree(directory.path, ignore_errors=True)
            raise

    def write(self, directory: RunDirectory) -> None:
        """Write this launch into `directory`, so that another process can `read` it."""
        given = {"name": self.topology_input.name, "text": self.topology_input.text}
        options = dataclasses.asdict(self.options)
        launch = json.dumps({"given": given, "options": options}, default=str)
        (directory.work / _LAUNCH).write_text(launch, encoding="utf-8")


def read(directory: RunDirectory) -> Launch:
    """Raises BadInputError."""
    launch = json.loads((directory.work / _LAUNCH).read_text(encoding="utf-8"))
    options = launch["options"]
    paths = {name: Path(options[name]) for name in ("data_root", "nodes") if options[name] is not None}
    made = Options(**{**options, **paths, "track": tuple(options["track"])})
    return _plan(TopologyInput(**launch["given"]), made, directory.path.parent, directory)


def plan_run(
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
    settings: Sequence[str] = (),
    trust: bool = False,
    on_progress: Callable[[str], object] = lambda _: None,
    runs: str | Path = "runs",
) -> Launch:
    """Check and plan `topology` (see `up`) on this host without launching it.

    `nodes`: file that describes the machines, for a runtime with several machines; None for the nodes of
    this host's Swarm. `dashboard`, `metrics`: ports for the page and for Prometheus metrics during the
    run; 0 for any free port; None for no page or no metrics. `verbose`: whether clients log each round.
    `resume`: interrupted run to resume. Its topology is used, and also its runtime if `runtime` is None.
    `settings`: changes of the topology, each as `PATH=VALUE` such as `rule.buffer_size=8`. If `topology`
    is the path of a pack of a run (`pack`), the pack is unpacked, and the run is planned again, with its
    runtime if `runtime` is None. `trust`: whether programs in the pack may run. `on_progress` is called
    with lines on the unpacking.
    For the other parameters see `up`. Raises BadInputError, which lists all errors.
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
        resumed = live_runs.prepare_resume(Path(runs), resume)
        topology = resumed.topology
        options = replace(options, runtime=runtime or resumed.read_manifest().get("runtime"))
    elif resume is not None or topology is None:
        raise BadInputError(
            "Give a topology file or --resume RUN, and not both (`testbed runs` lists the runs)."
        )
    if resumed is not None and settings:
        raise BadInputError("--set cannot change a run that is resumed: start a new run")
    opened = None
    if packing.is_pack(topology):
        opened = packing.open_pack(
            str(topology), "run", trusted=trust, runs=runs, on_progress=on_progress
        )
        options = replace(
            options,
            runtime=runtime or opened.index.runtime,
            data_root=opened.data_root(options.data_root),
        )
        topology = opened.start
        opened.check_data(options.data_root)
    source = with_settings(text_of(topology), settings)
    if opened is not None:
        for remark in opened.remarks():
            on_progress(remark)
    launch = _plan(source, options, Path(runs), resumed, None if opened is None else opened.limits)
    launch = replace(launch, pack=None if settings else opened)
    serving.check_ports(options)
    return launch


def _plan(
    topology_input: TopologyInput,
    options: Options,
    runs: Path,
    resumed: RunDirectory | None = None,
    limits: Boundary | None = None,
) -> Launch:
    topology = topologies.parse(topology_input.text, topology_input.name, limits)
    plan = preparing.plan_topology(topology, options)
    return Launch(topology, plan, options, topology_input, runs, resumed)


def validate(topology: TopologyLike) -> Topology:
    """Check `topology` without checking this host; return it with defaults filled in. `topology`: path
    of a file, its content as text or mapping, or a `Topology`. Raises BadInputError, which lists all
    errors.
    """
    source = text_of(topology)
    found = topologies.parse(source.text, source.name)
    catalog.read(found)
    return found


def distribution(
    topology: TopologyLike, *, data: str | Path | None = None, on_progress: Report = silent
) -> SampleDistribution:
    """Return the number of samples per class that each device of `topology` would have. `topology`: path
    of a file, its content as text or mapping, or a `Topology`. `data`: folder with datasets as parquet
    files; None for the folder that TESTBED_DATA names, or for the hub if TESTBED_DATA is not set.
    `on_progress` is called with progress lines. Raises BadInputError, HostError."""
    from testbed.data.distribution import distribution as of

    source = text_of(topology)
    found = topologies.parse(source.text, source.name)
    prepared = preparation.prepare(found, data_root(data), on_progress)
    model_check.check_data(found, prepared)
    return of(found, prepared)


# Runs in the background. The controller is a separate process (`testbed.api.run_process`).
#
# This way, signals, threads and the interpreter lock of the starting process do not affect the run. A
# `tied` controller ends its run cleanly as soon as the process that started it ends, even if that
# process was killed.

_TICK_SECONDS = 0.1
ERROR = "error: "
"""Beginning of the line that says why a command failed."""


def start_run(
    launch: Launch,
    directory: RunDirectory,
    report: Callable[[str], object] = lambda _: None,
    *,
    tied: bool = False,
) -> subprocess.Popen[bytes]:
    """Pass output lines to `report`, and return when the run clock starts.

    `tied`: whether the controller ends when this process ends. Raises TestbedError with the reason if
    the run ended before its clock started.
    """
    from testbed.runtimes.process import runtime  # here, because it imports the broker

    past = RecordFollower(directory.events).read()  # records of a resumed run
    started = [record for record in past if isinstance(record, events.RunStarted)]
    launch.write(directory)
    arguments = [str(directory.path), *(["tied"] if tied else [])]
    log = log_of(directory)
    with log.open("ab") as output, log.open(encoding="utf-8", errors="replace") as lines:
        lines.seek(0, os.SEEK_END)
        begin = output.tell()
        controller = subprocess.Popen(
            programs.command("testbed.api.run_process", *arguments),
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_environment(), **runtime.environment(directory, "controller")},
            start_new_session=True,
        )
        try:
            code, fine = None, True
            while code is None and last_start(directory.events) in (None, *started):
                time.sleep(_TICK_SECONDS)
                code = controller.poll()
                for line in lines:
                    fine = fine and not line.startswith(ERROR)
                    if fine:  # the error is raised below instead
                        report(line.rstrip("\n"))
        except BaseException:
            end_run(controller, directory)
            raise
    if not tied:
        threading.Thread(target=controller.wait, daemon=True).start()  # reaps the controller
    if code:
        end_run(controller, directory)
        raise failure(directory, code, begin)
    return controller


def end_run(controller: subprocess.Popen[bytes], directory: RunDirectory) -> None:
    """Kill the controller if it takes too long to end its run."""
    from testbed.run import live_runs

    controller.terminate()
    try:
        controller.wait(live_runs.stop_timeout(directory))
    except subprocess.TimeoutExpired:
        controller.kill()
        controller.wait()
    if controller.stdin is not None:
        with suppress(OSError):
            controller.stdin.close()


def log_of(directory: RunDirectory) -> Path:
    return directory.logs / "controller.log"


def failure(directory: RunDirectory, code: int, begin: int = 0) -> TestbedError:
    """`begin`: byte at which this controller's part of the log begins."""
    with log_of(directory).open("rb") as file:
        file.seek(begin)
        printed = file.read().decode("utf-8", "replace")
    _, found, told = f"\n{printed}".rpartition(f"\n{ERROR}")
    why = told.strip() if found else f"its controller ended ({code}); see {log_of(directory)}"
    return (BadInputError if code == BadInputError.exit_code else RunFailedError)(why)


def _environment() -> dict[str, str]:
    """Without the variables that force coloured output. A Jupyter kernel sets them, and the log would
    contain colour codes."""
    forced = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    return {name: value for name, value in os.environ.items() if name not in forced}
