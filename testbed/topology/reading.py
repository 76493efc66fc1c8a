"""Reading and validation of topologies: what is wrong before and after the keys are validated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agents import config, user_code
from agents.mqtt.topics import AGGREGATOR, CONTROLLER, ROUTER
from agents.pipeline.steps import STEPS
from agents.rules.interface import ClientSide
from analysis.alike_devices import MAX_DEVICES
from testbed import fleets
from testbed.host.gpus import MPS
from testbed.topology import scenario, validation_errors, yamlfile
from testbed.topology.devices import DeviceGroup
from testbed.topology.features import CHECKS
from testbed.topology.fields import FOLDER
from testbed.topology.schema import SOURCE, USER_CODE, Topology
from testbed.topology.shared_definitions import share_definitions
from testbed.topology.yamlfile import BOUNDARY_KEY, Boundary, Document, Problem, Where
from testbed.user_code import KINDS, RaisedError, StandIn, UserCode, stand_in

RESERVED = (AGGREGATOR, CONTROLLER, ROUTER, "broker", MPS, "server", "mqtt", "control")
"""The names of the run's other processes, and the host names of the broker, which would lead to the
device instead of the broker."""
_MAX_GROUPS = 2_000
_BUILT_IN_TRAINING_ONLY = ("steps", "epochs", "last_batch", "lr_by_step", "optimizer", "momentum",
                           "weight_decay", "clip_gradient", "precision", "proximal",
                           "fednova")  # fmt: skip
"""Settings of local training without effect if the task trains by code of its own."""
_LOCAL_STEPS_ONLY = {
    "optimizer": "sgd",
    "lr_by_step": None,
    "lr_by_version": None,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "proximal": 0.0,
    "clip": None,
}
"""Settings and their defaults. They have no effect on clients that send a single gradient."""


def load(path: Path, limits: Boundary | None = None) -> Topology:
    """`limits`: if the file is somebody else's. Raises BadInputError that lists all errors with their
    places."""
    return validate(yamlfile.read(path), limits)


def parse(text: str, name: str = "<text>", limits: Boundary | None = None) -> Topology:
    """Errors call the text `name`."""
    return validate(yamlfile.parse(text, name), limits)


def json_schema() -> dict[str, Any]:
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | share_definitions(fleets.json_schema())


def validate(document: Document, limits: Boundary | None = None) -> Topology:
    """Fill in all defaults. Nothing outside of `limits` is read, imported or started. Raises
    FaultyFileError that lists all errors."""
    # Checked first: otherwise each key of another file, or each of too many devices, gives an error.
    for problem in (_other_kind_problem(document), _too_many_devices_problem(document)):
        if problem is not None:
            raise document.source.error([problem])
    document = _without_extensions(document)
    problems = list(_name_problems(document))
    code, classes, wrong = _read_user_code(document, limits)
    problems += wrong
    folder = Path(document.source.name).parent.absolute()
    context = {**classes, FOLDER: folder, SOURCE: document.source, USER_CODE: code, BOUNDARY_KEY: limits}
    topology, document = fleets.read(document, problems, context)
    problems += [*document.problems, *_conflicts(topology, document)]
    if problems:
        raise document.source.error(problems)
    devices = tuple(group.spelled_out(topology.task.local) for group in topology.devices)
    return topology.model_copy(update={"devices": devices})


def _without_extensions(document: Document) -> Document:
    """Drop top-level keys that begin with `x-`. As in Compose, they only hold values that aliases
    elsewhere in the file refer to."""
    if not isinstance(document.data, dict):
        return document
    data = {key: value for key, value in document.data.items() if not key.startswith("x-")}
    return replace(document, data=data)


def _read_user_code(
    document: Document, limits: Boundary | None
) -> tuple[UserCode | None, dict[str, dict[str, type[StandIn]]], list[Problem]]:
    """Return the code, and stand-ins for the user's classes by kind and name.
    The topology is not validated yet."""
    data, source = document.data if isinstance(document.data, dict) else {}, document.source
    path, code = data.get("code"), None
    if isinstance(path, str):
        try:
            place = (Path(source.name).parent / path).absolute()
            if limits is not None:
                limits.inside(place)
                limits.program("own code, which is imported and trained here")
            code = UserCode.read(place)
        except (ValueError, OSError) as error:
            reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            return None, {}, [source.problem(("code",), reason)]
    classes: dict[str, dict[str, type[StandIn]]] = {}
    problems: list[Problem] = []
    for kind in KINDS:
        part = data.get(kind)
        name = part.get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or not user_code.is_user_code(name):
            continue
        try:
            if kind != "task" and name in user_code.HOSTS:
                mend = ": `testbed rules` lists the rules" if kind == "rule" else ""
                raise ValueError(f"{name} is a task, not a {kind}{mend}")
            if code is None:
                if path is None:
                    what = "runs your own code" if name in user_code.HOSTS else "is a class of your own"
                    raise ValueError(f"{name} {what}: add code with its file, such as code: mine.py")
                continue  # `code` is not a text: validation reports it
            classes[kind] = {name: stand_in(code, kind, name)}
        except (ValueError, RaisedError) as error:
            message = str(error)
            if isinstance(error, RaisedError):
                message = f"importing it raises\n{message}{_import_hint(message, code)}"
            problems.append(source.problem((kind, "name"), message))
            if isinstance(error, RaisedError):
                break  # importing the same code for another kind would most likely fail in the same way
    return code, classes, problems


def _import_hint(traceback: str, code: UserCode | None) -> str:
    """Line with the mend for a missing module. Empty for other errors, and if the user's own package
    lacks the module."""
    found = re.search(r"^ModuleNotFoundError: No module named '(\w+)", traceback, re.MULTILINE)
    if not found or code is None:
        return ""
    files = [Path(file) for file in sorted(code.files) if file.endswith(".py")]
    name, modules = found[1], [file.with_suffix("").parts for file in files]
    if any(parts[0] == name for parts in modules):
        return ""
    if own := next((parts for parts in modules if name in parts), None):
        module = ".".join(own[: own.index(name) + 1])
        return f"\n{name} is a module of `code`: import it as {module}"
    return (
        "\nThe topology is checked on this host, which lacks this package: install it with "
        "python -m pip install, and add it to requirements"
    )


def _groups(document: Document) -> tuple[Any, ...]:
    devices = document.data.get("devices") if isinstance(document.data, dict) else None
    return (devices,) if isinstance(devices, dict) else devices if isinstance(devices, tuple) else ()


def _other_kind_problem(document: Document) -> Problem | None:
    """Return a problem if the file is clearly not a topology."""
    if not isinstance(document.data, dict) or document.data.keys() & Topology.model_fields.keys():
        return None
    message = (
        "this is not a topology, which has the keys name, task, rule, devices and stop: name another "
        "file"
    )
    if "topology" in document.data:
        message = f"this is a sweep, not a topology: run testbed sweep {document.source.name}"
    return document.source.problem((), message)


def _too_many_devices_problem(document: Document) -> Problem | None:
    groups = _groups(document)
    counts = [group.get("count") for group in groups if isinstance(group, dict)]
    # Validation reports a count that is not a number, or too high by itself.
    devices = sum(n for n in counts if isinstance(n, int) and 0 < n <= MAX_DEVICES)
    if len(groups) > _MAX_GROUPS:
        fix = "put equal devices into one group with count"
        message = f"found {len(groups):,} groups, expected at most {_MAX_GROUPS:,}: {fix}"
    elif devices > MAX_DEVICES:
        message = f"found {devices:,} devices, expected at most {MAX_DEVICES:,} in total: lower count"
    else:
        return None
    return document.source.problem(("devices",), message)


def _name_problems(document: Document) -> Iterator[Problem]:
    """Works even if other parts of the topology are invalid."""
    first: dict[str, int] = {}
    for index, group in enumerate(_groups(document)):
        where = ("devices", index, "name")
        for name in _names(group):
            if name in RESERVED:
                yield document.source.problem(
                    where, f"found {name!r}, the name of a process of the run: choose another name"
                )
            elif first.get(name, index) != index:
                line = document.source.place(("devices", first[name], "name")).line
                yield document.source.problem(
                    where,
                    f"the name {name!r} is already used on line {line}: rename one of the two",
                )
                break
            first.setdefault(name, index)


def _names(group: Any) -> tuple[str, ...]:
    """Commands accept the names of groups and of devices."""
    try:
        fields = {key: group[key] for key in ("name", "count", "hosts") if key in group}
        made = DeviceGroup.model_validate({**fields, "cpu": 1.0})
        return made.name, *made.device_names
    except (TypeError, ValidationError):
        return ()


def _conflicts(topology: Topology, document: Document) -> Iterator[Problem]:
    """`topology` was read from `document`."""
    empty = (group for group in topology.devices if group.data and group.data.samples == 0)
    idle, devices = sum(len(group.device_names) for group in empty), len(topology.device_names)
    if idle == devices:
        message = "every device has samples: 0, so that none can train: raise it for at least one"
        yield document.source.problem(("devices",), message, at_key=True)
        return
    for part, settings in topology.exchangeable.items():
        try:
            settings.build().check(devices if part == "task" else devices - idle)
        except ValueError as error:
            yield validation_errors.conflict(document, (part,), error)
    yield from scenario.problems(
        topology.scenario, topology.churn, topology.devices, document.source, topology.segment_names
    )
    for where, message in _contradictions(topology):
        yield document.source.problem(where, message, at_key=True)


def _local_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """Conflicts of a group's local training with the task's, or with the rule."""
    sends_gradients = topology.rule.build().client_side.kind == "gradient"
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index, "local")
        try:
            local = topology.task.local.changed_by(group.local).build()
        except ValueError as error:
            yield where, f"conflicts with task.local: {error}"
            continue
        steps = [name for name, default in _LOCAL_STEPS_ONLY.items() if getattr(local, name) != default]
        if sends_gradients and steps:
            own = steps[0] in group.local.model_fields_set
            mend = "use clip_gradient" if steps[0] == "clip" else "remove this"
            yield (
                ((*where, steps[0]) if own else ("task", "local", steps[0])),
                f"the clients of {topology.rule.name} send one gradient and make no local steps: {mend}",
            )


def _contradictions(topology: Topology) -> Iterator[tuple[Where, str]]:
    task, groups = topology.task, topology.devices
    side: ClientSide = topology.rule.build().client_side
    if side.kind == "residual" and topology.bounds.build().norm is not None:
        yield (
            ("bounds", "norm"),
            f"clients of {topology.rule.name} rely on their updates being applied unchanged: remove "
            "this",
        )
    if topology.requirements and topology.code is None:
        yield ("requirements",), "only your own code imports these packages: add code, or remove this"
    for check in CHECKS:
        yield from check(topology)
    yield from _local_problems(topology)
    if not topology.rule.build().takes_fednova:
        places: list[Where] = [("task",)] if task.local.build().fednova else []
        places += [
            ("devices", index) for index, group in enumerate(groups) if group.local.build().fednova
        ]
        for where in places:
            yield (
                (*where, "local", "fednova"),
                f"the rule {topology.rule.name} does not accept normalised updates: remove this, or "
                "choose a rule that does (see testbed rules)",
            )
    for place in topology.compression_places() if side.kind == "residual" else ():
        yield (
            place,
            f"clients of {topology.rule.name} rely on their updates being applied unchanged: remove "
            "this",
        )
    for index, group in enumerate(groups):
        encoding = [step.name for step in group.update_steps if STEPS[step.name].field is not None]
        if len(encoding) > 1:
            yield (
                ("devices", index),
                f"both {' and '.join(encoding)} encode the updates: keep one of them",
            )
        if group.transfers is not None and topology.server.link is not None:
            yield (
                ("server", "link"),
                "the durations of transfers are given, as of a recorded run, and include the server's "
                "link: remove this",
            )
        if group.gflops is not None and task.flops_per_step is None:
            yield (
                ("devices", index, "gflops"),
                "needs the number of operations per step: add task.flops_per_step, such as "
                "flops_per_step: 1e6",
            )
    if task.build().fits:
        yield from _own_training_conflicts(topology, side)
    if task.brings_shards and task.partition.scheme != "iid":
        yield (
            ("task", "partition"),
            f"the task {task.name} has its own data for each device: remove this",
        )
    if task.brings_shards:
        places = [("task", "data")] if task.data is not None else []
        places += [("devices", index, "data") for index, group in enumerate(groups) if group.data]
        for where in places:
            yield where, f"the task {task.name} has its own data for each device: remove this"
    has_target = topology.stop.build().target_accuracy is not None
    if has_target and not task.build().has_accuracy:
        yield (
            ("stop", "target_accuracy"),
            f"the task {task.name} has no accuracy: remove this, and add after or updates",
        )
    if has_target and topology.evaluate.when == "after":
        yield (
            ("stop", "target_accuracy"),
            "with evaluate.when: after, accuracy is not known during the run: remove this and add after "
            "or updates, or write evaluate.when: during",
        )


def _own_training_conflicts(topology: Topology, side: ClientSide) -> Iterator[tuple[Where, str]]:
    """Settings that have no effect on a task that trains by code of its own."""
    name = topology.task.name
    if side.kind == "gradient":
        yield (
            ("rule", "name"),
            f"{topology.rule.name} needs gradients, but {name} trains by its own code: choose another "
            "rule",
        )
    if side.adds_terms:
        yield (
            ("rule", "name"),
            f"{topology.rule.name} adds terms to the local objective, but {name} trains by its own "
            "code: choose another rule",
        )
    plain = config.LocalTraining(steps=1)
    found: list[tuple[Where, config.LocalTraining]] = [(("task", "local"), topology.task.local.build())]
    found += [
        (("devices", index, "local"), group.local.build())
        for index, group in enumerate(topology.devices)
        if group.local != topology.task.local
    ]
    for where, local in found:
        for setting in _BUILT_IN_TRAINING_ONLY:
            if getattr(local, setting) not in (None, getattr(plain, setting)):
                yield (
                    (*where, setting),
                    f"{name} trains by its own code: keep only steps: 1, lr and optionally clip here, "
                    "and set everything else in that code",
                )
