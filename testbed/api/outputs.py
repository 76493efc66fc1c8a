"""Types of what each command prints with `--json`. `testbed schema COMMAND` prints their JSON Schema.

Names and units are stable; keys may be added. Unknown and missing values are null.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Generic, Literal

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from analysis.manifest import Verdict
from testbed.console import WrittenFiles
from testbed.errors import BadInputError
from testbed.topology.fields import docstrings


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run that was started in the background."""

    run: str
    """Run id."""
    directory: Path
    """Run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun(StartedRun):
    """A finished run."""

    runtime: str
    rule: str
    task: str
    outcome: str
    """Condition of `stop` that ended the run: `after`, `updates` or `target_accuracy`; or `diverged`."""
    verdict: Verdict
    duration_s: float
    """Duration in seconds of device time."""
    versions: int
    """Number of global models made, without the initial model."""
    updates: int
    """Number of updates that were applied."""
    dropped: int
    """Number of updates that arrived but were not applied. Duplicates do not count."""
    accuracy: float
    """Test accuracy at the last evaluation, 0 to 1; NaN if the run was never evaluated, or if the task
    has no accuracy."""
    best_accuracy: float
    """Highest test accuracy, 0 to 1; NaN as in `accuracy`."""
    loss: float
    """Test loss at the last evaluation; NaN if the run was never evaluated."""
    perplexity: float
    """Perplexity at the last evaluation; NaN if the run was never evaluated, or if the task has none."""


@dataclass(frozen=True, slots=True)
class ComponentLog:
    """The last lines of the log of a component of a run."""

    component: str
    text: str


@dataclass(frozen=True, slots=True)
class ValidTopology:
    """A topology without errors. If a topology has errors, the command prints the errors on standard
    error, and exits with 2."""

    topology: Path
    """Path of the file."""
    rule: str
    task: str
    devices: int
    """Number of devices."""


@dataclass(frozen=True, slots=True)
class SentAction:
    """An action that was carried out on a device."""

    device: str
    action: str


@dataclass(frozen=True, slots=True)
class Tracked:
    """Runs that were sent to a tracker."""

    tracker: str
    told: str
    """Reply of the tracker, such as where to find the runs."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """CPU time of training steps of a device in a run."""

    run: str
    """Name of the run."""
    device: str
    cpu: float
    """Share of a core."""
    trainings: int
    """Number of trainings that were evaluated."""
    step: float
    """Mean CPU time of a step, in seconds."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """CPU time of training steps in runs."""

    virtual: dict[str, str | bool]
    """Settings for a topology's key `virtual`. With these settings, virtual time assumes the costs in
    `devices`."""
    devices: Sequence[DeviceStep]


@dataclass(frozen=True, slots=True)
class BuiltImages:
    """Tags of the images of a run's containers."""

    agent: str
    broker: str
    base: str
    gpu: str | None
    """Image for devices with a GPU; None if it was not built."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A device profile or a link class, with all its figures as in a profiles file; or a population,
    with its kinds of devices."""

    __pydantic_config__: ClassVar = {"extra": "allow"}

    name: str
    kind: Literal["device", "link", "population"]
    description: str
    source: str


_ACTIONS = ("set", "charge", "unplug", "kill", "restart", "pause", "resume", "disconnect", "reconnect")
_WRITERS = ("report", "new task", "new rule", "new topology", "new examples")


def _one(place: str) -> Callable[[], Any]:
    """Return a function that imports the type at `place`, because many modules are slow to import."""
    return lambda: resolve_name(place)


def _list(place: str) -> Callable[[], Any]:
    return lambda: list[resolve_name(place)]  # type: ignore[misc]


def _catalog(place: str) -> Callable[[], Any]:
    """Return a function for the entry at `place`: all entries, or the one that the command names."""
    return lambda: _list(place)() | resolve_name(place)


OUTPUTS: dict[str, Callable[[], Any]] = {
    "up": lambda: FinishedRun | StartedRun,
    "ps": _list("testbed.runtimes:LiveRun"),
    "runs": _list("testbed.rundir.listing:RunRow"),
    "down": _list("testbed.runtimes:LiveRun"),
    "logs": lambda: list[ComponentLog],
    "validate": lambda: ValidTopology,
    "plan": _list("testbed.plan.plan_tables:DeviceRow"),
    "data": _one("testbed.data.distribution:SampleSummary"),
    "evaluate": _list("testbed.api.handle:EvaluationRow"),
    "replay": _one("testbed.run.replay:ReplayResult"),
    **dict.fromkeys(_ACTIONS, lambda: list[SentAction]),
    **dict.fromkeys(("sweep", "compare"), _one("analysis.comparison:Comparison")),
    "agree": _one("testbed.api.studies:Agreement"),
    "twin": lambda: _one("testbed.api.twins:ComparedTwins")() | WrittenFiles,
    "export": lambda: WrittenFiles | Tracked,
    "pack": _one("testbed.api.packing:PackResult"),
    "rules": _catalog("testbed.api.catalog:RuleEntry"),
    "selections": _catalog("testbed.api.catalog:SelectionEntry"),
    "tasks": _catalog("testbed.api.catalog:TaskEntry"),
    "profiles": lambda: list[Profile] | WrittenFiles,
    "calibrate": lambda: resolve_name("testbed.speed:HostSpeed") | StepTimes | list[FinishedRun],
    "doctor": _list("testbed.api.machine:Finding"),
    "images list": _list("testbed.images.building:StoredImage"),
    "images build": lambda: BuiltImages,
    "images prune": _list("testbed.images.building:StoredImage"),
    **dict.fromkeys(_WRITERS, lambda: WrittenFiles),
}
"""Command -> function that returns the type of its JSON output."""


class _Schema(GenerateJsonSchema):
    """Schema of what `print_json` prints. The docstrings of fields are descriptions."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        return _described(super().dataclass_schema(schema), schema["cls"])

    def model_schema(self, schema: Any) -> dict[str, Any]:
        return _described(super().model_schema(schema), schema["cls"])

    def float_schema(self, schema: Any) -> dict[str, Any]:
        """Return the schema of a number. Null is printed for one that is not finite."""
        number = super().float_schema(schema)
        finite = schema.get("allow_inf_nan") is False
        return number if finite else {"anyOf": [number, {"type": "null"}]}


def _described(made: dict[str, Any], cls: type) -> dict[str, Any]:
    made.setdefault("additionalProperties", False)
    made["required"] = [*made["properties"]]
    for base in reversed([one for one in cls.__mro__ if one not in (object, Generic, BaseModel)]):
        for name, text in docstrings(base).items():
            if name in made["properties"]:
                made["properties"][name]["description"] = text
    return made


@functools.cache
def schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of the output of `command`. Raises BadInputError if the command prints no
    JSON."""
    if command not in OUTPUTS:
        raise BadInputError(f"no command {command!r} prints JSON; these do: {', '.join(OUTPUTS)}")
    adapter: TypeAdapter[Any] = TypeAdapter(OUTPUTS[command]())
    text = json.dumps(adapter.json_schema(mode="serialization", schema_generator=_Schema))
    made: dict[str, Any] = json.loads(re.sub(r"\b(None|NaN)\b", "null", text))  # as JSON calls them
    return made
