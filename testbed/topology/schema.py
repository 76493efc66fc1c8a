"""Keys of a topology, with types, defaults and descriptions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from agents import config
from agents.pipeline import differential
from agents.rules import RULES
from agents.secure import arithmetic
from agents.secure.step import SecureAggregation
from agents.selection import SELECTIONS
from agents.tasks import TASKS
from testbed.segments.schema import SegmentSettings, all_segments
from testbed.topology import yamlfile
from testbed.topology.data_settings import DataSettings
from testbed.topology.devices import DeviceGroup, LocalSettings
from testbed.topology.fields import (
    Count,
    FilePath,
    IpAddress,
    Model,
    Name,
    NameChoice,
    OneOf,
    Parameters,
    Positive,
    PositiveSeconds,
    PositiveShare,
    Requirement,
    Seconds,
    Variant,
    expecting,
    needs_trust,
    optional,
    with_fields_of,
)
from testbed.topology.links import ServerLink
from testbed.topology.partition import SCHEMES
from testbed.topology.scenario import Churn, ScenarioEntry, devices_by_group, expand
from testbed.topology.yamlfile import Source, Where
from testbed.traits import RUNTIMES
from testbed.user_code import UserCode


def _with_length(local: LocalSettings) -> LocalSettings:
    if local.build().steps is None and local.build().epochs is None:
        raise ValueError("found neither steps nor epochs, expected one of them such as steps: 20")
    return local


class Partition(Variant):
    """Which samples each device has."""

    tag: ClassVar[str] = "scheme"
    scheme: str


class TaskSettings(Variant):
    """Learning task: model, data and local training."""

    name: str
    importance: Literal["uniform", "samples"] = optional(
        "Weight of each client in the objective: equal (1/N), or in proportion to its number of samples",
        "uniform",
    )
    data: DataSettings | None = optional(hidden=True)
    partition: Annotated[Partition, OneOf(SCHEMES)] = optional(
        "How the training samples are divided among the devices",
        {"scheme": "iid"},
        validate_default=True,
    )
    local: Annotated[LocalSettings, AfterValidator(_with_length)]
    initial: FilePath | None = optional(
        "File with the initial model, relative to the topology file: safetensors, a state dict of "
        "torch.save, or a model of another run, such as runs/x/models/final.safetensors"
    )
    frozen: tuple[str, ...] = optional(
        "Parameters that are neither trained nor sent: patterns of their names, such as [features.*]", ()
    )
    flops_per_step: Positive | None = optional(
        "Operations of one mini-batch step, for devices with gflops"
    )

    @property
    def brings_shards(self) -> bool:
        """A task with its own data for each device divides no dataset."""
        return self.build().dataset is None


class RuleSettings(Variant):
    """Aggregation rule, which says how updates change the global model."""

    name: str


class SelectionSettings(Variant):
    """Selection of the clients that train next, for a rule that draws clients."""

    name: str


class ServerSettings(Model):
    """The server that runs broker and aggregator."""

    link: ServerLink | None = optional(
        "Access link that all transfers share. Default: unlimited. In virtual time only"
    )
    address: IpAddress | None = optional(
        "Address of this host on which the broker listens for real devices (`hosts`), such as "
        "192.168.1.10",
        hidden=True,
    )
    port: Annotated[int, Field(ge=1, le=65_535), expecting("a port from 1 to 65535")] = optional(
        "Port at `address`. A firewall of this host must let the real devices reach it",
        8883,
        hidden=True,
    )


class EvaluationSettings(Model):
    """How often the global model is evaluated, on what, and when."""

    every: PositiveSeconds = optional(
        "Device time between evaluations", 2.0, json_schema_extra={"default": "2s"}
    )
    on: Literal["test", "validation", "clients"] = optional(
        "Data to evaluate on: the test set, the validation set, or the clients' training data, with "
        "each client weighted by its importance (the federated loss)",
        "test",
    )
    samples: Count | None = optional(
        "Number of samples to evaluate on. Of the test or validation set: maximum number, drawn once "
        "for all seeds; default: all. With on: clients: number per client, drawn with replacement"
    )
    classes: bool = optional(
        "Also evaluate loss and accuracy for each class of the samples", default=False
    )
    devices: Count | None = optional(
        "Also evaluate loss and accuracy on each device's own training data. The value is the maximum "
        "number of samples per device, drawn once for all seeds. Default: no"
    )
    when: Literal["during", "after"] = optional(
        "during: evaluate during the run. If an evaluation takes longer than `every`, there are fewer "
        "evaluations. At its end, the run waits at most 30 s (of the host) for the last one. after: "
        "keep the model of each `every`, and evaluate all of them after the run, so that evaluation "
        "does not disturb the run. In virtual time, there is no difference",
        "during",
    )
    cores: Count | None = optional(
        "Number of the host's cores to reserve for evaluations. Default: evaluations run on the core of "
        "broker and aggregator, with lower priority"
    )

    @model_validator(mode="after")
    def _has_samples(self) -> Self:
        if self.on == "clients" and self.samples is None:
            raise ValueError(
                "found on: clients without samples; add their number per client, such as samples: 300"
            )
        return self


@with_fields_of(config.StopConditions)
class StopSettings(Parameters):
    """When the run ends: as soon as one of the conditions below is met. Needs at least one condition."""


@with_fields_of(config.UpdateBounds)
class BoundsSettings(Parameters):
    """Upper bounds of updates. If an update exceeds a bound, it is dropped with a recorded reason, or
    clipped."""


@with_fields_of(arithmetic.SecureParameters)
class SecureSettings(Parameters):
    """Secure aggregation: the server learns sums of updates, but no single update."""


@with_fields_of(differential.DifferentialPrivacy)
class DifferentialSettings(Parameters):
    """Differential privacy of each client: updates are clipped, and Gaussian noise is added."""


class PrivacySettings(Model):
    """Protection of the clients' data (docs/guide/privacy.md)."""

    secure: SecureSettings | None = optional(hidden=True)
    differential: DifferentialSettings | None = optional(hidden=True)


class StartSettings(Model):
    """When the run clock starts. It starts as soon as all clients are ready. At the timeout, it starts
    if a quorum of the clients is ready."""

    timeout: PositiveSeconds = optional(
        "Maximum time to wait for the clients. If fewer than the quorum are ready then, the run fails",
        300.0,
        json_schema_extra={"default": "5min"},
    )
    quorum: PositiveShare = optional("Share of the clients that must be ready at the timeout", 1.0)


class BrokerSettings(Model):
    """The MQTT broker of the run."""

    tls: bool = optional("Encrypt the traffic between clients and broker with TLS", default=False)


class RuntimeSettings(Model):
    """Runtime of the devices, and its settings."""

    name: Annotated[str, NameChoice("auto", *RUNTIMES)] = optional(
        "docker: containers on this host; process: local processes; swarm: containers on a Docker "
        "Swarm; virtual: simulated time. auto: docker if an engine answers, else process",
        "auto",
    )
    shaper: Literal["auto", "netem", "tbf+delay"] = optional(
        "How delay, jitter and loss of links are emulated: by the kernel's netem, or by a router "
        "(tbf+delay). auto: netem if the kernel has it. In runtime docker only",
        "auto",
    )
    device: Literal["cpu", "cuda"] = optional(
        "cuda: all devices train on this host's GPU. In runtimes process and virtual only; for docker, "
        "use gpu of a device group",
        "cpu",
        hidden=True,
    )
    registry: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*$"),
            expecting("a registry such as registry.example:5000/team"),
            needs_trust("a registry to push images to"),
        ]
        | None
    ) = optional(
        "Registry to which images are pushed, and from which other machines pull them. Default: images "
        "are copied to the machines. In runtime swarm only",
        hidden=True,
    )


class Virtual(Model):
    """Costs that virtual time assumes. A key without a value is measured on this host, or has the
    default in its description."""

    step_time: PositiveSeconds | None = optional(
        "CPU time of a mini-batch step on a whole core, for devices with cpu. Default: measured on this "
        "host"
    )
    sliced_step_time: PositiveSeconds | None = optional(
        "CPU time of a mini-batch step at a share of 1/8 of a core, at which a device computes in "
        "slices with pauses. For other shares, the time is interpolated over the logarithm of the "
        "share. Default: measured with step_time; if step_time is set, equal to step_time"
    )
    start_time: Seconds | None = optional(
        "Time from the order to start a client during the run until it is ready. A device without cpu, "
        "such as one with timing or gflops alone, is ready at once. Default: 3s; if step_time is set, 0"
    )
    update_time: Seconds | None = optional(
        "CPU time of an update on a whole core, in addition to its steps. Default: 3ms; if step_time is "
        "set, 0"
    )
    mask_time: PositiveSeconds | None = optional(
        "CPU time on a whole core to make an update's mask and its shares (privacy.secure). Default: "
        "measured if `packets` is on, else 0"
    )
    share_time: PositiveSeconds | None = optional(
        "CPU time on a whole core per mask share sent or received. Default: measured if `packets` is "
        "on, else 0"
    )
    answer_time: PositiveSeconds | None = optional(
        "CPU time on a whole core per sum of shares that the server asks for. Default: measured if "
        "`packets` is on, else 0"
    )
    packets: bool | None = optional(
        "Whether to simulate packets, as on emulated links. Their headers use bandwidth. After a pause, "
        "a burst of packets may exceed the link's rate (token bucket). Default: true if step_time is "
        "measured"
    )

    def with_defaults(self, defaults: Iterable[tuple[str, Any]]) -> Virtual:
        found = {name: value for name, value in defaults if getattr(self, name) is None}
        return self.model_copy(update=found)


SOURCE, USER_CODE = "source", "user_code"
Keys = dict[str, Any]
"""Keys of a device group, in the notation of a topology."""
FLEET = "fleet.json"
"""File beside a topology: group -> device -> keys (`MadeFleet.keys`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class MadeFleet:
    """Devices that `testbed.fleets` made."""

    written: tuple[Keys | None, ...] = ()
    """Each group of the file: its keys there, or None if it is a plain group of the topology."""
    keys: Mapping[str, Mapping[str, Keys]] = dataclasses.field(default_factory=dict)
    """Group of the file -> device -> its drawn or recorded keys."""
    hints: tuple[str, ...] = ()
    """Sentences for the user."""

    def to_json(self) -> str:
        """Write `keys`, a line per device."""
        groups = []
        for group, devices in self.keys.items():
            each = (f"  {json.dumps(name)}: {json.dumps(keys)}" for name, keys in devices.items())
            lines = ",\n".join(each)
            groups.append(f" {json.dumps(group)}: {{\n{lines}\n }}")
        return "{\n" + ",\n".join(groups) + "\n}\n"


class Topology(Model):
    """An experiment of asynchronous federated learning on emulated edge devices."""

    name: Name = Field(
        description="Name of the experiment, from which run ids are made: lower-case letters, digits "
        "and -"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63), expecting("a whole number of at least 0")] = optional(
        "Seed of all random draws: the partition, the initial model, faults, and others", 0
    )
    code: FilePath | None = optional(
        "Python file, or folder of modules, with your own task, rule or selection (module:Class), "
        "relative to the topology file"
    )
    requirements: Annotated[
        tuple[Requirement, ...],
        Field(
            description="Packages that your own code imports, in pip's notation; they are added to the "
            "agents' image"
        ),
        needs_trust("packages to install"),
    ] = ()
    task: Annotated[TaskSettings, OneOf(TASKS, own="task")]
    rule: Annotated[RuleSettings, OneOf(RULES, own="rule")]
    selection: Annotated[SelectionSettings, OneOf(SELECTIONS, own="selection")] | None = optional(
        "Which idle clients train next, if the rule draws clients. Default: the rule draws uniformly, "
        "and no draw is recorded",
        hidden=True,
    )
    devices: tuple[DeviceGroup, ...]
    network: dict[Name, SegmentSettings] = optional(
        "Links that devices share, by name: a tree with the server behind its roots. Default: none",
        {},
        hidden=True,
    )
    server: ServerSettings = ServerSettings()
    dilation: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=1)],
        Field(
            description="How many times slower than real time the devices run, so that a larger fleet "
            "fits on the host. auto: the smallest factor at which the "
            "fleet fits"
        ),
        expecting("auto, or a number of at least 1"),
    ] = 1.0
    scenario: tuple[ScenarioEntry, ...] = optional("Actions on devices, with their times", ())
    churn: Churn | None = optional("Random crashes. Default: none")
    evaluate: EvaluationSettings = EvaluationSettings()
    stop: StopSettings
    start: StartSettings = StartSettings()
    bounds: BoundsSettings = BoundsSettings()
    privacy: PrivacySettings | None = optional(hidden=True)
    broker: BrokerSettings = BrokerSettings()
    durability: config.Durability = optional(
        "What a crash of the aggregator loses. none: the run; checkpoint: everything since the last "
        "checkpoint; update: no acknowledged update; recording: no acknowledged update, and every "
        "input is kept for testbed replay",
        "update",
    )
    runtime: RuntimeSettings = RuntimeSettings()
    virtual: Virtual = optional(default=Virtual(), hidden=True)
    _source: Source = PrivateAttr(default=Source())
    _user_code: UserCode | None = PrivateAttr(default=None)
    _fleet: MadeFleet = PrivateAttr(default=MadeFleet())

    @property
    def source(self) -> Source:
        """Errors use it to point to places in the file."""
        return self._source

    @property
    def fleet(self) -> MadeFleet:
        return self._fleet

    @property
    def user_code(self) -> UserCode | None:
        """The user's code when the topology was read."""
        return self._user_code

    def with_devices(self, groups: Iterable[DeviceGroup], fleet: MadeFleet, source: Source) -> Topology:
        """`source`: with the places of `groups`."""
        values = {**dict(self), "devices": tuple(groups)}
        made = Topology.model_construct(self.model_fields_set, **values)
        made._source, made._user_code, made._fleet = source, self._user_code, fleet
        return made

    @property
    def named_selection(self) -> config.Named | None:
        return None if self.selection is None else self.selection.named

    @property
    def exchangeable(self) -> dict[str, Variant]:
        """Task, rule and, if there is one, selection, by key. A user can write their own."""
        found = {"task": self.task, "rule": self.rule, "selection": self.selection}
        return {key: part for key, part in found.items() if part is not None}

    @property
    def has_exchange(self) -> bool:
        """Whether clients send messages to each other."""
        return self.secure is not None

    @property
    def secure(self) -> SecureAggregation | None:
        """Raises ValueError if the rule needs single updates."""
        if self.privacy is None or self.privacy.secure is None:
            return None
        wanted: arithmetic.SecureParameters = self.privacy.secure.build()
        sums = self.rule.build().sums()
        names, noise = self.device_names, self.differential
        own = {
            "clients": names,
            "updates": sums.updates,
            "weights": wanted.weights if sums.weighted else 1,
            "needed": wanted.needed_of(len(names)),
            "norm": noise.clip if noise is not None and noise.at == "server" else None,
        }
        return SecureAggregation(**{**dataclasses.asdict(wanted), **own})

    @property
    def differential(self) -> differential.DifferentialPrivacy | None:
        if self.privacy is None or self.privacy.differential is None:
            return None
        wanted: differential.DifferentialPrivacy = self.privacy.differential.build()
        return wanted

    @property
    def update_steps(self) -> list[config.Named]:
        """Steps that all clients have."""
        secure, wanted, steps = self.secure, self.differential, []
        if wanted is not None:
            rounding = 0.0 if secure is None else secure.grid.step
            params = {**dataclasses.asdict(wanted), "seed": self.seed, "rounding": rounding}
            steps.append(config.Named("differential", params))
        if secure is not None:
            steps.append(config.Named("secure", dataclasses.asdict(secure)))
        return steps

    @property
    def segments(self) -> dict[str, SegmentSettings]:
        """From `network` and from the groups' `access`. A parent comes before its children."""
        return all_segments(self.network, self.devices)

    @property
    def segment_names(self) -> set[str]:
        return {*self.network, *(group.access.name for group in self.devices if group.access)}

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(name for group in self.devices for name in group.device_names)

    def devices_of(self, targets: Iterable[str]) -> tuple[str, ...]:
        """`targets`: devices and groups."""
        return expand(targets, devices_by_group(self.devices))

    def compression_places(self) -> Iterator[Where]:
        """Places of compression and of groups' own steps: both may change updates."""
        for index, group in enumerate(self.devices):
            if group.link is not None and group.link.compression is not None:
                yield ("devices", index, "link", "compression")
            if group.steps:
                yield ("devices", index, "steps")

    def idle_devices(self, samples: Mapping[str, int]) -> list[str]:
        """Devices that never train, because their samples make no mini-batch, in device order. Devices
        that are not in `samples` are left out."""
        return [
            name
            for group, count in ((group, cache(group.local.build().count)) for group in self.devices)
            for name in group.device_names
            if name in samples and not count(samples[name])
        ]

    def model_post_init(self, context: Any) -> None:
        self._source = (context or {}).get(SOURCE, self._source)
        self._user_code = (context or {}).get(USER_CODE)

    def to_yaml(self, code: str | None = None) -> str:
        """Write all defaults, in a form that `testbed.topology.parse` can read. `code`: path of a copy
        of the user's code, if it is another than the topology's."""
        data = self.model_dump(mode="json", by_alias=True)
        if self._fleet.keys:
            groups = zip(self.devices, data["devices"], strict=True)
            plain = (written for group, written in groups if not group.origin)
            data["devices"] = [written or next(plain) for written in self._fleet.written]
        return yamlfile.write(data if code is None else data | {"code": code})
