"""The topology: one YAML file that says what a run is (ARCHITECTURE.md, "Topology").

`load` gives it resolved: every default filled in, every group with its own local training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from agents import config
from agents.durations import DISTRIBUTIONS
from agents.rules import RULES
from agents.tasks import TASKS
from agents.topics import AGGREGATOR, CONTROLLER
from testbed import complaints, yamlfile
from testbed.fields import (
    SECONDS_SCHEMA,
    Count,
    Memory,
    Model,
    Name,
    NotNegative,
    OneOf,
    Positive,
    PositiveSeconds,
    PositiveShare,
    Rate,
    Variant,
    expecting,
)
from testbed.yamlfile import Document, Problem, Source

RESERVED = (AGGREGATOR, CONTROLLER, "broker")
"""Names of the run's other processes."""

_MOST_DEVICES = 10_000  # of one group


class Local(Model):
    """Local training of one round: SGD on the device's shard. Give steps or epochs."""

    steps: Count | None = Field(default=None, description="Mini-batch steps per round")
    epochs: Count | None = Field(default=None, description="Passes over the shard per round")
    batch_size: Count = 32
    lr: Positive = Field(default=0.1, description="Step size")
    momentum: Annotated[float, Field(ge=0, lt=1), expecting("a number from 0 to below 1")] = 0.0
    proximal: NotNegative = Field(default=0.0, description="FedProx's mu")
    clip: Positive | None = Field(default=None, description="Upper bound of an update's l2 norm")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("found both steps and epochs, expected one of them")
        return self

    def changed_by(self, other: Local) -> Local:
        """What `other` says, and where `other` is silent what this one says."""
        changes = {name: getattr(other, name) for name in other.model_fields_set}
        if changes.get("steps") or changes.get("epochs"):
            changes = {"steps": None, "epochs": None} | changes
        return self.model_copy(update=changes)

    def plain(self) -> config.Local:
        return config.Local(**self.model_dump())


def _says_how_long(local: Local) -> Local:
    if local.steps is None and local.epochs is None:
        raise ValueError("found neither steps nor epochs, expected one of them such as steps: 20")
    return local


class Iid(Model):
    """Every shard is drawn from the whole."""

    scheme: Literal["iid"] = "iid"

    @property
    def params(self) -> dict[str, float]:
        return {}


class Dirichlet(Model):
    """Each class is dealt out in shares drawn from Dirichlet(alpha): the smaller, the more skewed."""

    scheme: Literal["dirichlet"]
    alpha: Positive

    @property
    def params(self) -> dict[str, float]:
        return {"alpha": self.alpha}


class Task(Variant):
    """What is learned, from which data, and how."""

    name: str
    importance: Literal["uniform", "samples"] = Field(
        default="uniform", description="What a client counts for in the objective: 1/N, or its samples"
    )
    partition: Annotated[Iid | Dirichlet, Field(discriminator="scheme")] = Iid()
    local: Annotated[Local, AfterValidator(_says_how_long)]

    @property
    def named(self) -> config.Named:
        return config.Named(self.name, self.params)

    @property
    def dataset(self) -> str:
        """Name in `testbed.data.DATASETS`."""
        return TASKS[self.name].dataset


class Rule(Variant):
    """How updates become the next global model."""

    name: str

    @property
    def named(self) -> config.Named:
        return config.Named(self.name, self.params)


class Link(Model):
    """Access link of each device of the group; a rate left out is unlimited."""

    up: Rate | None = None
    down: Rate | None = None

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.up is None and self.down is None:
            raise ValueError("found neither up nor down, expected a rate such as up: 5mbit")
        return self

    def plain(self) -> config.Link:
        return config.Link(self.up, self.down)


class Think(Variant):
    """Extra delay of a device before it sends an update."""

    tag: ClassVar[str] = "distribution"
    distribution: str

    def plain(self) -> config.Duration:
        return config.Duration(self.distribution, self.params)


class _OrConstant:
    """Annotates a Think: `200ms` is short for `{distribution: constant, value: 200ms}`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._spell_out, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [SECONDS_SCHEMA, handler(schema)]}

    @staticmethod
    def _spell_out(value: Any) -> Any:
        if isinstance(value, str):
            return {"distribution": "constant", "value": value}
        if not isinstance(value, dict):
            raise ValueError(
                "expected a duration such as 200ms, or a distribution such as "
                "{distribution: exponential, mean: 200ms}"
            )
        return value


class DeviceGroup(Model):
    """One device, or `count` equal ones."""

    name: Name = Field(description="Of the device, or with count of name-1, name-2, ...")
    count: (
        Annotated[
            int,
            Field(ge=1, le=_MOST_DEVICES),
            expecting(f"a whole number of devices from 1 to {_MOST_DEVICES}"),
        ]
        | None
    ) = None
    # No default: how slow a device is, is what the experiment is about.
    cpu: Annotated[
        float,
        Field(gt=0, description="Share of one host core; above 1 is more than one core"),
        expecting("a positive share of one host core such as 0.25"),
    ]
    memory: Memory = Field(default=512 * 2**20, json_schema_extra={"default": "512MiB"})
    link: Link | None = None
    think: Annotated[Think, OneOf(DISTRIBUTIONS), _OrConstant()] | None = None
    local: Local = Field(default_factory=Local, description="What differs from task.local here")

    @property
    def device_names(self) -> tuple[str, ...]:
        if self.count is None:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(1, self.count + 1))


def _at_least_one(groups: tuple[DeviceGroup, ...]) -> tuple[DeviceGroup, ...]:
    if not groups:
        raise ValueError("found no device, expected at least one such as {name: nano, cpu: 0.25}")
    return groups


class Evaluate(Model):
    """How often the global model is put to the test set."""

    every: PositiveSeconds = Field(default=2.0, json_schema_extra={"default": "2s"})


class Stop(Model):
    """The run ends at whichever comes first."""

    after: PositiveSeconds | None = Field(default=None, description="Since the run clock started")
    updates: Count | None = Field(default=None, description="Updates applied")
    target_accuracy: PositiveShare | None = Field(default=None, description="On the test set")

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.after is None and self.updates is None and self.target_accuracy is None:
            raise ValueError(
                "found no condition, expected after, updates or target_accuracy such as after: 60s"
            )
        return self

    def plain(self) -> config.Stop:
        return config.Stop(self.after, self.updates, self.target_accuracy)


class Start(Model):
    """The run clock starts when all clients are ready, or at the timeout when a quorum of them is."""

    timeout: PositiveSeconds = Field(default=300.0, json_schema_extra={"default": "5min"})
    quorum: PositiveShare = Field(default=1.0, description="Share of the clients")


class Runtime(Model):
    """Where the devices run; auto takes docker where an engine answers, else process."""

    name: Literal["auto", "docker", "process"] = "auto"


class Topology(Model):
    """An experiment of asynchronous federated learning on emulated edge devices."""

    name: Name
    seed: Annotated[int, Field(ge=0, lt=2**63), expecting("a whole number from 0 on")] = 0
    task: Annotated[Task, OneOf(TASKS)]
    rule: Annotated[Rule, OneOf(RULES)]
    devices: Annotated[
        tuple[DeviceGroup, ...],
        Field(json_schema_extra={"minItems": 1}),
        AfterValidator(_at_least_one),
    ]
    evaluate: Evaluate = Evaluate()
    stop: Stop
    start: Start = Start()
    runtime: Runtime = Runtime()
    _source: Source = PrivateAttr(default=Source())

    @property
    def source(self) -> Source:
        """Where it was read, for errors that point at it."""
        return self._source

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(name for group in self.devices for name in group.device_names)

    def to_yaml(self) -> str:
        """Every default spelled out; `parse` reads an equal topology back."""
        return yamlfile.write(self.model_dump(mode="json"))


def load(path: Path) -> Topology:
    """Read a topology file. Raises BadInputError that lists all that is wrong with it, and where."""
    return _topology(yamlfile.read(path))


def parse(text: str, name: str = "<text>") -> Topology:
    """`load` of a text that no file holds; `name` is what errors call it."""
    return _topology(yamlfile.parse(text, name))


def json_schema() -> dict[str, Any]:
    """JSON Schema of the topology file, for editors."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | Topology.model_json_schema()


def _topology(document: Document) -> Topology:
    problems = [*document.problems, *_name_problems(document)]
    try:
        topology = Topology.model_validate(document.data)
    except ValidationError as error:
        problems += complaints.problems(error, document, Topology)
        raise document.source.error(problems) from None
    try:
        topology.rule.build().check(len(topology.device_names))
    except ValueError as error:
        problems.append(complaints.misfit(document, ("rule",), error))
    if problems:
        raise document.source.error(problems)
    devices = tuple(
        group.model_copy(update={"local": topology.task.local.changed_by(group.local)})
        for group in topology.devices
    )
    topology = topology.model_copy(update={"devices": devices})
    topology._source = document.source
    return topology


def _name_problems(document: Document) -> Iterator[Problem]:
    """Devices of one name, and names of the run's own processes, however broken the rest may be."""
    devices = document.data.get("devices") if isinstance(document.data, dict) else None
    first: dict[str, int] = {}
    for index, group in enumerate(devices if isinstance(devices, tuple) else ()):
        where = ("devices", index, "name")
        for name in _names(group):
            if name in RESERVED:
                yield document.source.problem(
                    where, f"found {name!r}, expected another name: the {name} of the run has it"
                )
            elif name in first:
                line = document.source.place(("devices", first[name], "name")).line
                yield document.source.problem(
                    where, f"a device named {name!r} is there already, from line {line}; rename one"
                )
                break
            first.setdefault(name, index)


def _names(group: Any) -> tuple[str, ...]:
    """The names of the devices of a group not yet validated."""
    try:
        fields = {key: group[key] for key in ("name", "count") if key in group}
        return DeviceGroup.model_validate({**fields, "cpu": 1.0}).device_names
    except (TypeError, ValidationError):
        return ()
