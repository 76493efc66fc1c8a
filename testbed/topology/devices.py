"""Keys of a device group: speed, limits, link, faults and local training of its devices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agents import config, random_generators
from agents.pipeline.byzantine import ATTACKS
from agents.pipeline.steps import STEPS
from agents.timing import durations
from agents.timing.durations import DurationDistribution
from analysis.alike_devices import MAX_DEVICES
from testbed.topology.data_settings import DeviceDataSettings
from testbed.topology.features import FeatureKeys
from testbed.topology.fields import (
    Cpu,
    Duration,
    Memory,
    Model,
    Name,
    NotNegative,
    OneOf,
    OrConstant,
    Parameters,
    Positive,
    Seconds,
    Thermal,
    Variant,
    expecting,
    from_file,
    needs_trust,
    optional,
    with_fields_of,
)
from testbed.topology.links import Availability, LinkSettings, TransferSettings


@with_fields_of(config.LocalTraining)
class LocalSettings(Parameters):
    """Local training of one round on the device's shard. Needs steps or epochs."""

    def changed_by(self, other: LocalSettings) -> LocalSettings:
        """If `other` sets steps or epochs, these replace both steps and epochs of this object."""
        changes = {name: getattr(other, name) for name in other.model_fields_set}
        if changes.get("steps") or changes.get("epochs"):
            changes = {"steps": None, "epochs": None} | changes
        return self.model_copy(update=changes)


ActionName = Literal["crash", "restart", "pause", "resume", "disconnect", "reconnect", "leave", "join"]


def _timed_action(value: Any) -> Any:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError("expected a time and an action such as [10s, crash]")
    return value


TimedAction = Annotated[tuple[Seconds, ActionName], BeforeValidator(_timed_action)]


def _increasing(actions: tuple[TimedAction, ...]) -> tuple[TimedAction, ...]:
    for (before, _), (after, _) in itertools.pairwise(actions):
        if after < before:
            raise ValueError(f"{after:g} s follows {before:g} s: sort the actions by time")
    return actions


class _Speed(Variant):
    """Speed factor, drawn once per device. The distributions are the same as those of durations, but
    values have no unit."""

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
        distribution: DurationDistribution = self.build()
        return distribution.sampler(random_generators.generator(seed, device, "speed"))()


@dataclass(frozen=True)
class _NormalSpeed(durations.Normal):
    """Truncated normal distribution: values below `low` are drawn again."""

    low: float = 0.1


_SPEEDS = {name: cls for name, cls in durations.DISTRIBUTIONS.items() if name != "trace"}
"""Traces are left out: a speed is drawn only once, so that every device would get the first value of the
trace."""

Speed = Annotated[
    _Speed,
    OneOf(_SPEEDS | {"normal": _NormalSpeed}),
    OrConstant(
        (int, float),
        {"type": "number", "exclusiveMinimum": 0},
        "a number such as 0.5, or a distribution such as {distribution: uniform, low: 0.5, high: 2}",
    ),
]


class ByzantineSettings(Variant):
    """Attack: how attackers change an update before they send it."""

    tag: ClassVar[str] = "kind"
    kind: str


def _link(value: Any) -> Any:
    return {"class": value} if isinstance(value, str) else value


_IMAGE = "the tag of an image such as my-agent:1, or a path such as sensor/Dockerfile"


def _is_dockerfile(image: str) -> bool:
    """Names of images have no capital letters."""
    name = Path(image).name
    return "Dockerfile" in name and ":" not in name


def _image(image: str, info: ValidationInfo) -> str:
    return from_file(image, info) if _is_dockerfile(image) else image


_STEPS_WITH_KEYS = ("byzantine", "compression", "differential", "secure")
"""Steps that have their own key in a topology, so that the key `steps` does not accept them."""


class _DeviceKeys(Model):
    name: Name = Field(description="Name of the device, or of the group if count is set")
    count: (
        Annotated[
            int,
            Field(ge=1, le=MAX_DEVICES),
            expecting(f"a whole number of devices from 1 to {MAX_DEVICES}"),
        ]
        | None
    ) = optional("Number of devices, called name-1, name-2, ...")
    # No default: how slow a device is, is what the experiment is about.
    cpu: Cpu | None = optional("CPU share: 1 is one whole core of the host, 2 are two")
    profile: Name | None = optional(
        "Device profile (see testbed profiles), from which cpu and other keys follow"
    )
    gflops: Positive | None = optional(
        "Speed in 1e9 operations per second, applied to task.flops_per_step. In virtual time only"
    )
    timing: Duration | None = optional(
        "Minimum duration of a local training, measured from the arrival of the model"
    )
    speed: Speed = optional(
        "Speed factor, drawn once per device: divides timing and multiplies gflops",
        1.0,
        validate_default=True,
    )
    memory: Memory | None = optional(
        "Memory limit. Default: that of the profile, reduced if the host has less; without a profile "
        "512MiB, with gpu 2GiB"
    )
    image: (
        Annotated[
            str,
            *(Field(min_length=1), expecting(_IMAGE), AfterValidator(_image)),
            needs_trust("an image of its own"),
        ]
        | None
    ) = optional(
        "Image of the devices: a tag, or the path of a Dockerfile relative to the topology file. "
        "Either must build on the testbed's agent image (docs/guide/images.md). In containers only",
        hidden=True,
    )
    link: Annotated[
        LinkSettings | None, BeforeValidator(_link, json_schema_input_type=str | LinkSettings | None)
    ] = optional(
        "Access link of each device. A text is the name of a link class: lte is short for {class: lte}"
    )
    think: Duration | None = optional("Extra delay between the end of a training and sending its update")
    transfers: TransferSettings | None = optional(hidden=True)
    actions: Annotated[tuple[TimedAction, ...], AfterValidator(_increasing)] | None = optional(
        "Actions on each device of the group, as [time, action]: crash, restart, leave, join, pause, "
        "resume, disconnect or reconnect. Default: none",
        hidden=True,
    )
    availability: Availability | None = optional("When a device is connected. Default: always")
    thermal: Thermal | None = optional("Slow-down by heat. Default: that of the profile")
    data: DeviceDataSettings | None = optional(hidden=True)
    byzantine: Annotated[ByzantineSettings, OneOf(ATTACKS)] | None = optional(
        "Attack of the devices of this group. Default: they are honest"
    )
    steps: dict[str, dict[str, Any]] = optional(
        "Further processing of the devices' updates: step name to its parameters", {}, hidden=True
    )
    placement: dict[str, str] | None = optional(
        "Labels that a node must have for the devices to run on it, such as {rack: a}", hidden=True
    )
    local: LocalSettings = Field(
        default_factory=LocalSettings, description="Settings of local training that override task.local"
    )


class DeviceGroup(FeatureKeys, _DeviceKeys):
    """A device, or `count` equal devices. Needs at least one of cpu, profile, timing and gflops, unless
    `hosts` names real devices."""

    _group: str | None = PrivateAttr(default=None)
    _origin: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _has_speed(self) -> Self:
        if not self.needs_speed:
            return self
        speeds = (self.cpu, self.profile, self.timing, self.gflops)
        if all(speed is None for speed in speeds):
            raise ValueError(
                "found none of cpu, profile, timing and gflops: add one such as cpu: 0.25 (a quarter of "
                "a host core)"
            )
        if not self.has_plain_speed and self.timing is None and self.gflops is None:
            raise ValueError(
                "speed has no effect: it divides timing and multiplies gflops. Add one of these, or "
                "change cpu instead"
            )
        if self.thermal is not None and self.cpu is None and self.profile is None:
            raise ValueError("thermal has no effect: it lowers cpu. Add cpu or profile")
        return self

    @model_validator(mode="after")
    def _transfers_or_link(self) -> Self:
        shaped = [] if self.link is None else self.link.shaping_keys
        if self.transfers is not None and shaped:
            raise ValueError(
                f"link.{shaped[0]} has no effect beside transfers, which are whole durations: remove "
                "one of the two"
            )
        return self

    @property
    def needs_speed(self) -> bool:
        """A real device is as fast as it is."""
        return not self.is_real

    @property
    def has_profile_speed(self) -> bool:
        return self.profile is not None and self.cpu is None

    def spelled_out(self, local: LocalSettings) -> Self:
        """`local`: settings of the task, which hold where the group has none."""
        changes: dict[str, Any] = {"local": local.changed_by(self.local)}
        if self.profile is None and not self.is_real:  # else these have memory
            changes["memory"] = self.memory or self.default_memory
        return self.model_copy(update=changes)

    @property
    def group_name(self) -> str:
        """For a device of a fleet, it differs from `name`."""
        return self._group or self.name

    @property
    def origin(self) -> str:
        """Source of the keys of a device of a fleet, such as `survey.csv:7`; otherwise empty."""
        return self._origin

    def drawn_device(self, name: str, group: str, origin: str) -> Self:
        """`origin`: source of the keys."""
        device = self.model_copy(update={"name": name})
        device._group, device._origin = group, origin
        return device

    @property
    def update_steps(self) -> list[config.Named]:
        """Steps that only this group's devices have."""
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
    def dockerfile(self) -> Path | None:
        return Path(self.image) if self.image is not None and _is_dockerfile(self.image) else None

    @property
    def has_plain_speed(self) -> bool:
        return self.speed.named == config.Named("constant", {"value": 1.0})

    @property
    def joins_first(self) -> bool:
        """Devices that join first are absent at the start of the run."""
        moves = (name for _, name in self.actions or () if name in ("crash", "leave", "join"))
        return next(moves, None) == "join"

    def real_host(self, device: str) -> str | None:
        """SSH destination; None if the device is emulated."""
        if not self.is_real or self.hosts is None:
            return None
        return dict(zip(self.device_names, self.hosts, strict=True))[device]

    @property
    def device_names(self) -> tuple[str, ...]:
        count = self.count
        if count is None and self.is_real and len(self.hosts or ()) > 1:
            count = len(self.hosts or ())
        return (self.name,) if count is None else _numbered_names(self.name, count)


@lru_cache(maxsize=16)  # planning calls this dozens of times, with up to a million names
def _numbered_names(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}-{number}" for number in range(1, count + 1))
