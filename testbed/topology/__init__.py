"""The topology: the YAML file of a run (docs/guide/topology.md).

`load` returns it with all defaults filled in, and the local training of each group. Its settings are in
`testbed.topology.schema`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agents import user_code
from agents.mqtt.topics import AGGREGATOR, CONTROLLER, ROUTER
from testbed.host.gpus import MPS
from testbed.topology import consistency, old_words, validation_errors, yamlfile
from testbed.topology.devices import MAX_DEVICES, DeviceGroup, Local
from testbed.topology.fields import FOLDER
from testbed.topology.misplaced_keys import BELONGS
from testbed.topology.schema import SOURCE, USER_CODE, Runtime, Stop, Topology, Virtual
from testbed.topology.yamlfile import Document, Problem
from testbed.user_code.code import UserCode
from testbed.user_code.inspector import RaisedError
from testbed.user_code.stand_ins import Kind, StandIn, stand_in

__all__ = [
    "RESERVED",
    "Runtime",
    "Stop",
    "Topology",
    "Virtual",
    "checked",
    "json_schema",
    "load",
    "parse",
]

RESERVED = (AGGREGATOR, CONTROLLER, ROUTER, "broker", MPS, "server", "mqtt", "control")
"""Names of the run's other processes, and host names of its broker: a device of such a name would find
itself in its place."""
_MAX_GROUPS = 2_000
_INSTALL = (
    "\nA topology is checked with the packages of this host: install it with python -m pip install, and "
    "name it under requirements"
)
_KINDS: tuple[Kind, ...] = ("task", "rule")


def load(path: Path) -> Topology:
    """Read a topology file. Raises BadInputError that lists all that is wrong with it, and where."""
    return checked(yamlfile.read(path))


def parse(text: str, name: str = "<text>") -> Topology:
    """`load` of a text instead of a file; `name` is for errors."""
    return checked(yamlfile.parse(text, name))


def json_schema() -> dict[str, Any]:
    """JSON Schema of the topology file, for editors."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | Topology.model_json_schema()


def checked(document: Document) -> Topology:
    """`load` of a file that has been parsed. Raises FaultyFileError."""
    if (other := _no_topology(document)) is not None:  # else every key of it would be an error
        raise document.source.error([other])
    if (too_many := _too_many_devices(document)) is not None:  # before each of them is looked at
        raise document.source.error([too_many])
    document = old_words.translated(document)
    problems = list(_name_problems(document))
    code, classes, wrong = _read_user_code(document)
    problems += wrong
    folder = Path(document.source.name).parent.absolute()
    context = {**classes, FOLDER: folder, SOURCE: document.source, USER_CODE: code}
    topology = validation_errors.validated(Topology, document, problems, context, BELONGS)
    problems += [*document.problems, *consistency.conflicts(topology, document)]
    if problems:
        raise document.source.error(problems)
    devices = tuple(_spelled_out(group, topology.task.local) for group in topology.devices)
    return topology.model_copy(update={"devices": devices})


def _read_user_code(
    document: Document,
) -> tuple[UserCode | None, dict[str, dict[str, type[StandIn]]], list[Problem]]:
    """The code of a topology not yet validated; its classes by name, of task and rule; and what is wrong
    with these."""
    data, source = document.data if isinstance(document.data, dict) else {}, document.source
    path, code = data.get("code"), None
    if isinstance(path, str):
        try:
            code = UserCode.read((Path(source.name).parent / path).absolute())
        except (ValueError, OSError) as error:
            reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            return None, {}, [source.problem(("code",), reason)]
    classes: dict[str, dict[str, type[StandIn]]] = {}
    problems: list[Problem] = []
    for kind in _KINDS:
        part = data.get(kind)
        name = part.get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or not user_code.is_user_code(name):
            continue
        try:
            if kind == "rule" and name in user_code.HOSTS:
                raise ValueError(f"{name} is a task, no rule: `testbed rules` lists those")
            if code is None:
                if path is None:
                    what = "runs code" if name in user_code.HOSTS else "is a class"
                    raise ValueError(
                        f"{name} {what} of your own: add code with its file, as in code: mine.py"
                    )
                continue  # an error of its own
            classes[kind] = {name: stand_in(code, kind, name)}
        except (ValueError, RaisedError) as error:
            message = str(error)
            if isinstance(error, RaisedError):
                hint = _INSTALL if "ModuleNotFoundError" in message else ""
                message = f"importing it raises\n{message}{hint}"
            problems.append(source.problem((kind, "name"), message))
            if isinstance(error, RaisedError):
                break  # the other one is likely to say the same
    return code, classes, problems


def _spelled_out(group: DeviceGroup, local: Local) -> DeviceGroup:
    changes: dict[str, Any] = {"local": local.changed_by(group.local)}
    if group.profile is None:  # a profile may have its memory
        changes["memory"] = group.memory or group.default_memory
    return group.model_copy(update=changes)


def _groups(document: Document) -> tuple[Any, ...]:
    """The device groups of a topology not yet validated."""
    devices = document.data.get("devices") if isinstance(document.data, dict) else None
    return devices if isinstance(devices, tuple) else ()


def _no_topology(document: Document) -> Problem | None:
    """What is wrong with a file of something else."""
    if not isinstance(document.data, dict) or document.data.keys() & Topology.model_fields.keys():
        return None
    message = (
        "this is no topology, which has the keys name, task, rule, devices and stop: name another file"
    )
    if "topology" in document.data:
        message = f"this is a sweep, and no topology: testbed sweep {document.source.name}"
    return document.source.problem((), message)


def _too_many_devices(document: Document) -> Problem | None:
    groups = _groups(document)
    counts = [group.get("count") for group in groups if isinstance(group, dict)]
    # A count that is no count, or is too high by itself, has an error of its own.
    devices = sum(n for n in counts if isinstance(n, int) and 0 < n <= MAX_DEVICES)
    if len(groups) > _MAX_GROUPS:
        fix = "give equal devices in one, with count"
        message = f"found {len(groups):,} groups, expected at most {_MAX_GROUPS:,}: {fix}"
    elif devices > MAX_DEVICES:
        message = f"found {devices:,} devices, expected at most {MAX_DEVICES:,} in all: lower count"
    else:
        return None
    return document.source.problem(("devices",), message)


def _name_problems(document: Document) -> Iterator[Problem]:
    """Equal names of devices, and names of the run's own processes, also if other parts are faulty."""
    first: dict[str, int] = {}
    for index, group in enumerate(_groups(document)):
        where = ("devices", index, "name")
        for name in _names(group):
            if name in RESERVED:
                yield document.source.problem(
                    where, f"found {name!r}, expected another name: a process of the run has it"
                )
            elif first.get(name, index) != index:
                line = document.source.place(("devices", first[name], "name")).line
                yield document.source.problem(
                    where,
                    f"a device or group named {name!r} is there already, from line {line}; rename one",
                )
                break
            first.setdefault(name, index)


def _names(group: Any) -> tuple[str, ...]:
    """The names of a group not yet validated, and of its devices: commands take either."""
    try:
        fields = {key: group[key] for key in ("name", "count") if key in group}
        made = DeviceGroup.model_validate({**fields, "cpu": 1.0})
        return made.name, *made.device_names
    except (TypeError, ValidationError):
        return ()
