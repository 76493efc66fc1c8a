"""The topology as it is written: its settings, with their types, defaults and descriptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from agents import config
from agents.pipeline import differential
from agents.pipeline.secure import settings
from agents.pipeline.secure.step import SecureAggregation
from agents.rules import RULES
from agents.tasks import TASKS
from testbed.topology import yamlfile
from testbed.topology.data_settings import Data
from testbed.topology.devices import DeviceGroup, Local, ServerLink
from testbed.topology.fields import (
    Choice,
    Count,
    FilePath,
    Model,
    Name,
    OneOf,
    Parameters,
    Positive,
    PositiveSeconds,
    PositiveShare,
    Requirement,
    Seconds,
    Variant,
    expecting,
    with_fields_of,
)
from testbed.topology.partition import SCHEMES
from testbed.topology.scenario import Churn, Entry
from testbed.topology.yamlfile import Source
from testbed.traits import RUNTIMES
from testbed.user_code.code import UserCode


def _with_length(local: Local) -> Local:
    if local.build().steps is None and local.build().epochs is None:
        raise ValueError("found neither steps nor epochs, expected one of them such as steps: 20")
    return local


class Partition(Variant):
    """Which samples each device has."""

    tag: ClassVar[str] = "scheme"
    scheme: str


class Task(Variant):
    """What is learned, from which data, and how."""

    name: str
    importance: Literal["uniform", "samples"] = Field(
        default="uniform", description="What a client counts for in the objective: 1/N, or its samples"
    )
    data: Data | None = Field(default=None, exclude_if=lambda data: data is None)
    partition: Annotated[Partition, OneOf(SCHEMES)] = Field(
        default={"scheme": "iid"},
        validate_default=True,
        description="How the training samples are divided among the devices",
    )
    local: Annotated[Local, AfterValidator(_with_length)]
    initial: FilePath | None = Field(
        default=None,
        description="File of the model to begin with, relative to the topology: safetensors or a state "
        "dict by torch.save, or a model of another run, such as runs/x/models/final.safetensors",
    )
    frozen: tuple[str, ...] = Field(
        default=(),
        description="Parameters that neither train nor travel: patterns of their names, such as "
        "[features.*]",
    )
    flops_per_step: Positive | None = Field(
        default=None, description="Operations of one mini-batch step, for devices with gflops"
    )

    @property
    def brings_shards(self) -> bool:
        """Whether the task brings each device its own data."""
        return self.build().dataset is None


class Rule(Variant):
    """How updates become the next global model."""

    name: str


class Server(Model):
    """The aggregator's own access link, shared by all transfers; in virtual time."""

    link: ServerLink | None = None


def _at_least_one(groups: tuple[DeviceGroup, ...]) -> tuple[DeviceGroup, ...]:
    if not groups:
        raise ValueError("found no device, expected at least one such as {name: nano, cpu: 0.25}")
    return groups


class Evaluate(Model):
    """How often the global model is evaluated, on what, and when."""

    every: PositiveSeconds = Field(
        default=2.0, json_schema_extra={"default": "2s"}, description="Device time between evaluations"
    )
    on: Literal["test", "validation", "clients"] = Field(
        default="test",
        description="The test set; the validation set; or the clients' training data, each client "
        "counting by its importance: the loss is then the federated one",
    )
    samples: Count | None = Field(
        default=None,
        description="At most so many of the test set, drawn once for all seeds; so many per client of "
        "the clients' data, drawn with replacement",
    )
    classes: bool = Field(
        default=False, description="Also loss and accuracy on each class of the evaluated samples"
    )
    devices: Count | None = Field(
        default=None,
        description="Also loss and accuracy on each device's own training data, on at most so many of "
        "its samples, drawn once for all seeds",
    )
    when: Literal["during", "after"] = Field(
        default="during",
        description="during: while the run goes, as often as `every` where that takes less; a run that "
        "is over waits 30 s of the host for the last. after: the models of each `every` are kept and "
        "evaluated once the run is over, however long that takes, so that it disturbs nothing. In "
        "virtual time there is no difference",
    )
    cores: Count | None = Field(
        default=None,
        description="So many of the host's cores are for evaluations alone, and none of the devices'; "
        "without this, evaluations run on the core of broker and aggregator, which go first",
    )

    @model_validator(mode="after")
    def _has_samples(self) -> Self:
        if self.on == "clients" and self.samples is None:
            raise ValueError(
                "found on: clients without samples; say how many of each client, such as samples: 300"
            )
        return self


@with_fields_of(config.StopConditions)
class Stop(Parameters):
    """The run ends at whichever comes first."""


@with_fields_of(config.UpdateBounds)
class Bounds(Parameters):
    """What an update may be at most; one over a bound is dropped with a reason, or clipped."""


@with_fields_of(settings.SecureParameters)
class Secure(Parameters):
    """Secure aggregation: the server gets sums of updates, and no single one."""


@with_fields_of(differential.DifferentialPrivacy)
class Differential(Parameters):
    """Differential privacy of each client: updates are clipped, and Gaussian noise is added."""


class Privacy(Model):
    """What is not to be learned of a client (docs/guide/privacy.md)."""

    secure: Secure | None = Field(default=None, exclude_if=lambda secure: secure is None)
    differential: Differential | None = Field(default=None, exclude_if=lambda found: found is None)


class Start(Model):
    """The run clock starts when all clients are ready, or at the timeout when a quorum of them is."""

    timeout: PositiveSeconds = Field(
        default=300.0,
        json_schema_extra={"default": "5min"},
        description="How long to wait for the clients; with fewer than the quorum the run then fails",
    )
    quorum: PositiveShare = Field(default=1.0, description="Share of the clients")


class Broker(Model):
    """The MQTT broker of the run."""

    tls: bool = Field(
        default=False, description="Encrypt what clients and broker send each other, over the links"
    )


class Runtime(Model):
    """Where the devices run; auto takes docker where an engine answers, else process."""

    name: Annotated[str, Choice("auto", *RUNTIMES)] = "auto"
    shaper: Literal["auto", "netem", "tbf+delay"] = Field(
        default="auto",
        description="What makes delay, jitter and loss of links: the kernel's netem, or a router; auto "
        "takes netem where the kernel has it. For docker",
    )
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        exclude_if=lambda device: device == "cpu",
        description="cuda: all trainings are computed on this host's GPU. For process and virtual; in "
        "docker a device has its gpu",
    )
    registry: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*$"),
            expecting("a registry such as registry.example:5000/team"),
        ]
        | None
    ) = Field(
        default=None,
        exclude_if=lambda registry: registry is None,
        description="Where images are pushed, and other machines pull them from; without one they are "
        "copied. For swarm",
    )


class Virtual(Model):
    """What virtual time takes as given, in place of measuring or assuming it."""

    step_time: PositiveSeconds | None = Field(
        default=None,
        description="One mini-batch step on a whole host core, for the virtual time of devices with "
        "cpu; measured where not given",
    )
    sliced_step_time: PositiveSeconds | None = Field(
        default=None,
        description="The same at a share of an eighth of a core, in slices with pauses; at other shares "
        "by their logarithm; where not given: measured with step_time, else as it",
    )
    start_time: Seconds | None = Field(
        default=None,
        description="From the order to start a client during the run until it is ready, likewise; where "
        "not given: 0 with a given step_time, else 3s",
    )
    update_time: Seconds | None = Field(
        default=None,
        description="CPU time on a whole core of an update beside its steps, likewise; where not "
        "given: 0 with a given step_time, else 3ms",
    )
    mask_time: PositiveSeconds | None = Field(
        default=None,
        description="CPU time on a whole core of an update's mask and its shares (privacy.secure), "
        "likewise; where not given: measured with `packets`, else 0",
    )
    share_time: PositiveSeconds | None = Field(
        default=None,
        description="And of a share of a mask that is sent or received, likewise",
    )
    answer_time: PositiveSeconds | None = Field(
        default=None,
        description="And of a sum of shares that the server asks for, likewise",
    )
    packets: bool | None = Field(
        default=None,
        description="Transfers in virtual time are in packets, as on emulated links: with headers, and "
        "the first after a pause passes at once; where not given: where the time of a step is measured",
    )

    def filled(self, others: Iterable[tuple[str, Any]]) -> Virtual:
        """With the values of `others`, by key, for keys that are not given here."""
        found = {name: value for name, value in others if getattr(self, name) is None}
        return self.model_copy(update=found)


SOURCE, USER_CODE = "source", "user_code"
"""Keys of the validation's context: the file of a topology, and the user's own code."""


class Topology(Model):
    """An experiment of asynchronous federated learning on emulated edge devices."""

    name: Name = Field(description="What runs of it are called: lower-case letters, digits and -")
    seed: Annotated[int, Field(ge=0, lt=2**63), expecting("a whole number from 0 on")] = Field(
        default=0, description="Of all random draws: the partition, the first model, faults, and so on"
    )
    code: FilePath | None = Field(
        default=None,
        description="A Python file, or a folder of modules, with the task or rule called module:Class; "
        "by its path from this file",
    )
    requirements: Annotated[
        tuple[Requirement, ...],
        Field(description="Packages that the code imports, as for pip; for the agents' image"),
    ] = ()
    task: Annotated[Task, OneOf(TASKS, own="task")]
    rule: Annotated[Rule, OneOf(RULES, own="rule")]
    devices: Annotated[
        tuple[DeviceGroup, ...],
        Field(json_schema_extra={"minItems": 1}),
        AfterValidator(_at_least_one),
    ]
    server: Server = Server()
    dilation: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=1)],
        Field(
            description="Seconds of the host that make one of device time; auto: the least at which the "
            "devices fit on this host"
        ),
        expecting("auto, or a number from 1 on"),
    ] = 1.0
    scenario: tuple[Entry, ...] = Field(default=(), description="What happens to devices, and when")
    churn: Churn | None = None
    evaluate: Evaluate = Evaluate()
    stop: Stop
    start: Start = Start()
    bounds: Bounds = Bounds()
    privacy: Privacy | None = Field(default=None, exclude_if=lambda privacy: privacy is None)
    broker: Broker = Broker()
    durability: config.Durability = Field(
        default="update",
        description="What is kept, and what a crash of the aggregator takes. none: the run; checkpoint: "
        "what came after its last checkpoint; update: nothing that it has acknowledged; recording: "
        "nothing, and every update stays, for testbed replay",
    )
    runtime: Runtime = Runtime()
    virtual: Virtual = Field(default=Virtual(), exclude_if=lambda virtual: virtual == Virtual())
    _source: Source = PrivateAttr(default=Source())
    _user_code: UserCode | None = PrivateAttr(default=None)

    @property
    def source(self) -> Source:
        """Its file, for errors that point at a place in it."""
        return self._source

    @property
    def hints(self) -> tuple[str, ...]:
        """Sentences on what its files say in words of the version before this one, each once."""
        return tuple(dict.fromkeys(self._source.hints))

    @property
    def user_code(self) -> UserCode | None:
        """What `code` names, as it was when this was read."""
        return self._user_code

    @property
    def secure(self) -> SecureAggregation | None:
        """Secure aggregation; None: updates travel as they are. Raises ValueError where the rule cannot
        do with sums."""
        if self.privacy is None or self.privacy.secure is None:
            return None
        wanted: settings.SecureParameters = self.privacy.secure.build()
        sums = self.rule.build().sums()
        names, noise = self.device_names, self.differential
        return SecureAggregation(
            clients=names,
            updates=sums.updates,
            largest_weight=wanted.weights if sums.weighted else 1,
            colluding=wanted.colluding,
            needed=wanted.needed_of(len(names)),
            range=wanted.range,
            bits=wanted.bits,
            timeout=wanted.timeout,
            norm=noise.clip if noise is not None and noise.at == "server" else None,
        )

    @property
    def differential(self) -> differential.DifferentialPrivacy | None:
        """Differential privacy, as the user wants it."""
        if self.privacy is None or self.privacy.differential is None:
            return None
        wanted: differential.DifferentialPrivacy = self.privacy.differential.build()
        return wanted

    @property
    def update_steps(self) -> list[config.Named]:
        """What all clients do to their updates (`agents.pipeline`), beside what single ones do."""
        secure, wanted, steps = self.secure, self.differential, []
        if wanted is not None:
            rounding = 0.0 if secure is None else secure.grid.step
            params = {**dataclasses.asdict(wanted), "seed": self.seed, "rounding": rounding}
            steps.append(config.Named("differential", params))
        if secure is not None:
            steps.append(config.Named("secure", dataclasses.asdict(secure)))
        return steps

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(name for group in self.devices for name in group.device_names)

    def model_post_init(self, context: Any) -> None:
        """Keep the file, and the user's own code, that the validation's context names."""
        self._source = (context or {}).get(SOURCE, self._source)
        self._user_code = (context or {}).get(USER_CODE)

    def to_yaml(self, code: str | None = None) -> str:
        """With all defaults; `testbed.topology.parse` reads an equal topology back. `code`: another path
        of the same code."""
        data = self.model_dump(mode="json", by_alias=True)
        return yamlfile.write(data if code is None else data | {"code": code})
