"""The plan of a run, and all that is done before anything is started."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from packaging.requirements import Requirement

from agents.client.files import set_aside
from agents.disk import files
from agents.texts import quantity
from testbed import console
from testbed.data import datasets, preparation
from testbed.data.preparation import Prepared
from testbed.errors import BadInputError, reading_run
from testbed.host.nodes import Node, local_swarm_nodes
from testbed.plan import Plan, assignment, catalog, model_check, this_host
from testbed.plan.agent_configs import RunSpec
from testbed.run import provenance
from testbed.run.options import Options
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import emulator
from testbed.speed import Calibration, calibrate
from testbed.topology import Topology, load, profiles, yamlfile
from testbed.topology.partition import ResampledIndices
from testbed.topology.profiles import Profiles
from testbed.topology.yamlfile import Where
from testbed.traits import emulated_runtime_names, runtime_names, traits
from testbed.view import View


def plan_file(path: Path, options: Options) -> tuple[Topology, Plan]:
    """Raises BadInputError."""
    topology = load(path)
    return topology, plan_topology(topology, options)


def plan_topology(topology: Topology, options: Options) -> Plan:
    """Raises BadInputError."""
    found = catalog.read(topology)
    runtime = choose_runtime(options, topology.runtime.name)
    own = traits(runtime)
    check_requirements(topology, installed=not own.images)
    nodes = _nodes(runtime, options)
    if catalog.needs_speeds(topology, found, many_hosts=bool(nodes)):
        speeds = _speeds(nodes, topology, options) if nodes else {catalog.HERE: calibrate()}
        here = nodes[0].id if nodes else catalog.HERE
        found = catalog.with_cpu(found, topology, speeds, here)
        core = speeds[here].gflops
        nodes = tuple(replace(one, core=speeds[one.id].gflops / core) for one in nodes)
    host = this_host(
        nodes,
        netem=own.shaper is None,
        gpus=own.gpus and any(group.gpu for group in topology.devices),
        cuda=topology.runtime.device == "cuda" and not own.images,
    )
    return assignment.plan(topology, runtime, host, found, oversubscribe=options.oversubscribe)


def choose_runtime(options: Options, requested: str = "auto") -> str:
    """`auto` is replaced by a runtime that this host has."""
    runtime = options.runtime or requested
    if runtime == "auto":
        single = (name for name in emulated_runtime_names() if not traits(name).many_hosts)
        return next(name for name in single if emulator(name).is_available())
    return runtime


def check_requirements(topology: Topology, *, installed: bool) -> None:
    """Raise BadInputError if the user's own code requires packages that are for another PyTorch than the
    testbed's. If `installed` is true, the packages must also be installed on this host."""
    if not topology.requirements:
        return
    from testbed.images import wheels  # imports the Docker SDK, which takes half a second

    problems = []
    for index, text in enumerate(topology.requirements):
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        if (refusal := wheels.companions_refusal(wanted)) is not None:
            message = f"{text} {refusal}"
            problems.append(topology.source.problem(("requirements", index), message))
            continue
        if not installed:
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found = None
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            state = "is not installed" if found is None else f"is installed as {found}"
            problems.append(
                topology.source.problem(
                    ("requirements", index),
                    f"{wanted.name} {state}: run {wheels.companions_command(text)}",
                )
            )
    if problems:
        raise topology.source.error(problems)


def check_host(topology: Topology, plan: Plan) -> None:
    """A quick check of this host and of real devices. Raises HostError."""
    if plan.traits.simulated:
        return
    emulator(plan.runtime).check_host()
    if plan.real_devices:
        from testbed.runtimes.ssh import hosts

        hosts.check_hosts(plan, topology)


def _nodes(runtime: str, options: Options) -> tuple[Node, ...]:
    """Machines of a file that `options` names, or of the Swarm; empty for a runtime that uses this host
    only. Raises BadInputError."""
    if traits(runtime).many_hosts:
        return tuple(
            local_swarm_nodes() if options.nodes is None else profiles.read_machines(options.nodes)
        )
    if options.nodes is not None:
        other = runtime_names(lambda t: t.many_hosts)
        raise BadInputError(f"--nodes: the {runtime} runtime uses one machine; add --runtime {other}")
    return ()


def _speeds(nodes: Sequence[Node], topology: Topology, options: Options) -> dict[str, Calibration]:
    """Speeds of described nodes are computed, others are measured there."""
    if options.nodes is not None:
        return {node.id: calibrate().scaled(node.core or 1.0) for node in nodes}
    from testbed.runtimes.swarm import node_preparation  # imports the Docker SDK: half a second

    return node_preparation.calibrations(nodes, topology.runtime.registry, console.remark)


# Check that the files that a run started from are unchanged when the run is resumed.
#
# The files are the files of the plan, and the file with the model's initial state. The user's own code
# is checked by `preparing.check_code`. The manifest has digests of the files. The folder `state/` has
# copies, so that an error can say what differs.

_NAMED = 5
"""Differences that an error lists."""
_SHOWN = 60
"""Characters of a value."""
_NOTHING = object()


def save_digests(directory: RunDirectory) -> None:
    directory.state.mkdir(mode=0o700, exist_ok=True)
    for path in _files(directory):
        if path.is_file():
            (directory.state / path.name).write_bytes(path.read_bytes())
    start = {"start": _digest(directory.start)} if directory.start.is_file() else {}
    directory.write_manifest(topology=_digest_of(_read(directory, directory.path)), **start)


def _files(directory: RunDirectory) -> tuple[Path, ...]:
    return directory.topology, directory.profiles, directory.measured


def _read(directory: RunDirectory, folder: Path) -> Any:
    """Raises BadInputError."""
    topology, *others = (folder / path.name for path in _files(directory))
    data = yamlfile.read(topology).data
    beside = {path.name: yamlfile.read(path).data for path in others if path.is_file()}
    return data | beside if isinstance(data, dict) else data


def check_unchanged(directory: RunDirectory) -> None:
    """Raises BadInputError if a file that the run started from has changed."""
    manifest = directory.read_manifest()
    now = _read(directory, directory.path)
    if _digest_of(now) != manifest.get("topology"):
        raise BadInputError(
            f"{directory.topology} is not the topology that the run began with"
            f"{_differences(directory)}. A resumed run needs the same topology: undo the change, or "
            "start a new run with it"
        )
    with reading_run(directory.path):
        found = _digest(directory.start) if directory.start.exists() else None
    if found != manifest.get("start"):
        raise BadInputError(
            f"{directory.start}, the state that the run's module starts from, has changed since the run "
            "began: put a copy back, or start a new run"
        )


def _differences(directory: RunDirectory) -> str:
    path, now = directory.state / directory.topology.name, _read(directory, directory.path)
    try:
        began = _read(directory, directory.state)
    except BadInputError:
        return f" (the change is not known: {path} cannot be read)"
    if _digest_of(began) != directory.read_manifest().get("topology"):
        return f" (the change is not known: {path}, or the digest in the manifest, was changed, too)"
    found = list(_describe_differences(began, now, ()))
    more = f"; {quantity(len(found) - _NAMED, 'more difference')}" if len(found) > _NAMED else ""
    return f": {'; '.join(found[:_NAMED])}{more}"


def _describe_differences(began: Any, now: Any, where: Where) -> Iterator[str]:
    """Yield sentences such as `rule.buffer_size was 2, and is 7`."""
    if isinstance(began, dict) and isinstance(now, dict):
        for key in {**began, **now}:
            yield from _describe_differences(
                began.get(key, _NOTHING), now.get(key, _NOTHING), (*where, key)
            )
    elif isinstance(began, tuple) and isinstance(now, tuple):
        for index in range(max(len(began), len(now))):
            before, after = (each[index] if index < len(each) else _NOTHING for each in (began, now))
            yield from _describe_differences(before, after, (*where, index))
    elif now is _NOTHING:
        yield f"{yamlfile.dotted_path(where)} was {_format_value(began)}, and is missing"
    elif began is _NOTHING:
        yield f"{yamlfile.dotted_path(where)} is new, {_format_value(now)}"
    elif _canonical(began) != _canonical(now):
        yield f"{yamlfile.dotted_path(where)} was {_format_value(began)}, and is {_format_value(now)}"


def _format_value(value: Any) -> str:
    text = _canonical(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _digest_of(data: Any) -> str:
    """Comments and the order of keys are ignored."""
    return hashlib.sha256(_canonical(data).encode("utf-8", "surrogatepass")).hexdigest()


def _digest(path: Path) -> str:
    with files.open_regular(path) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


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
            save_digests(directory)
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
    """Updates that clients had finished in an earlier leg of the run. Return one sentence per file
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
    if topology.fleet.keys:
        directory.fleet.write_text(topology.fleet.to_json(), encoding="utf-8")
    if plan.profiles != Profiles():
        text = yamlfile.write(plan.profiles.model_dump(mode="json", exclude_defaults=True))
        directory.profiles.write_text(text, encoding="utf-8")
    plan.measured.write(directory.measured)


def check_code(topology: Topology, directory: RunDirectory) -> None:
    """Raises BadInputError."""
    code = topology.user_code
    if code is not None and directory.read_manifest().get("code") != code.digest:
        raise BadInputError(f"{directory.code} has changed since the run began: start a new run with it")
