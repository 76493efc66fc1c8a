"""Keys of a topology file that a topology does not have: generators of devices.

`draw` of a group is the distribution from which each device of the group is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from agents.timing import durations
from agents.timing.durations import Seconds as DurationParameter
from testbed.topology import units
from testbed.topology.devices import DeviceGroup
from testbed.topology.fields import (
    Cpu,
    FilePath,
    Joules,
    Model,
    Name,
    NotNegative,
    OneOf,
    Positive,
    PositiveSeconds,
    Rate,
    Seconds,
    Share,
    Size,
    Variant,
    expecting,
    from_file,
    optional,
)
from testbed.topology.profiles import population_names
from testbed.topology.schema import Topology


@dataclass(frozen=True)
class Choice:
    """One of `values`, with probabilities in proportion to `weights`."""

    values: tuple[DurationParameter, ...]
    """Values to choose from."""
    weights: tuple[float, ...]
    """Weight of each value."""

    def __post_init__(self) -> None:
        if len(self.values) != len(self.weights):
            raise ValueError(
                f"found {len(self.weights)} weights for {len(self.values)} values, expected one weight "
                "per value"
            )
        check_weights(self.weights)

    @property
    def expectation(self) -> float:
        total = math.fsum(self.weights)
        return math.fsum(v * w / total for v, w in zip(self.values, self.weights, strict=True))

    def sampler(self, rng: np.random.Generator) -> Callable[[], float]:
        return lambda: self.values[choose(self.weights, rng)]


def check_weights(weights: tuple[float, ...]) -> None:
    """Raises ValueError."""
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise ValueError(f"found the weight {weight:g}, expected a number of at least 0")
    if not any(weights):
        raise ValueError("found no weight above 0, expected at least one")


def choose(weights: tuple[float, ...], rng: np.random.Generator) -> int:
    """Draw an index, with probabilities in proportion to `weights`."""
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, float(rng.random()) * sums[-1], side="right"))


class DrawnValue(Variant):
    """Value of a key, drawn once per device."""

    tag: ClassVar[str] = "distribution"
    seconds: ClassVar[Any] = NotNegative
    distribution: str

    def draw(self, rng: np.random.Generator) -> Any:
        distribution: durations.DurationDistribution = self.build()
        return self.written(distribution.sampler(rng)())

    def written(self, value: float) -> Any:
        """In the notation of a topology."""
        return float(f"{value:.4g}")


class DrawnRate(DrawnValue):
    """Rate, drawn once per device."""

    seconds: ClassVar[Any] = Rate

    def written(self, value: float) -> Any:
        return units.format_rate(max(1, int(float(f"{value:.4g}"))))


class DrawnSize(DrawnValue):
    """Size in bytes, drawn once per device, and rounded to whole MiB."""

    seconds: ClassVar[Any] = Size

    def written(self, value: float) -> Any:
        return units.format_size(max(1, round(value / _MIB)) * _MIB)


class DrawnSeconds(DrawnValue):
    """Duration, drawn once per device."""

    seconds: ClassVar[Any] = Seconds

    def written(self, value: float) -> Any:
        return units.format_duration(float(f"{value:.4g}"))


class DrawnShare(DrawnValue):
    """Share from 0 to 1, drawn once per device. Larger values become 1."""

    seconds: ClassVar[Any] = Share

    def written(self, value: float) -> Any:
        return min(1.0, float(f"{value:.6g}"))


class DrawnEnergyContent(DrawnValue):
    """Energy of a battery in joules, drawn once per device."""

    seconds: ClassVar[Any] = Joules

    def written(self, value: float) -> Any:
        return f"{float(f'{value:.4g}')!r}J"


class _OrWeights:
    """Type annotation for a field that holds a distribution. It accepts a mapping of values to weights,
    such as `{512MiB: 3, 1GiB: 1}`, as a short form of the distribution `choice`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._spell_out, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        short = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}
        return {"anyOf": [short, handler(schema)]}

    def _spell_out(self, value: Any) -> Any:
        if isinstance(value, Model):
            return value
        if not isinstance(value, Mapping) or not value:
            raise ValueError(
                "expected values with weights such as {a: 3, b: 1}, or a distribution such as "
                "{distribution: lognormal, median: ..., sigma: 0.5}"
            )
        if "distribution" in value:
            return value
        return {
            "distribution": "choice",
            "values": tuple(_number_or_text(key) for key in value),
            "weights": tuple(value.values()),
        }


def _number_or_text(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


_MIB = 2**20
_DRAWN = {name: cls for name, cls in durations.DISTRIBUTIONS.items() if name != "trace"}
"""Traces are left out: a value is drawn only once, so that every device would get the first value of the
trace."""
_VARIANTS = OneOf(_DRAWN | {"choice": Choice})


def _weights(value: dict[str, float]) -> dict[str, float]:
    check_weights(tuple(value.values()))
    return value


NameWeights = Annotated[
    dict[Name, float],
    AfterValidator(_weights),
    expecting("names with weights such as {raspberry-pi-4: 3, raspberry-pi-5: 1}"),
]


class DrawnLink(Model):
    """Keys of `link` that are drawn once per device, independently of each other."""

    kind: Annotated[
        NameWeights | None, Field(alias="class", description="Link class: names with weights")
    ] = None
    up: Annotated[DrawnRate, _VARIANTS, _OrWeights()] | None = optional(
        "Rate from the device to the server"
    )
    down: Annotated[DrawnRate, _VARIANTS, _OrWeights()] | None = optional(
        "Rate from the server to the device"
    )
    rtt: Annotated[DrawnSeconds, _VARIANTS, _OrWeights()] | None = optional(
        "Round-trip time that the link adds"
    )
    jitter: Annotated[DrawnSeconds, _VARIANTS, _OrWeights()] | None = optional(
        "Maximum deviation of the delay in each direction"
    )
    loss: Annotated[DrawnShare, _VARIANTS, _OrWeights()] | None = optional(
        "Share of packets lost, in each direction"
    )


class DrawnBattery(Model):
    """Keys of `energy.battery` that are drawn once per device, independently of each other."""

    capacity: Annotated[DrawnEnergyContent, _VARIANTS, _OrWeights()] | None = optional(
        "Energy of the full battery"
    )
    initial: Annotated[DrawnShare, _VARIANTS, _OrWeights()] | None = optional(
        "Level at the start of the run"
    )


class DrawnEnergy(Model):
    """Keys of `energy` that are drawn once per device."""

    battery: DrawnBattery


class DrawnKeys(Model):
    """Keys that are drawn once per device, independently of each other. Each has a distribution, or
    values with weights."""

    profile: NameWeights | None = optional("Device profile: names with weights")
    cpu: Annotated[DrawnValue, _VARIANTS, _OrWeights()] | None = optional(
        "CPU share in cores of the host"
    )
    gflops: Annotated[DrawnValue, _VARIANTS, _OrWeights()] | None = optional(
        "Speed in 1e9 operations per second. In virtual time only"
    )
    timing: Annotated[DrawnSeconds, _VARIANTS, _OrWeights()] | None = optional(
        "Minimum duration of each local training of the device"
    )
    memory: Annotated[DrawnSize, _VARIANTS, _OrWeights()] | None = optional("Memory limit")
    link: DrawnLink | None = None
    energy: DrawnEnergy | None = None

    @model_validator(mode="after")
    def _has_keys(self) -> Self:
        if all(value is None for _, value in self):
            raise ValueError("found no key, expected at least one such as {cpu: {...}}")
        return self

    def draw(self, generator: Callable[[str], np.random.Generator]) -> dict[str, Any]:
        """Return the keys of one device in the notation of a topology.

        `generator`: function from a key, such as `link.up`, to the generator for the key's value.
        """
        return _draw(self, "", generator)


def _draw(keys: Model, prefix: str, generator: Callable[[str], np.random.Generator]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in keys:
        key = type(keys).model_fields[field].alias or field
        if value is None:
            continue
        if isinstance(value, DrawnValue):
            found[key] = value.draw(generator(prefix + key))
        elif isinstance(value, Model):
            found[key] = _draw(value, f"{prefix}{key}.", generator)
        else:
            names = tuple(value)
            found[key] = names[choose(tuple(value.values()), generator(prefix + key))]
    return found


class FedScaleSettings(Model):
    """How FedScale's traces become keys of a device."""

    behaviour: FilePath | None = optional(
        "File client_behave_trace, relative to the topology file, from which availability is drawn. "
        "Default: devices are always available"
    )
    cpu: Cpu | None = optional(
        "CPU share of the fastest client of the file; the others get less, in proportion to their "
        "speed. Default: no CPU shares, but a timing that follows from local.steps"
    )
    begin: Seconds = optional(
        "Time in the availability trace at which the run begins",
        0.0,
        json_schema_extra={"default": "0s"},
    )
    length: PositiveSeconds | None = optional(
        "Length of the part of the availability trace to use. Default: the whole trace, repeated"
    )
    speed_up: Positive = optional("Factor by which the availability trace is sped up", 1.0)


def _population_or_file(value: str, info: ValidationInfo) -> str:
    """Only the path of a file changes: it becomes absolute."""
    return value if value in population_names() else from_file(value, info)


class DrawSettings(Model):
    """Distribution from which each device of the group is drawn. Needs from, each, or both. Keys of the
    group itself override drawn values, and keys of `each` override those of `from`."""

    origin: Annotated[
        Annotated[str, Field(min_length=1), AfterValidator(_population_or_file)] | None,
        Field(
            alias="from",
            description="Population (see testbed profiles), or a file relative to the topology file: a "
            "survey in CSV with a column weight, or FedScale's client_device_capacity",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=0, lt=2**63, description="Seed of the draw. Default: the topology's seed"),
        expecting("a whole number of at least 0"),
    ] = None
    each: DrawnKeys | None = None
    fedscale: FedScaleSettings | None = None

    @model_validator(mode="after")
    def _has_origin(self) -> Self:
        if self.origin is None and self.each is None:
            raise ValueError(
                "found neither from nor each, expected one of them such as "
                "{from: mobile-subscriptions-2022}, or {each: {cpu: {'0.25': 3, '0.5': 1}}}"
            )
        if self.fedscale is not None and self.origin is None:
            raise ValueError("fedscale needs from: add from: client_device_capacity")
        return self


LogColumn = Literal["client", "start", "end", "bytes", "download", "upload"]


class GroupSettings(DeviceGroup):
    """A device, or `count` devices, which are equal or drawn from a distribution. Needs at least one of
    cpu, profile, timing, gflops, draw, from_run and from_log, unless `hosts` names real devices."""

    draw: DrawSettings | None = optional(
        "Draw the keys of each device from a survey, a named population, FedScale's traces, or "
        "distributions. Default: the devices are equal",
        hidden=True,
    )
    from_run: FilePath | None = optional(
        "Directory of a run, relative to the topology file. Each of its devices becomes a device with "
        "the recorded durations and absences (docs/guide/traces.md)",
        hidden=True,
    )
    from_log: FilePath | None = optional(
        "CSV file with a row per training, relative to the topology file. Each client in it becomes a "
        "device. Columns: client, start, end (s, or ISO 8601), and optionally bytes (size of the "
        "update), download and upload (s within start and end)",
        hidden=True,
    )
    columns: dict[LogColumn, str] | None = optional(
        "With from_log: column of the file for each of client, start, end, bytes, download and upload, "
        "such as {client: device_id}. Default: columns with these names",
        hidden=True,
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = ("count", "draw", "from_run", "from_log")
        given = [key for key in sources if getattr(self, key) is not None]
        if self.is_recorded and len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined: keep one of them")
        if self.columns is not None and self.from_log is None:
            raise ValueError("columns has no effect without from_log: remove it")
        return self

    @property
    def needs_speed(self) -> bool:
        """Each drawn or recorded device is checked by itself."""
        return not self.is_generator and super().needs_speed

    @property
    def is_recorded(self) -> bool:
        return self.from_run is not None or self.from_log is not None

    @property
    def is_generator(self) -> bool:
        return self.draw is not None or self.is_recorded


class RecordedFleet(Model):
    """Short form of a fleet that consists of one group with recorded devices."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"oneOf": [{"required": [key]} for key in ("from_run", "from_log")]},
    )

    from_run: str | None = optional("Directory of a run")
    from_log: str | None = optional("CSV file with a row per training")


def _at_least_one(groups: tuple[GroupSettings, ...]) -> tuple[GroupSettings, ...]:
    if not groups:
        raise ValueError("found no device, expected at least one such as {name: nano, cpu: 0.25}")
    return groups


def _groups(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError(
            "expected a list of groups, or a recorded fleet such as {from_run: runs/x} or "
            "{from_log: log.csv}"
        )
    return value


class WrittenTopology(Topology):
    """An experiment of asynchronous federated learning on emulated edge devices."""

    model_config = ConfigDict(title="Topology")

    devices: Annotated[
        tuple[GroupSettings, ...],
        Field(json_schema_extra={"minItems": 1}),
        AfterValidator(_at_least_one),
        BeforeValidator(_groups, json_schema_input_type=tuple[GroupSettings, ...] | RecordedFleet),
    ]
