"""The topology: the YAML file of a run (docs/topology.md).

`load` returns it with all defaults filled in, and the local training of each group.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator

from agents import config, own_code
from agents.messages import MAX_SUMMANDS
from agents.rules import RULES
from agents.rules.interface import ClientSide
from agents.secure import coding, quantised
from agents.tasks import TASKS
from agents.topics import AGGREGATOR, CONTROLLER, ROUTER
from testbed.host.gpus import MPS
from testbed.own_code import Code, Kind, StandIn
from testbed.own_code.inspector import RaisedError
from testbed.topology import scenario, validation_errors, yamlfile
from testbed.topology.data import Data
from testbed.topology.devices import MAX_DEVICES, DeviceGroup, Local, ServerLink
from testbed.topology.fields import (
    Choice,
    Count,
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
from testbed.topology.misplaced import BELONGS
from testbed.topology.partition import SCHEMES
from testbed.topology.scenario import Churn, Entry
from testbed.topology.yamlfile import Document, Problem, Source, Where
from testbed.traits import RUNTIMES

RESERVED = (AGGREGATOR, CONTROLLER, ROUTER, "broker", MPS, "server", "mqtt", "control")
"""Names of the run's other processes, and host names of its broker: a device of such a name would find
itself in its place."""


_MAX_GROUPS = 2_000
_INSTALL = (
    "\nA topology is checked with the packages of this host: install it with python -m pip install, and "
    "name it under requirements"
)
_KINDS: tuple[Kind, ...] = ("task", "rule")
_OF_OUR_TRAINING = ("steps", "epochs", "lr_by_step", "optimizer", "momentum", "weight_decay",
                    "clip_gradient", "precision", "proximal", "fednova")  # fmt: skip
"""Settings of local training without effect where a task trains by its own code."""


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
    initial: str | None = Field(
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


@with_fields_of(config.Stop)
class Stop(Parameters):
    """The run ends at whichever comes first."""


@with_fields_of(config.Bounds)
class Bounds(Parameters):
    """What an update may be at most; one over a bound is dropped with a reason, or clipped."""


@with_fields_of(config.Secure)
class Secure(Parameters):
    """Secure aggregation: the server gets sums of updates, and no single one."""


@with_fields_of(config.Differential)
class Differential(Parameters):
    """Differential privacy of each client: updates are clipped, and Gaussian noise is added."""


class Privacy(Model):
    """What is not to be learned of a client (docs/privacy.md)."""

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
    step_time: PositiveSeconds | None = Field(
        default=None,
        description="One mini-batch step on a whole host core, for the virtual time of devices with "
        "cpu; measured where not given",
    )
    sliced_step_time: PositiveSeconds | None = Field(
        default=None,
        exclude_if=lambda sliced_step_time: sliced_step_time is None,
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
        exclude_if=lambda mask_time: mask_time is None,
        description="CPU time on a whole core of an update's mask and its shares (privacy.secure), "
        "likewise; where not given: measured with `packets`, else 0",
    )
    share_time: PositiveSeconds | None = Field(
        default=None,
        exclude_if=lambda share_time: share_time is None,
        description="And of a share of a mask that is sent or received, likewise",
    )
    answer_time: PositiveSeconds | None = Field(
        default=None,
        exclude_if=lambda answer_time: answer_time is None,
        description="And of a sum of shares that the server asks for, likewise",
    )
    packets: bool | None = Field(
        default=None,
        description="Transfers in virtual time are in packets, as on emulated links: with headers, and "
        "the first after a pause passes at once; where not given: where the time of a step is measured",
    )


class Topology(Model):
    """An experiment of asynchronous federated learning on emulated edge devices."""

    name: Name = Field(description="What runs of it are called: lower-case letters, digits and -")
    seed: Annotated[int, Field(ge=0, lt=2**63), expecting("a whole number from 0 on")] = Field(
        default=0, description="Of all random draws: the partition, the first model, faults, and so on"
    )
    code: str | None = Field(
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
    record: Literal["nothing", "updates"] = Field(
        default="nothing",
        description="updates: keep every update that the aggregator got, for testbed replay",
    )
    broker: Broker = Broker()
    durability: Literal["update", "checkpoint", "none"] = Field(
        default="update",
        description="what a crash of the aggregator takes. update: nothing that it has acknowledged; "
        "checkpoint: what came after its last checkpoint; none: the run",
    )
    runtime: Runtime = Runtime()
    _source: Source = PrivateAttr(default=Source())
    _own_code: Code | None = PrivateAttr(default=None)

    @property
    def source(self) -> Source:
        """Its file, for errors that point at a place in it."""
        return self._source

    @property
    def own_code(self) -> Code | None:
        """What `code` names, as it was when this was read."""
        return self._own_code

    @property
    def secure(self) -> config.SecureRun | None:
        """Secure aggregation, as the agents are told of it; None: updates travel as they are. Raises
        ValueError where the rule cannot do with sums."""
        if self.privacy is None or self.privacy.secure is None:
            return None
        wanted: config.Secure = self.privacy.secure.build()
        sums = self.rule.build().sums()
        names = self.device_names
        return config.SecureRun(
            clients=names,
            updates=sums.updates,
            largest_weight=wanted.weights if sums.weighted else 1,
            colluding=wanted.colluding,
            needed=wanted.needed_of(len(names)),
            range=wanted.range,
            bits=wanted.bits,
            timeout=wanted.timeout,
        )

    @property
    def differential(self) -> config.Differential | None:
        """Differential privacy, as the clients are told of it."""
        if self.privacy is None or self.privacy.differential is None:
            return None
        differential: config.Differential = self.privacy.differential.build()
        return differential

    @property
    def server_noise(self) -> config.ServerNoise | None:
        """What the aggregator is told of it."""
        wanted = self.differential
        if wanted is None or wanted.at != "server":
            return None
        return config.ServerNoise(wanted.noise * wanted.clip, self.seed)

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(name for group in self.devices for name in group.device_names)

    def with_devices(self, devices: tuple[DeviceGroup, ...]) -> Topology:
        return self._with(devices=devices)

    def with_data(self, data: Data) -> Topology:
        return self.with_task(self.task.model_copy(update={"data": data}))

    def _with(self, **changes: Any) -> Topology:
        topology = self.model_copy(update=changes)
        topology._source = self._source
        topology._own_code = self._own_code
        return topology

    def with_code(self, path: str) -> Topology:
        """With the same code by another path."""
        return self._with(code=path)

    def with_task(self, task: Task) -> Topology:
        return self._with(task=task)

    def to_yaml(self) -> str:
        """With all defaults; `parse` reads an equal topology back."""
        return yamlfile.write(self.model_dump(mode="json", by_alias=True))


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
    problems = list(_name_problems(document))
    code, classes, wrong = _read_own_code(document)
    problems += wrong
    topology = validation_errors.validated(Topology, document, problems, classes, BELONGS)
    problems += [*document.problems, *_conflicts(topology, document)]
    if problems:
        raise document.source.error(problems)
    devices = tuple(_spelled_out(group, topology.task.local) for group in topology.devices)
    if code is not None:
        topology = topology.model_copy(update={"code": str(code.path)})  # from wherever it is read
    topology._source, topology._own_code = document.source, code
    return topology.with_devices(devices)


def _read_own_code(
    document: Document,
) -> tuple[Code | None, dict[str, dict[str, type[StandIn]]], list[Problem]]:
    """The code of a topology not yet validated; its classes by name, of task and rule; and what is wrong
    with these."""
    data, source = document.data if isinstance(document.data, dict) else {}, document.source
    path, code = data.get("code"), None
    if isinstance(path, str):
        try:
            code = Code.read((Path(source.name).parent / path).absolute())
        except (ValueError, OSError) as error:
            reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            return None, {}, [source.problem(("code",), reason)]
    classes: dict[str, dict[str, type[StandIn]]] = {}
    problems: list[Problem] = []
    for kind in _KINDS:
        part = data.get(kind)
        name = part.get("name") if isinstance(part, dict) else None
        if not isinstance(name, str) or not own_code.is_own(name):
            continue
        try:
            if kind == "rule" and name in own_code.HOSTS:
                raise ValueError(f"{name} is a task, no rule: `testbed rules` lists those")
            if code is None:
                if path is None:
                    what = "runs code" if name in own_code.HOSTS else "is a class"
                    raise ValueError(
                        f"{name} {what} of your own: add code with its file, as in code: mine.py"
                    )
                continue  # an error of its own
            classes[kind] = {name: code.stand_in(kind, name)}
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
        changes["memory"] = group.memory_limit
    return group.model_copy(update=changes)


def _conflicts(topology: Topology, document: Document) -> Iterator[Problem]:
    """Parts that are valid by themselves and do not go together."""
    for part, parameters in (("rule", topology.rule.build()), ("task", topology.task.build())):
        try:
            parameters.check(len(topology.device_names))
        except ValueError as error:
            yield validation_errors.conflict(document, (part,), error)
    yield from scenario.problems(topology.scenario, topology.churn, topology.devices, document.source)
    for where, message in _contradictions(topology):
        yield document.source.problem(where, message, at_key=True)


def _local_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """What of a group's local training does not go with that of the task, or with the rule."""
    sends_gradients = topology.rule.build().client_side.kind == "gradient"
    for index, group in enumerate(topology.devices):
        where: Where = ("devices", index, "local")
        try:
            local = topology.task.local.changed_by(group.local).build()
        except ValueError as error:
            yield where, f"with what task.local says: {error}"
            continue
        steps = [name for name, default in _OF_STEPS.items() if getattr(local, name) != default]
        if sends_gradients and steps:
            own = steps[0] in group.local.model_fields_set
            mend = "take clip_gradient" if steps[0] == "clip" else "remove this"
            yield (
                ((*where, steps[0]) if own else ("task", "local", steps[0])),
                f"the clients of {topology.rule.name} send one gradient and take no step: {mend}",
            )


def _differential_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """Rules with which noise would not do what is told of it."""
    wanted, rule = topology.differential, topology.rule
    if wanted is None:
        return
    where: Where = ("privacy", "differential")
    side: ClientSide = rule.build().client_side
    if side.kind == "residual":
        yield (
            where,
            f"clients of {rule.name} remember what they trained, and not the noise, which would add up: "
            "remove this",
        )
    if topology.durability == "checkpoint":
        yield (
            where,
            "durability: checkpoint makes versions anew after a crash, and noise that was drawn for one "
            "would be added to another: write durability: update",
        )
    if wanted.at == "server":
        for place in _compressed(topology):
            yield (
                place,
                "what is sent may be longer than clip, as it is compressed after it was clipped, and "
                "noise at the server would not hide it: remove this, or write at: client",
            )
        try:
            rule.build().sums()
        except ValueError as error:
            yield (
                (*where, "at"),
                f"the rule {rule.name} has no sum of a buffer to which noise could be added ({error}): "
                "write at: client",
            )
    if importlib.util.find_spec("dp_accounting") is None:
        yield (
            where,
            "the accountant is not installed here: python -m pip install 'dp-accounting>=0.4.4'",
        )


def _privacy_problems(topology: Topology) -> Iterator[tuple[Where, str]]:
    """What cannot be done without the single updates, and sums that would leave the field."""
    yield from _differential_problems(topology)
    where: Where = ("privacy", "secure")
    try:
        secure = topology.secure
    except ValueError as error:
        yield where, f"the rule {topology.rule.name} cannot do with sums of updates: {error}"
        return
    if secure is None:
        return
    if (problem := coding.unfit(len(secure.clients), secure.needed, secure.colluding)) is not None:
        yield (*where, "needed"), problem
    if (problem := quantised.overflow(secure.updates, secure.largest_weight, secure.bits)) is not None:
        yield (*where, "bits"), problem
    if secure.updates > MAX_SUMMANDS:
        yield where, f"sums of {secure.updates} updates, expected at most {MAX_SUMMANDS}"
    side: ClientSide = topology.rule.build().client_side
    if side.kind == "residual" and topology.task.importance != "uniform":
        yield (
            ("task", "importance"),
            f"weights in a secure sum are rounded, which would move the limit of {topology.rule.name}: "
            "take importance: uniform",
        )
    if topology.bounds.build().norm is not None:
        yield (
            ("bounds", "norm"),
            "with privacy.secure the server sees no update whose norm it could bound: remove this; "
            "task.local.clip bounds it at the client",
        )
    for place in _compressed(topology):
        yield (
            place,
            "masked updates look random and cannot be made smaller: remove this, or lower "
            "privacy.secure.bits",
        )


def _compressed(topology: Topology) -> Iterator[Where]:
    """Where compression is asked for."""
    for index, group in enumerate(topology.devices):
        if group.link is not None and group.link.compression is not None:
            yield ("devices", index, "link", "compression")


_OF_STEPS = {
    "optimizer": "sgd",
    "lr_by_step": None,
    "lr_by_version": None,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "proximal": 0.0,
    "clip": None,
}
"""Settings of local steps and of what these come to, with their defaults."""


def _contradictions(topology: Topology) -> Iterator[tuple[Where, str]]:
    task, groups = topology.task, topology.devices
    side: ClientSide = topology.rule.build().client_side
    if side.kind == "residual" and topology.bounds.build().norm is not None:
        yield (
            ("bounds", "norm"),
            f"clients of {topology.rule.name} count on what they sent to be applied whole: remove this",
        )
    if topology.requirements and topology.code is None:
        yield ("requirements",), "nothing of ours imports them: add code, or remove this"
    yield from _local_problems(topology)
    yield from _privacy_problems(topology)
    if not topology.rule.build().takes_fednova:
        places: list[Where] = [("task",)] if task.local.build().fednova else []
        places += [
            ("devices", index) for index, group in enumerate(groups) if group.local.build().fednova
        ]
        for where in places:
            yield (
                (*where, "local", "fednova"),
                f"the rule {topology.rule.name} does not take normalised updates: remove this, or "
                "take a rule that does (testbed rules shows them)",
            )
    accesses: dict[str, config.Access] = {}
    for place in _compressed(topology) if side.kind == "residual" else ():
        yield (
            place,
            f"clients of {topology.rule.name} count on what they sent to be applied whole: remove this",
        )
    for index, group in enumerate(groups):
        access = None if group.access is None else group.access.build()
        if access is not None and accesses.setdefault(access.name, access) != access:
            yield (
                ("devices", index, "access"),
                f"{access.name} has other rates before: write the same, or give it another name",
            )
        if group.gflops is not None and task.flops_per_step is None:
            yield (
                ("devices", index, "gflops"),
                "how long a step takes is not known: add task.flops_per_step, such as "
                "flops_per_step: 1e6",
            )
    if task.build().fits:
        yield from _settings_of_ours(topology, side)
    if task.brings_shards and task.partition.scheme != "iid":
        yield (
            ("task", "partition"),
            f"the task {task.name} brings each device its own data: remove this",
        )
    if task.brings_shards:
        places = [("task", "data")] if task.data is not None else []
        places += [("devices", index, "data") for index, group in enumerate(groups) if group.data]
        for where in places:
            yield where, f"the task {task.name} brings each device its own data: remove this"
    has_target = topology.stop.build().target_accuracy is not None
    if has_target and not task.build().has_accuracy:
        yield (
            ("stop", "target_accuracy"),
            f"the task {task.name} has no accuracy: remove this, and give after or updates",
        )
    if has_target and topology.evaluate.when == "after":
        yield (
            ("stop", "target_accuracy"),
            "with evaluate.when: after no accuracy is known before the run is over: remove this, and "
            "give after or updates; or write when: during",
        )


def _settings_of_ours(topology: Topology, side: ClientSide) -> Iterator[tuple[Where, str]]:
    """What has no effect on a task that trains by its own code."""
    name = topology.task.name
    if side.kind == "gradient":
        yield (
            ("rule", "name"),
            f"{topology.rule.name} wants gradients, and {name} trains by its own code: take another",
        )
    plain = config.Local(steps=1)
    found: list[tuple[Where, config.Local]] = [(("task", "local"), topology.task.local.build())]
    found += [
        (("devices", index, "local"), group.local.build())
        for index, group in enumerate(topology.devices)
        if group.local != topology.task.local
    ]
    for where, local in found:
        for setting in _OF_OUR_TRAINING:
            if getattr(local, setting) not in (None, getattr(plain, setting)):
                yield (
                    (*where, setting),
                    f"{name} trains by its own code: write steps: 1, lr and perhaps clip, and set all "
                    "else in that code",
                )


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
