"""Files to begin with: a task, a rule or a topology that runs unchanged, the examples, and published
traces of links and devices for a topology (docs/guide/traces.md)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Literal

from agents.disk import files
from testbed import bundle
from testbed.errors import BadInputError, writable_file, writable_folder

_TEMPLATES = Path(__file__).parents[1] / "catalog" / "new"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
_EXAMPLES = {"topologies": bundle.TOPOLOGIES, "notebooks": bundle.NOTEBOOKS}
"""Folder in the copy -> folder that is copied."""


def new(kind: Literal["task", "rule", "topology"], name: str, folder: str | Path = ".") -> list[Path]:
    """Write the topology `name`.yaml into `folder`. For a task or a rule, also write a Python file with
    its code. Return the paths of the files. Raises BadInputError if a file exists already, or `name` is
    not a valid name."""
    match kind:
        case "task":
            return _with_class(name, kind, Path(folder), rule="fedbuff, buffer_size: 2")
        case "rule":
            return _with_class(name, kind, Path(folder), task="digits-logreg")
        case "topology":
            text = _topology(_check_name(name), "", "digits-logreg", "fedbuff, buffer_size: 2")
            return _write(Path(folder), {f"{name}.yaml": text})


def examples(folder: str | Path = "examples") -> list[Path]:
    """Copy the topologies and notebooks that come with the testbed into `folder`; return the paths of
    the copies. Raises BadInputError if one of the copies exists already."""
    to = Path(folder)
    if there := [name for name in _EXAMPLES if (to / name).exists()]:
        raise BadInputError(f"{to / there[0]} exists already: name another folder")
    writable_folder(to, "")
    ignored = shutil.ignore_patterns("__pycache__", ".*", "runs")
    for name, origin in _EXAMPLES.items():
        shutil.copytree(origin, to / name, ignore=ignored)
    return [to / name for name in _EXAMPLES]


def _with_class(name: str, kind: str, folder: Path, **others: str) -> list[Path]:
    module = _check_name(name).replace("-", "_")
    if bundle.is_taken(module):
        raise BadInputError(f"{name}: Python already has a module {module}; choose another name")
    cls = "".join(word.capitalize() for word in name.split("-"))
    own = {kind: f'"{module}:{cls}"', **others}
    code = f"code: {module}.py  # relative to this file"
    source = (_TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    source = source.replace(f"My{kind.capitalize()}", cls)
    text = _topology(name, code, own["task"], own["rule"])
    return _write(folder, {f"{name}.yaml": text, f"{module}.py": source})


def _topology(name: str, code: str, task: str, rule: str) -> str:
    text = (_TEMPLATES / "topology.yaml").read_text(encoding="utf-8")
    text = text.replace("CODE\n", f"{code}\n" if code else "")
    return _align_comments(text.replace("NAME", name).replace("TASK", task).replace("RULE", rule))


def _align_comments(text: str) -> str:
    lines = [line.partition("  # ") for line in text.splitlines()]
    column = max(len(content) for content, mark, _ in lines if mark)
    return "".join(
        f"{content.ljust(column) if mark else content}{mark}{rest}\n" for content, mark, rest in lines
    )


def _check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise BadInputError(
            f"{name!r} is not a valid name: expected at most 40 lower-case letters, digits and -, "
            "such as my-rule"
        )
    return name


def _write(folder: Path, files: dict[str, str]) -> list[Path]:
    """Write all `files` (name -> text), or none of them. Raises BadInputError if one of the files exists
    already."""
    paths = {folder / name: text for name, text in files.items()}
    if there := [str(path) for path in paths if path.exists()]:
        raise BadInputError(f"{' and '.join(there)} would be overwritten: choose another name")
    for path in paths:
        writable_file(path, "")
    for path, text in paths.items():
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
    return [*paths]


_MOST_BYTES = 2 * 2**30


def convert_trace(
    form: str, file: str | Path, *, direction: Literal["down", "up"] = "down", scale: float = 1.0
) -> str:
    """Convert a published 3G, LTE, 5G or Wi-Fi trace in the format `form` to the CSV text that
    `link: {trace: {csv: …}}` reads. `direction`: direction of the link that the trace is for. `scale`:
    factor for all rates. Raises BadInputError."""
    from testbed.topology import link_traces  # imports the whole schema of topologies

    path = Path(file)
    if form == "mahimahi":
        raise BadInputError(
            f"a mahimahi trace needs no conversion: write link: {{trace: {{{direction}: {file}}}}}"
        )
    if form not in link_traces.PUBLISHED_FORMATS:
        raise BadInputError(
            f"unknown format {form!r}, expected one of {', '.join(link_traces.PUBLISHED_FORMATS)}"
        )
    lines = _read(path).decode("utf-8-sig", "replace").splitlines()
    about = f"{path.name}, as {form}" + (f", times {scale:g}" if scale != 1 else "")
    try:
        samples = link_traces.PUBLISHED_FORMATS[form](lines)
        return link_traces.as_csv(samples, direction, scale=scale, source=about)
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from error


def fedscale_devices(
    capacity: str | Path,
    behaviour: str | Path | None = None,
    *,
    count: int = 10,
    seed: int = 0,
    cpu: float | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    begin: str = "0s",
    length: str | None = None,
    speed_up: float = 1.0,
    topology: str | Path | None = None,
) -> str:
    """Draw `count` devices from FedScale's traces; return them as device groups of a topology (YAML).

    `capacity`: the file client_device_capacity. `behaviour`: the file client_behave_trace; None if
    devices are always available. `cpu`: CPU share of the fastest device, in cores of the host; None if
    devices have no CPU share. `steps`: number of local steps for which the training time (`timing`) of
    each device is computed; None if devices get no training time. `batch_size`: samples per step. At
    least one of `cpu` and `steps` is needed.

    `begin`: time in the availability trace to begin at. `length`: duration of the part to use; None for
    the whole trace, repeated. `speed_up`: factor by which the availability trace is sped up. `topology`:
    path of a topology. If it is set, the result is a copy of that topology with the drawn devices.
    Raises BadInputError.
    """
    from testbed.fleets import fedscale
    from testbed.topology import parse, units, yamlfile

    if cpu is None and steps is None:
        raise BadInputError(
            "give --cpu (share of a core for the fastest device), or --steps (for a training time)"
        )
    try:
        since, span = units.duration(begin), None if length is None else units.duration(length)
    except ValueError as error:
        raise BadInputError(f"--from {begin}, --for {length}: {error}") from error
    behaviours = None if behaviour is None else _entries(Path(behaviour))
    try:
        chosen = fedscale.draw_clients(_entries(Path(capacity)), behaviours, count, seed)
        groups = fedscale.device_groups(
            chosen,
            cpu=cpu,
            steps=steps,
            batch_size=batch_size,
            begin=since,
            length=span,
            speed_up=speed_up,
        )
    except ValueError as error:
        raise BadInputError(
            f"{capacity if behaviour is None else f'{capacity}, {behaviour}'}: {error}"
        ) from error
    numbers = ", ".join(client.number for client in chosen)
    head = f"# From FedScale's traces, seed {seed}: clients {numbers}\n"
    text = head + yamlfile.write({"devices": groups})
    if topology is not None:
        try:
            text = yamlfile.with_block(Path(topology).read_text(encoding="utf-8"), "devices", text)
        except (ValueError, OSError) as error:
            raise BadInputError(f"{topology}: {error}") from error
        parse(text, str(topology))
    return text


def _entries(path: Path) -> dict[str, object]:
    from testbed.fleets import fedscale

    try:
        return fedscale.read(_read(path))
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return files.read(path, _MOST_BYTES)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from error
