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
from agents.pipeline.compression import METHODS
from agents.pipeline.steps import STEPS
from agents.timing import durations
from agents.timing.durations import DurationDistribution
from analysis.alike_devices import MAX_DEVICES
from testbed.topology.availability import Availability
from testbed.topology.data_settings import DeviceDataSettings
from testbed.topology.energy import EnergySettings, energy_settings
from testbed.topology.fields import (
    Count,
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
    needs_trust,
    optional,
    with_fields_of,
)

LEAST_GPU_MEMORY = 512 * 2**20
"""Bytes: CUDA's context alone takes some hundred MB."""
DEFAULT_MEMORY = 512 * 2**20
"""Bytes, if neither the topology nor a profile sets a limit."""
DEFAULT_MEMORY_WITH_GPU = 2 * 2**30
"""Bytes. CUDA's libraries need more memory than PyTorch itself."""


@with_fields_of(config.LocalTraining)
class LocalSettings(Parameters):
    """Local training of one round on the device's shard. Needs steps or epochs."""

    def changed_by(self, other: LocalSettings) -> LocalSettings:
        """If `other` sets steps or epochs, these replace both steps and epochs of this object."""
        changes = {name: getattr(other, name) for name in other.model_fields_set}
        if changes.get("steps") or changes.get("epochs"):
            changes = {"steps": None, "epochs": None} | changes
        return self.model_copy(update=changes)


class ServerLink(Model):
    """Access link of the server. Needs up, down, or both."""

    up: Rate | None = optional("Rate at which the server sends. Default: unlimited")
    down: Rate | None = optional("Rate at which the server receives. Default: unlimited")

    @model_validator(mode="after")
    def _has_value(self) -> Self:
        if all(value is None for _, value in self):
            names = ", ".join(field.alias or name for name, field in type(self).model_fields.items())
            raise ValueError(f"found none of {names}, expected a rate such as up: 5mbit")
        return self

    def plain(self) -> config.AccessLink:
        return config.AccessLink(self.up, self.down)


class LinkTrace(Model):
    """Changes of a link over time, from files. Needs either csv, or up and down. Paths are relative to
    the topology file."""

    up: FilePath | None = optional("mahimahi trace file with the rate of the uplink. It repeats")
    down: FilePath | None = optional("mahimahi trace file with the rate of the downlink. It repeats")
    csv: FilePath | None = optional(
        "CSV file with a column time (s) and any of up, down (bit/s), rtt (s) and loss (0 to 1)"
    )
    loop: bool = optional("Whether csv repeats. false: the values of its last row stay", default=True)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.csv is None) == (self.up is None and self.down is None):
            raise ValueError("expected either csv, or up and down, such as {csv: train.csv}")
        return self


class CompressionSettings(Variant):
    """Compression of a device's updates."""

    tag: ClassVar[str] = "kind"
    kind: str


class LinkSettings(ServerLink):
    """Access link of each device of the group."""

    up: Rate | None = optional("Rate from the device to the server. Default: unlimited")
    down: Rate | None = optional("Rate from the server to the device. Default: unlimited")
    kind: Annotated[
        Name | None,
        Field(
            alias="class",
            description="Link class (see testbed profiles). Other keys of link override its values",
        ),
    ] = None
    rtt: Seconds | None = optional("Round-trip time that the link adds, half in each direction")
    jitter: Seconds | None = optional(
        "Maximum deviation of the delay in each direction. Deviations are uniform"
    )
    loss: Share | None = optional("Share of packets lost, in each direction")
    trace: LinkTrace | None = None
    compression: Annotated[CompressionSettings, OneOf(METHODS)] | None = optional(
        "Compression of the updates that the device sends. Default: none, float32 values"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.jitter or 0.0) > (self.rtt or 0.0) / 2 and self.kind is None:
            raise ValueError("jitter exceeds the delay of one direction, rtt/2: lower it, or raise rtt")
        return self

    @property
    def shaping_keys(self) -> list[str]:
        keys = (name for name in type(self).model_fields if name != "compression")
        return [name for name in keys if getattr(self, name) is not None]

    def plain(self) -> config.AccessLink:
        return config.AccessLink(
            self.up, self.down, self.rtt or 0.0, self.jitter or 0.0, self.loss or 0.0
        )


class TransferSettings(Model):
    """Durations of transfers, in place of a link. In virtual time only. Needs download, upload, or
    both."""

    download: Duration | None = optional(
        "Time from the server's sending of a model to its arrival. Default: 0s"
    )
    upload: Duration | None = optional("Time from the sending of an update to its arrival. Default: 0s")
    model_bytes: Count | None = optional(
        "Size of the model that `download` refers to, in bytes. The duration changes in proportion if a "
        "model has another size. Default: the size has no influence"
    )
    update_bytes: Count | None = optional(
        "Size of the update that `upload` refers to, in bytes. The duration changes in proportion if an "
        "update has another size. Default: the size has no influence"
    )

    @model_validator(mode="after")
    def _has_duration(self) -> Self:
        if self.download is None and self.upload is None:
            raise ValueError("found neither download nor upload, expected one such as upload: 200ms")
        return self


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


class AccessSettings(Model):
    """Link that is shared by all devices whose groups name it, such as a Wi-Fi cell. Short form of a
    segment without a parent (key `network`). Needs up, down, or both."""

    name: Name
    up: Rate | None = optional("Total rate from the devices to the server. Default: unlimited")
    down: Rate | None = optional("Total rate from the server to the devices. Default: unlimited")

    @model_validator(mode="after")
    def _has_rate(self) -> Self:
        if self.up is None and self.down is None:
            raise ValueError("found neither up nor down, expected a rate such as down: 50mbit")
        return self


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


class GpuSettings(Model):
    """Share of a GPU of the host that each device of the group gets."""

    share: PositiveShare = optional(
        "Upper limit of the share of the GPU's multiprocessors (MPS active thread percentage)", 1.0
    )
    memory: (
        Annotated[Size, Field(ge=LEAST_GPU_MEMORY), expecting("a size of at least 512MiB")] | None
    ) = optional("Upper limit of GPU memory. Default: unlimited")

    @property
    def is_limited(self) -> bool:
        return self.share < 1 or self.memory is not None


def _gpu(value: Any) -> Any:
    if isinstance(value, bool):
        return GpuSettings() if value else None
    if value is not None and not isinstance(value, dict | GpuSettings):
        raise ValueError("expected true, or a part of a GPU such as {share: 25%, memory: 2GiB}")
    return value


def _link(value: Any) -> Any:
    return {"class": value} if isinstance(value, str) else value


_IMAGE = "the tag of an image such as my-agent:1, or a path such as sensor/Dockerfile"


def _is_dockerfile(image: str) -> bool:
    """Names of images have no capital letters."""
    name = Path(image).name
    return "Dockerfile" in name and ":" not in name


def _image(image: str, info: ValidationInfo) -> str:
    return from_file(image, info) if _is_dockerfile(image) else image


def is_ssh_host(host: str) -> bool:
    """Whether it is a real device, and not the name of a node."""
    return "@" in host or host.startswith("ssh://")


_STEPS_WITH_KEYS = ("byzantine", "compression", "differential", "secure")
"""Steps that have their own key in a topology, so that the key `steps` does not accept them."""


class DeviceGroup(Model):
    """A device, or `count` equal devices. Needs at least one of cpu, profile, timing and gflops, unless
    `hosts` names real devices."""

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
    gpu: Annotated[
        GpuSettings | None, BeforeValidator(_gpu, json_schema_input_type=bool | GpuSettings | None)
    ] = optional("Train on a GPU of the host. true: a whole one. In runtime docker only", hidden=True)
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
    access: AccessSettings | None = optional(
        "Link shared with all devices whose group has an access of the same name"
    )
    segment: Name | None = optional(
        "Segment of `network` that the devices are attached to. Default: none, each device has a path "
        "of its own to the server",
        hidden=True,
    )
    think: Duration | None = optional("Extra delay between the end of a training and sending its update")
    transfers: TransferSettings | None = Field(
        default=None, exclude_if=lambda transfers: transfers is None
    )
    actions: Annotated[tuple[TimedAction, ...], AfterValidator(_increasing)] | None = optional(
        "Actions on each device of the group, as [time, action]: crash, restart, leave, join, pause, "
        "resume, disconnect or reconnect. Default: none",
        hidden=True,
    )
    availability: Availability | None = optional("When a device is connected. Default: always")
    power: Power | None = optional("Power draw of a device in each state. Default: that of the profile")
    energy: Annotated[
        EnergySettings | None,
        BeforeValidator(energy_settings, json_schema_input_type=bool | EnergySettings | None),
    ] = optional(
        "Account of the energy that a device consumes during the run, with battery and charger. true: "
        "with the figures of the profile. Default: none",
        hidden=True,
    )
    thermal: Thermal | None = optional("Slow-down by heat. Default: that of the profile")
    data: DeviceDataSettings | None = Field(default=None, exclude_if=lambda data: data is None)
    byzantine: Annotated[ByzantineSettings, OneOf(ATTACKS)] | None = optional(
        "Attack of the devices of this group. Default: they are honest"
    )
    steps: dict[str, dict[str, Any]] = optional(
        "Further processing of the devices' updates: step name to its parameters", {}, hidden=True
    )
    hosts: Annotated[tuple[str, ...], needs_trust("devices on other machines")] | None = optional(
        "Real devices, one per entry, reached by SSH: [pi@raspi-1, ssh://raspi-2]. Or, with a Swarm, "
        "names of the nodes on which the devices may run. Default: any node",
        hidden=True,
        min_length=1,
    )
    python: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9/~._+-]+$"),
            expecting("a Python interpreter such as /usr/bin/python3.11"),
        ]
        | None
    ) = optional(
        "Path of the Python interpreter on a real device. It must have the agents' packages, unless "
        "container is set. Default: a virtual environment that is made on the device once",
        hidden=True,
    )
    container: Annotated[Literal["docker", "podman"], expecting("docker or podman")] | None = optional(
        "Engine on a real device that runs the client in a container of the agents' image. Default: "
        "the client is a process of the SSH user",
        hidden=True,
    )
    shape: bool = optional(
        "Whether cpu and link limit a real device, by its kernel's control groups and traffic control. "
        "Takes root there",
        default=False,
        hidden=True,
    )
    placement: dict[str, str] | None = optional(
        "Labels that a node must have for the devices to run on it, such as {rack: a}", hidden=True
    )
    local: LocalSettings = Field(
        default_factory=LocalSettings, description="Settings of local training that override task.local"
    )

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
        if self.transfers is None:
            return self
        shaped = [] if self.link is None else self.link.shaping_keys
        if shaped or self.segment_name is not None:
            key = f"link.{shaped[0]}" if shaped else "access" if self.segment is None else "segment"
            raise ValueError(
                f"{key} has no effect beside transfers, which are whole durations: remove one of the two"
            )
        return self

    @property
    def segment_name(self) -> str | None:
        """Segment of the devices, which may come from `access`."""
        return self.segment if self.access is None else self.access.name

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
    def default_memory(self) -> int:
        """Bytes."""
        return DEFAULT_MEMORY if self.gpu is None else DEFAULT_MEMORY_WITH_GPU

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

    @property
    def is_real(self) -> bool:
        return any(map(is_ssh_host, self.hosts or ()))

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
