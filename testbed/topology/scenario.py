"""The topology's `scenario` and `churn`: what is done to devices during a run, as it is written.

`testbed.topology.action_timeline` turns them into steps with times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from agents.timing.nanoseconds import from_seconds
from testbed.topology import units
from testbed.topology.devices import DeviceGroup, Link
from testbed.topology.fields import Cpu, Duration, Model, PositiveSeconds, Seconds
from testbed.topology.validation_errors import did_you_mean
from testbed.topology.yamlfile import Problem, Source, Where

Verb = Literal["set", "crash", "pause", "disconnect", "leave", "join"]
_VERBS: tuple[Verb, ...] = get_args(Verb)
_GOES_WITH: dict[str, tuple[Verb, ...]] = {
    "cpu": ("set",),
    "link": ("set",),
    "restart_after": ("crash",),
    "for": ("pause", "disconnect"),
}
_INSTEAD: dict[tuple[str, Verb], str] = {
    ("for", "crash"): "write restart_after instead",
    ("restart_after", "pause"): "write for instead",
    ("restart_after", "disconnect"): "write for instead",
}
_MAX_STEPS = 1_000_000
"""Devices that all entries name together: each is a step or two of the run."""
_MAX_UNKNOWN = 50
"""Unknown names that are reported."""
_MAX_COMPARED = 1000  # names; a similar one is looked for at about 10 µs each

Frequency = Annotated[
    float,
    BeforeValidator(units.frequency),
    PlainSerializer(units.format_frequency),
    WithJsonSchema(
        {"type": "string", "pattern": f"^{units.FREQUENCY.pattern}$", "examples": ["2/min", "0.5/s"]}
    ),
]


def _as_list(value: Any) -> Any:
    if value == ():
        raise ValueError("expected at least one device or group")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, tuple):
        raise ValueError("expected a device, a group, or a list of them such as [nano, pi-1]")
    return value


Targets = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
]
"""Names of devices and groups, as written."""


class LinkChange(Link):
    """What is to change of a link; what is left out stays as it is. A rate of null is unlimited."""

    @model_validator(mode="after")
    def _has_value(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("found nothing to change, expected a rate such as up: 1mbit")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Jitter is not compared with rtt, which may be what the link has already."""
        if self.trace is not None:
            raise ValueError("trace does not begin in mid-run: write figures such as up: 1mbit instead")
        if self.compression is not None:
            raise ValueError("compression does not change in mid-run: give it to the device's link")
        if self.kind is not None:
            raise ValueError("class does not change in mid-run: write figures such as up: 1mbit instead")
        return self

    @property
    def changes(self) -> dict[str, float | None]:
        """By field of `agents.config.AccessLink`."""
        plain = self.plain()
        given = (name for name in type(self).model_fields if name in self.model_fields_set - {"kind"})
        return {name: getattr(plain, name) for name in given}

    @model_serializer(mode="wrap")
    def _what_was_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class Entry(Model):
    """What is done to devices at one time. Give exactly one verb, with a device, a group or a list."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [verb]} for verb in _VERBS]},
    )

    at: Seconds = Field(description="Since the run clock started")
    set: Targets | None = Field(default=None, description="Change their cpu or link, or both")
    cpu: Cpu | None = Field(default=None, description="Share of one host core, with set")
    link: LinkChange | None = Field(default=None, description="What changes of the link, with set")
    crash: Targets | None = Field(default=None, description="Kill them at once")
    restart_after: Seconds | None = Field(
        default=None, description="With crash; where not given they stay away, unless they join"
    )
    pause: Targets | None = Field(default=None, description="Freeze them; they go on where they were")
    disconnect: Targets | None = Field(default=None, description="They run, and no packet passes")
    for_: PositiveSeconds | None = Field(
        default=None, alias="for", description="How long, with pause and disconnect"
    )
    leave: Targets | None = Field(
        default=None, description="They say goodbye, and the rule retires them"
    )
    join: Targets | None = Field(
        default=None,
        description="They come (back); who did not leave or crash before is not there from the start",
    )

    @model_validator(mode="after")
    def _one_verb(self) -> Self:
        found = [verb for verb in _VERBS if getattr(self, verb) is not None]
        if not found:
            raise ValueError(
                f"found none of {', '.join(_VERBS)}, expected one of them such as crash: nano"
            )
        if len(found) > 1:
            raise ValueError(f"found {' and '.join(found)}, expected one: make an entry of each")
        return self

    @model_validator(mode="after")
    def _goes_with_verb(self) -> Self:
        verb = self.verb
        for key, verbs in _GOES_WITH.items():
            given = self.for_ if key == "for" else getattr(self, key)
            if given is not None and verb not in verbs:
                fix = _INSTEAD.get((key, verb), "remove it")
                raise ValueError(f"{key} goes with {' and '.join(verbs)}, not with {verb}: {fix}")
        if verb == "set" and self.cpu is None and self.link is None:
            raise ValueError("set changes nothing: add cpu or link, such as cpu: 0.05")
        if verb in _GOES_WITH["for"] and self.for_ is None:
            raise ValueError(f"{verb} does not say for how long: add for, such as for: 3s")
        return self

    @property
    def verb(self) -> Verb:
        return next(verb for verb in _VERBS if getattr(self, verb) is not None)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of devices and groups, as written."""
        return cast(tuple[str, ...], getattr(self, self.verb))

    @property
    def duration(self) -> float | None:
        """Seconds until it ends; None where it does not."""
        return self.restart_after if self.verb == "crash" else self.for_

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the keys that do not belong to the verb."""
        return {key: value for key, value in handler(self).items() if value is not None}


class Churn(Model):
    """Devices crash at random, each by itself, and restart."""

    rate: Frequency = Field(description="Crashes of each device, while it is up")
    downtime: Duration = Field(description="From a crash to the restart")
    devices: Targets | None = Field(default=None, description="All, where not given")


def devices_by_name(groups: Iterable[DeviceGroup]) -> dict[str, tuple[str, ...]]:
    """The devices that a name stands for: those of a group in their order, or the one itself."""
    groups = tuple(groups)
    found = {group.name: group.device_names for group in groups}
    return found | {device: (device,) for group in groups for device in group.device_names}


def expand(targets: Iterable[str], by_name: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The devices, each once. `by_name` is that of `devices_by_name`."""
    return tuple(dict.fromkeys(device for name in targets for device in by_name[name]))


def movements(
    scenario: Iterable[Entry], by_name: Mapping[str, tuple[str, ...]]
) -> dict[str, list[Entry]]:
    """The entries by which each device joins or goes for good, in the order of their time."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(scenario, key=lambda entry: from_seconds(entry.at)):
        if entry.verb in ("crash", "leave", "join") and entry.duration is None:
            for device in expand(entry.targets, by_name):
                found.setdefault(device, []).append(entry)
    return found


def absent(scenario: Iterable[Entry], groups: Iterable[DeviceGroup]) -> frozenset[str]:
    """Devices that are not there from the start: those that join before they go, if they go."""
    return frozenset(_join_times(scenario, devices_by_name(groups)))


def _join_times(scenario: Iterable[Entry], by_name: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """When each device that is not there from the start joins, in seconds."""
    first = {device: entries[0] for device, entries in movements(scenario, by_name).items()}
    return {device: entry.at for device, entry in first.items() if entry.verb == "join"}


def problems(
    scenario: Sequence[Entry], churn: Churn | None, groups: Sequence[DeviceGroup], source: Source
) -> Iterator[Problem]:
    """Problems of scenario and churn with the devices in a topology that was read from `source`."""
    by_name = devices_by_name(groups)
    named: list[tuple[Where, tuple[str, ...]]] = [
        (("scenario", index, entry.verb), entry.targets) for index, entry in enumerate(scenario)
    ]
    if churn is not None and churn.devices is not None:
        named.append((("churn", "devices"), churn.devices))
    steps = sum(len(by_name.get(name, ())) for _, targets in named for name in targets)
    if steps > _MAX_STEPS:
        message = (
            f"acts on devices {steps:,} times, expected at most {_MAX_STEPS:,}: write fewer entries"
        )
        yield source.problem(("scenario",), message, at_key=True)
        return
    ambiguous = {group.name for group in groups if by_name[group.name] != group.device_names}
    unknown = 0
    for where, targets in named:
        for position, name in enumerate(targets):
            item = (*where, position)
            # A single name was made a list when it was read.
            place = item if item in source.values else where
            if name not in by_name:
                unknown += 1
                if unknown > _MAX_UNKNOWN:
                    return
                yield source.problem(place, f"found {name!r}, {_expected(name, by_name)}")
            elif name in ambiguous:
                yield source.problem(
                    place, f"found {name!r}, which is a device and a group too: rename one of the two"
                )
    if not unknown:
        yield from _too_early(scenario, by_name, source)


def _too_early(
    scenario: Sequence[Entry], by_name: Mapping[str, tuple[str, ...]], source: Source
) -> Iterator[Problem]:
    """Entries whose devices have all not joined yet; and where no device is there from the start."""
    joins = _join_times(scenario, by_name)
    for index, entry in enumerate(scenario):
        devices = expand(entry.targets, by_name)
        if entry.verb in ("crash", "pause", "disconnect") and all(
            entry.at < joins.get(device, 0.0) for device in devices
        ):
            reason = f"{devices[0]} is not there before it joins, at {joins[devices[0]]:g} s"
            yield source.problem(("scenario", index, "at"), f"{reason}: write a later time")
    if len(joins) == len({device for devices in by_name.values() for device in devices}):
        yield source.problem(
            ("scenario",),
            "every device joins later, expected at least one that is there from the start",
            at_key=True,
        )


def _expected(name: str, by_name: Mapping[str, tuple[str, ...]]) -> str:
    known = list(itertools.islice(by_name, _MAX_COMPARED))  # groups come first
    guess = did_you_mean(name, known)
    return "expected a device or a group" + (f"; {guess}" if guess else f" such as {known[0]}")
