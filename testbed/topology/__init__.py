"""The topology: the YAML file that describes a run (docs/guide/topology.md).

`load` reads and validates a file, and fills in all defaults. The keys are defined in
`testbed.topology.schema`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agents import user_code
from agents.mqtt.topics import AGGREGATOR, CONTROLLER, ROUTER
from analysis.alike_devices import MAX_DEVICES
from testbed import fleets
from testbed.host.gpus import MPS
from testbed.topology import consistency, yamlfile
from testbed.topology.devices import DeviceGroup
from testbed.topology.fields import FOLDER
from testbed.topology.schema import SOURCE, USER_CODE, RuntimeSettings, StopSettings, Topology, Virtual
from testbed.topology.shared_definitions import share_definitions
from testbed.topology.yamlfile import BOUNDARY_KEY, Boundary, Document, Problem
from testbed.user_code import KINDS, RaisedError, StandIn, UserCode, stand_in

__all__ = [
    "RESERVED",
    "RuntimeSettings",
    "StopSettings",
    "Topology",
    "Virtual",
    "json_schema",
    "load",
    "parse",
    "validate",
]

RESERVED = (AGGREGATOR, CONTROLLER, ROUTER, "broker", MPS, "server", "mqtt", "control")
"""The names of the run's other processes, and the host names of the broker, which would lead to the
device instead of the broker."""
_MAX_GROUPS = 2_000


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
    problems += [*document.problems, *consistency.conflicts(topology, document)]
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
