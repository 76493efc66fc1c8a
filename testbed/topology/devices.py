"""The devices of a topology: their speed, link, think time and local training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agents import config
from agents.pipeline import STEPS
from agents.pipeline.byzantine import ATTACKS
from agents.pipeline.compression import METHODS
from agents.timing import durations
from agents.timing.durations import Distribution
from testbed.topology import seeds
from testbed.topology.availability import Availability
from testbed.topology.data_settings import DeviceData
from testbed.topology.fields import (
    Cpu,
    Duration,
    FilePath,
    Memory,
    Model,
    Name,
    NotNegative,
    OneOf,
    OrConstant,
    Parameters,
    Positive,
    PositiveShare,
    Power,
    Rate,
    Seconds,
    Share,
    Size,
    Thermal,
    Variant,
    expecting,
    from_file,
    with_fields_of,
)

LEAST_GPU_MEMORY = 512 * 2**20
"""Bytes: CUDA's context alone takes some hundred MB."""
MAX_DEVICES = 100_000  # of one group, and of all of a topology
DEFAULT_MEMORY = 512 * 2**20
"""Bytes; for devices whose memory neither the topology nor a profile gives."""
DEFAULT_MEMORY_WITH_GPU = 2 * 2**30
"""The same with a GPU: CUDA's own libraries take more than PyTorch does."""


@with_fields_of(config.LocalTraining)
class Local(Parameters):
    """Local training of one round on the device's shard. Give steps or epochs."""

    def changed_by(self, other: Local) -> Local:
        """This one with the settings that `other` gives."""
        changes = {name: getattr(other, name) for name in other.model_fields_set}
        if changes.get("steps") or changes.get("epochs"):
            changes = {"steps": None, "epochs": None} | changes
        return self.model_copy(update=changes)


class ServerLink(Model):
    """An access link; a rate left out is unlimited."""

    up: Rate | None = None
    down: Rate | None = None

    @model_validator(mode="after")
    def _has_value(self) -> Self:
        if all(value is None for _, value in self):
            names = ", ".join(field.alias or name for name, field in type(self).model_fields.items())
            raise ValueError(f"found none of {names}, expected a rate such as up: 5mbit")
        return self

    def plain(self) -> config.AccessLink:
        return config.AccessLink(self.up, self.down)


class LinkTrace(Model):
    """What a link does in the course of time, from files: paths are relative to the topology."""

    up: FilePath | None = Field(default=None, description="mahimahi trace of the uplink's rate; repeats")
    down: FilePath | None = Field(
        default=None, description="mahimahi trace of the downlink's rate; repeats"
    )
    csv: FilePath | None = Field(default=None, description="Columns time and any of up, down, rtt, loss")
    loop: bool = Field(default=True, description="Whether csv begins again at its end")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.csv is None) == (self.up is None and self.down is None):
            raise ValueError("expected either csv, or up and down, such as {csv: train.csv}")
        return self


class Compression(Variant):
    """How a device compresses its updates."""

    tag: ClassVar[str] = "kind"
    kind: str


class Link(ServerLink):
    """Access link of each device of the group; a rate left out is unlimited."""

    kind: Annotated[
        Name | None,
        Field(alias="class", description="Of testbed profiles; what is given beside it wins"),
    ] = None
    rtt: Seconds | None = Field(default=None, description="Round-trip time that it adds")
    jitter: Seconds | None = Field(default=None, description="Each way's delay is uniform, ± this")
    loss: Share | None = Field(default=None, description="Share of the packets lost, each way")
    trace: LinkTrace | None = None
    compression: Annotated[Compression, OneOf(METHODS)] | None = Field(
        default=None, description="Of the updates that go over it; float32 where not given"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.jitter or 0.0) > (self.rtt or 0.0) / 2 and self.kind is None:
            raise ValueError("jitter is more than the delay of one way, rtt/2: lower it, or raise rtt")
        return self

    def plain(self) -> config.AccessLink:
        return config.AccessLink(
            self.up, self.down, self.rtt or 0.0, self.jitter or 0.0, self.loss or 0.0
        )


@with_fields_of(config.SharedLink)
class Access(Parameters):
    """A link that all devices share whose group names it, such as a Wi-Fi cell; at least one rate."""


class _Speed(Variant):
    """A factor that is drawn once per device, from a distribution of durations without their unit."""

    tag: ClassVar[str] = "distribution"
    seconds: ClassVar[Any] = NotNegative
    distribution: str

    @model_validator(mode="after")
    def _above_zero(self) -> Self:
        for name in ("value", "low"):
            if self.params.get(name) == 0:
                raise ValueError(f"{name} is 0, expected a number above 0")
        return self

    def draw(self, seed: int, device: str) -> float:
        if self.distribution == "constant":
            return float(self.params["value"])
        distribution: Distribution = self.build()
        return distribution.sampler(seeds.generator(seed, device, "speed"))()


@dataclass(frozen=True)
class _NormalSpeed(durations.Normal):
    """Normal, truncated: what would be below `low` is drawn again."""

    low: float = 0.1


_SPEEDS = {name: cls for name, cls in durations.DISTRIBUTIONS.items() if name != "trace"}
"""One speed is drawn: a series would give each device its first."""

Speed = Annotated[
    _Speed,
    OneOf(_SPEEDS | {"normal": _NormalSpeed}),
    OrConstant(
        (int, float),
        {"type": "number", "exclusiveMinimum": 0},
        "a number such as 0.5, or a distribution such as {distribution: uniform, low: 0.5, high: 2}",
    ),
]


class Byzantine(Variant):
    """What attackers make of their training before they send it."""

    tag: ClassVar[str] = "kind"
    kind: str


class Gpu(Model):
    """What each device of the group has of one of the host's GPUs."""

    share: PositiveShare = Field(
        default=1.0, description="Of its multiprocessors, at most: MPS's active thread percentage"
    )
    memory: (
        Annotated[Size, Field(ge=LEAST_GPU_MEMORY), expecting("a size of at least 512MiB")] | None
    ) = Field(default=None, description="Of its memory, at most; not limited, where not given")

    @property
    def limited(self) -> bool:
        """Whether it shares a GPU with others, by limits."""
        return self.share < 1 or self.memory is not None


def _gpu(value: Any) -> Any:
    """`true` is a whole GPU, `false` none."""
    if isinstance(value, bool):
        return Gpu() if value else None
    if value is not None and not isinstance(value, dict | Gpu):
        raise ValueError("expected true, or what it has of a GPU such as {share: 25%, memory: 2GiB}")
    return value


def _link(value: Any) -> Any:
    """`lte` is short for `{class: lte}`."""
    return {"class": value} if isinstance(value, str) else value


_IMAGE = "the tag of an image such as my-agent:1, or a path such as sensor/Dockerfile"


def _is_dockerfile(image: str) -> bool:
    """Whether `image` is a file: its name has Dockerfile in it. No tag can be meant, as names of images
    have no capital letters."""
    name = Path(image).name
    return "Dockerfile" in name and ":" not in name


def _image(image: str, info: ValidationInfo) -> str:
    return from_file(image, info) if _is_dockerfile(image) else image


_STEPS_WITH_KEYS = ("byzantine", "compression", "differential", "secure")
"""Steps of `agents.pipeline.STEPS` that have keys of their own in a topology."""


class DeviceGroup(Model):
    """One device, or `count` equal ones. Give at least one of cpu, profile, timing and gflops."""

    name: Name = Field(description="Of the device, or with count of name-1, name-2, ...")
    count: (
        Annotated[
            int,
            Field(ge=1, le=MAX_DEVICES),
            expecting(f"a whole number of devices from 1 to {MAX_DEVICES}"),
        ]
        | None
    ) = Field(default=None, description="How many equal devices; they are called name-1, name-2, ...")
    # No default: how slow a device is, is what the experiment is about.
    cpu: Cpu | None = Field(
        default=None, description="Share of one host core; above 1 is more than one core"
    )
    profile: Name | None = Field(
        default=None, description="Type of device (testbed profiles): gives cpu on this host"
    )
    gflops: Positive | None = Field(
        default=None, description="1e9 operations per second, of task.flops_per_step; in virtual time"
    )
    timing: Duration | None = Field(
        default=None, description="Of a training at the least, from when it could begin"
    )
    speed: Speed = Field(
        default=1.0,
        validate_default=True,
        description="Drawn once per device: divides timing, multiplies gflops",
    )
    memory: Memory | None = Field(
        default=None,
        description="Limit of its memory; the profile's as far as the host has it, where not given, and "
        "512MiB (with gpu 2GiB) where no profile says it",
    )
    gpu: Annotated[Gpu | None, BeforeValidator(_gpu, json_schema_input_type=bool | Gpu | None)] = Field(
        default=None,
        exclude_if=lambda gpu: gpu is None,
        description="true: a whole GPU of the host to train on; or a fraction of one. For docker",
    )
    image: Annotated[str, Field(min_length=1), expecting(_IMAGE), AfterValidator(_image)] | None = Field(
        default=None,
        exclude_if=lambda image: image is None,
        description="What its devices run in: the tag of an image built from ours, or a Dockerfile, by "
        "its path from this file, whose BASE is ours. In containers",
    )
    link: Annotated[Link | None, BeforeValidator(_link, json_schema_input_type=str | Link | None)] = (
        Field(
            default=None, description="Its access link; the name of a class is short for {class: name}"
        )
    )
    access: Access | None = Field(
        default=None, description="What its devices share with all whose access has the same name"
    )
    think: Duration | None = Field(default=None, description="Extra delay before an update is sent")
    availability: Availability | None = Field(
        default=None, description="When a device can be reached; always, where not given"
    )
    power: Power | None = Field(
        default=None, description="What a device draws in each state; the profile's, where not given"
    )
    thermal: Thermal | None = Field(
        default=None, description="Loss of CPU share by heat; the profile's, where not given"
    )
    data: DeviceData | None = Field(default=None, exclude_if=lambda data: data is None)
    byzantine: Annotated[Byzantine, OneOf(ATTACKS)] | None = Field(
        default=None, description="The attack that its devices make; honest ones where not given"
    )
    steps: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        exclude_if=lambda steps: not steps,
        description="Further steps that its devices do to their updates, by name, with their parameters",
    )
    hosts: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        exclude_if=lambda hosts: hosts is None,
        description="Names of the nodes that its devices may be on, where there are several machines",
    )
    placement: dict[str, str] | None = Field(
        default=None,
        exclude_if=lambda placement: placement is None,
        description="Labels of these nodes, such as {rack: a}",
    )
    local: Local = Field(default_factory=Local, description="What differs from task.local here")

    @model_validator(mode="after")
    def _has_speed(self) -> Self:
        speeds = (self.cpu, self.profile, self.timing, self.gflops)
        if all(speed is None for speed in speeds):
            raise ValueError(
                "found none of cpu, profile, timing and gflops; add one such as "
                "cpu: 0.25 (a share of one host core)"
            )
        if not self.has_plain_speed and self.timing is None and self.gflops is None:
            raise ValueError(
                "speed has nothing to act on: it divides timing and multiplies gflops. "
                "Give one of these, or change cpu instead"
            )
        if self.thermal is not None and self.cpu is None and self.profile is None:
            raise ValueError("thermal has nothing to act on: it lowers cpu. Give cpu or profile")
        return self

    @property
    def update_steps(self) -> list[config.Named]:
        """What its devices do to their updates (`agents.pipeline`), beside what all do."""
        compression = None if self.link is None else self.link.compression
        own = {"byzantine": self.byzantine, "compression": compression}
        return [
            *(
                config.Named(step, {"kind": one.named.name, "params": one.named.params})
                for step, one in own.items()
                if one is not None
            ),
            *(config.Named(step, params) for step, params in self.steps.items()),
        ]

    @field_validator("steps")
    @classmethod
    def _steps_exist(cls, steps: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        known = [step for step in STEPS if step not in _STEPS_WITH_KEYS]
        for name, params in steps.items():
            if name not in known:
                raise ValueError(f"found {name}, expected one of {', '.join(known) or 'no step'}")
            try:
                STEPS[name](**params)
            except TypeError as error:
                raise ValueError(f"{name}: {error}") from error
        return steps

    @property
    def default_memory(self) -> int:
        """Limit in bytes where neither the topology nor a profile gives one."""
        return DEFAULT_MEMORY if self.gpu is None else DEFAULT_MEMORY_WITH_GPU

    @property
    def dockerfile(self) -> Path | None:
        """What its image is built by, where that is a file."""
        return Path(self.image) if self.image is not None and _is_dockerfile(self.image) else None

    @property
    def has_plain_speed(self) -> bool:
        return self.speed.named == config.Named("constant", {"value": 1.0})

    @property
    def device_names(self) -> tuple[str, ...]:
        return (self.name,) if self.count is None else _numbered(self.name, self.count)


@lru_cache(maxsize=16)  # planning asks dozens of times, and there may be 100,000
def _numbered(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}-{number}" for number in range(1, count + 1))
