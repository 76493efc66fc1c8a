"""Preparation of a run before anything is started: the data, the code, and the first files of the run
directory."""

from __future__ import annotations

import time

from agents.client.outbox import set_aside
from testbed.data import datasets, preparation
from testbed.data.preparation import Prepared
from testbed.errors import BadInputError
from testbed.plan import Plan, model_check
from testbed.plan.agent_configs import RunSpec
from testbed.run import provenance, resume_check
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, fleets, yamlfile
from testbed.topology.partition import ResampledIndices
from testbed.topology.profiles import Profiles
from testbed.view import View

_MOST_NAMED = 1_000
"""Classes whose names are kept with the run."""


def prepare(
    topology: Topology, plan: Plan, directory: RunDirectory, options: Options, view: View
) -> tuple[RunSpec, Prepared]:
    """Raises TestbedError."""
    if options.resume and (why := plan.traits.unresumable_reason):
        raise BadInputError(
            f"a run of the {plan.runtime} runtime cannot be resumed: {why}, "
            f"testbed up {directory.topology}"
        )
    if options.resume:
        check_code(topology, directory)
    else:
        write_inputs(topology, plan, directory)
        directory.write_manifest(run=directory.run, created=time.time())
        if topology.task.initial is not None or model_check.has_frozen_parameters(topology):
            from testbed.plan import models

            models.write_start(topology, directory)
        if not plan.traits.simulated:
            resume_check.save(directory)
    directory.claim()
    task = topology.task
    chosen = datasets.source(topology)
    data = f"{chosen.name}, {task.partition.scheme} partition" if chosen else task.name
    for sentence in plan.cpu_notes:
        view.progress(sentence)
    view.progress(f"Preparing the data: {data}")
    prepared = preparation.prepare(topology, options.data_root, view.progress)
    model_check.check_data(topology, prepared)
    model_check.try_step(topology, prepared)
    for remark in prepared.remarks:
        view.progress(remark)
    spec = RunSpec(
        directory,
        topology,
        plan,
        prepared.samples,
        options.verbose,
        set_aside_invalid_updates(directory),
    )
    remarks = {"data": list(prepared.remarks)} if prepared.remarks else {}
    names = {"classes": list(prepared.classes)} if 0 < len(prepared.classes) <= _MOST_NAMED else {}
    own = data_entries(topology, directory, view)
    alike = isinstance(prepared.indices, ResampledIndices)  # each has samples of the whole set
    labels = {} if alike else preparation.label_counts(prepared)
    described = provenance.describe(spec, labels)
    directory.write_manifest(**described, **remarks, **names, **own)
    return spec, prepared


def set_aside_invalid_updates(directory: RunDirectory) -> tuple[str, ...]:
    """Updates that clients had finished in an earlier segment of the run. Return one sentence per file
    that was set aside."""
    return tuple(told for folder in sorted(directory.disks.glob("*")) for told in set_aside(folder))


def data_entries(topology: Topology, directory: RunDirectory, view: View) -> dict[str, str]:
    """Warn if the data files have changed since a resumed run began. Raises BadInputError."""
    files = datasets.own_files_digest(topology)
    if directory.read_manifest().get("data_files", files) != files:
        view.progress(
            "Warning: sizes or modification times of the data files have changed since the run began; "
            "if their content has changed, too, start a new run"
        )
    return {"data_files": files} if files else {}


def write_inputs(topology: Topology, plan: Plan, directory: RunDirectory) -> None:
    """Write what is needed to repeat the run: the topology, profiles and measurements, and a copy of the
    user's own code."""
    code = topology.user_code
    if code is not None:
        code.copy(directory.code)
        directory.write_manifest(code=code.digest)
    text = topology.to_yaml(None if code is None else directory.code.name)
    directory.topology.write_text(text, encoding="utf-8")
    if topology.drawn:
        directory.fleet.write_text(fleets.as_json(topology.drawn), encoding="utf-8")
    if plan.profiles != Profiles():
        text = yamlfile.write(plan.profiles.model_dump(mode="json", exclude_defaults=True))
        directory.profiles.write_text(text, encoding="utf-8")
    plan.measured.write(directory.measured)


def check_code(topology: Topology, directory: RunDirectory) -> None:
    """Raises BadInputError."""
    code = topology.user_code
    if code is not None and directory.read_manifest().get("code") != code.digest:
        raise BadInputError(f"{directory.code} has changed since the run began: start a new run with it")
