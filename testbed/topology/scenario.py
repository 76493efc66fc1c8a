"""Keys `scenario` and `churn` of a topology: actions on devices during a run.

`testbed.topology.action_timeline` turns them into steps with times.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from agents.timing.nanoseconds import from_seconds
from testbed.topology.devices import DeviceGroup
from testbed.topology.fields import (
    Cpu,
    Duration,
    Frequency,
    Model,
    PositiveSeconds,
    Seconds,
    Share,
    Watts,
    optional,
)
from testbed.topology.links import LinkSettings
from testbed.topology.validation_errors import did_you_mean
from testbed.topology.yamlfile import Problem, Source, Where

Verb = Literal["set", "crash", "pause", "disconnect", "leave", "join", "charge", "unplug"]
_VERBS: tuple[Verb, ...] = get_args(Verb)
_VERBS_OF_KEY: dict[str, tuple[Verb, ...]] = {
    "cpu": ("set",),
    "link": ("set",),
    "background": ("set",),
    "battery": ("set",),
    "watts": ("charge",),
    "restart_after": ("crash",),
    "for": ("pause", "disconnect"),
}
_INSTEAD: dict[tuple[str, Verb], str] = {
    ("for", "crash"): "write restart_after instead",
    ("restart_after", "pause"): "write for instead",
    ("restart_after", "disconnect"): "write for instead",
}
_MAX_STEPS = 1_000_000
"""An entry counts once for each device that it names."""
_MAX_UNKNOWN = 50
_MAX_COMPARED = 1000  # names to search for a similar one; each takes about 10 µs


def _as_list(value: Any) -> Any:
    if value == ():
        raise ValueError("expected at least one device or group")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, tuple):
        raise ValueError("expected a device, a group, or a list of these such as [nano, pi-1]")
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
"""Devices and groups, as written in the file."""


class LinkChange(LinkSettings):
    """Changes of a link. Keys that are left out keep their values. A rate of null becomes
    unlimited."""

    @model_validator(mode="after")
    def _has_value(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("found nothing to change, expected a rate such as up: 1mbit")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Some keys cannot change during a run. Jitter is not compared with rtt, because the link may
        already have a larger rtt."""
        if self.trace is not None:
            raise ValueError("trace cannot begin during a run: write values such as up: 1mbit instead")
        if self.compression is not None:
            raise ValueError("compression cannot change during a run: put it into the group's link")
        if self.kind is not None:
            raise ValueError("class cannot change during a run: write values such as up: 1mbit instead")
        return self

    @property
    def changes(self) -> dict[str, float | None]:
        """By field of `agents.config.AccessLink`. A rate is None if it becomes unlimited."""
        plain = self.plain()
        given = (name for name in type(self).model_fields if name in self.model_fields_set - {"kind"})
        return {name: getattr(plain, name) for name in given}

    @model_serializer(mode="wrap")
    def _set_keys_only(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class ScenarioEntry(Model):
    """An action on devices at one time. Needs exactly one of set, crash, pause, disconnect, leave, join,
    charge and unplug. Its value is a device, a group, or a list of devices and groups."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [verb]} for verb in _VERBS]},
    )

    at: Seconds = Field(description="Time of the action, measured from the start of the run clock")
    set: Targets | None = optional(
        "Devices whose CPU share, link or battery changes, with any of cpu, link, battery; or segments, "
        "with link or background"
    )
    cpu: Cpu | None = optional("With set: new CPU share; 1 is one whole core of the host")
    link: LinkChange | None = optional("With set: changes of the link")
    background: bool | None = optional(
        "With set of segments: true switches their background traffic on, false off"
    )
    battery: Share | None = optional("With set: new level of the battery")
    crash: Targets | None = optional("Devices to kill")
    restart_after: Seconds | None = optional(
        "With crash: time until the restart. Default: no restart. The device may still join later"
    )
    pause: Targets | None = optional("Devices to freeze. After the pause, they continue where they were")
    disconnect: Targets | None = optional(
        "Devices or segments to cut off: devices keep running, but no packet passes"
    )
    for_: PositiveSeconds | None = optional("With pause or disconnect: its duration", alias="for")
    leave: Targets | None = optional(
        "Devices to leave the run, with a goodbye. The rule removes their clients"
    )
    join: Targets | None = optional(
        "Devices to join. A device that has not left or crashed before is absent from the start of the "
        "run until it joins"
    )
    charge: Targets | None = optional(
        "Devices to plug in. Without watts, each device gets its own charger back"
    )
    watts: Watts | None = optional("With charge: constant power of the charger, such as 10W")
    unplug: Targets | None = optional("Devices to unplug from their charger")

    @model_validator(mode="after")
    def _one_verb(self) -> Self:
        found = [verb for verb in _VERBS if getattr(self, verb) is not None]
        if not found:
            raise ValueError(
                f"found none of {', '.join(_VERBS)}, expected one of them such as crash: nano"
            )
        if len(found) > 1:
            raise ValueError(f"found {' and '.join(found)}, expected one: write an entry for each")
        return self

    @model_validator(mode="after")
    def _keys_fit_verb(self) -> Self:
        verb = self.verb
        for key, verbs in _VERBS_OF_KEY.items():
            value = self.for_ if key == "for" else getattr(self, key)
            if value is not None and verb not in verbs:
                fix = _INSTEAD.get((key, verb), "remove it")
                raise ValueError(f"{key} applies to {' and '.join(verbs)}, not to {verb}: {fix}")
        if verb == "set" and all(
            one is None for one in (self.cpu, self.link, self.battery, self.background)
        ):
            raise ValueError("set changes nothing: add cpu, link or battery, such as cpu: 0.05")
        if verb in _VERBS_OF_KEY["for"] and self.for_ is None:
            raise ValueError(f"{verb} has no duration: add for, such as for: 3s")
        return self

    @property
    def verb(self) -> Verb:
        return next(verb for verb in _VERBS if getattr(self, verb) is not None)

    @property
    def acts_on_battery(self) -> bool:
        return self.battery is not None or self.verb in ("charge", "unplug")

    @property
    def targets(self) -> tuple[str, ...]:
        """Devices and groups, as written in the file."""
        return cast(tuple[str, ...], getattr(self, self.verb))

    @property
    def duration(self) -> float | None:
        """Seconds; None if the action has no end."""
        return self.restart_after if self.verb == "crash" else self.for_

    @model_serializer(mode="wrap")
    def _set_keys_only(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class Churn(Model):
    """Random crashes: each device crashes and restarts independently of the others."""

    rate: Frequency = Field(description="How often each device crashes while it is up, such as 2/min")
    downtime: Duration = Field(description="Time from a crash to the restart")
    devices: Targets | None = optional("Devices and groups that crash. Default: all")


def devices_by_group(groups: Iterable[DeviceGroup]) -> dict[str, tuple[str, ...]]:
    members: dict[str, list[str]] = {}
    for group in groups:
        members.setdefault(group.group_name, []).extend(group.device_names)
    return {name: tuple(devices) for name, devices in members.items()}


def expand(targets: Iterable[str], by_group: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return each device once. A name of no group stands for itself: it is that of a device or of a
    segment."""
    return tuple(dict.fromkeys(device for name in targets for device in by_group.get(name, (name,))))


def movements(
    scenario: Iterable[ScenarioEntry], by_group: Mapping[str, tuple[str, ...]]
) -> dict[str, list[ScenarioEntry]]:
    """Return the entries of each device, in the order of time, in which it joins, leaves, or crashes
    without a restart. Devices without movements are left out."""
    found: dict[str, list[ScenarioEntry]] = {}
    for entry in sorted(scenario, key=lambda entry: from_seconds(entry.at)):
        if entry.verb in ("crash", "leave", "join") and entry.duration is None:
            for device in expand(entry.targets, by_group):
                found.setdefault(device, []).append(entry)
    return found


def absent_at_start(scenario: Iterable[ScenarioEntry], groups: Iterable[DeviceGroup]) -> frozenset[str]:
    """A device is absent if its first movement is to join."""
    groups = tuple(groups)
    joining = {device for group in groups if group.joins_first for device in group.device_names}
    return frozenset(joining).union(_join_times(scenario, devices_by_group(groups)))


def _join_times(
    scenario: Iterable[ScenarioEntry], by_group: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    first = {device: entries[0] for device, entries in movements(scenario, by_group).items()}
    return {device: entry.at for device, entry in first.items() if entry.verb == "join"}


def problems(
    scenario: Sequence[ScenarioEntry],
    churn: Churn | None,
    groups: Sequence[DeviceGroup],
    source: Source,
    segments: Collection[str] = (),
) -> Iterator[Problem]:
    """Problems are too many actions, unknown or ambiguous names, and actions on devices that are absent,
    or that do not apply to segments."""
    by_group = devices_by_group(groups)
    by_name = by_group | {device: (device,) for group in groups for device in group.device_names}
    named: list[tuple[Where, tuple[str, ...]]] = [
        (("scenario", index, entry.verb), entry.targets) for index, entry in enumerate(scenario)
    ]
    if churn is not None and churn.devices is not None:
        named.append((("churn", "devices"), churn.devices))
    steps = sum(len(by_name.get(name, ())) for _, targets in named for name in targets)
    if steps > _MAX_STEPS:
        message = (
            f"has {steps:,} actions on devices, expected at most {_MAX_STEPS:,}: write fewer entries"
        )
        yield source.problem(("scenario",), message, at_key=True)
        return
    ambiguous = {group.name for group in groups if by_name[group.name] != group.device_names}
    unknown = 0
    for where, targets in named:
        for position, name in enumerate(targets):
            item = (*where, position)
            # A single name became a list when it was read.
            place = item if item in source.values else where
            if name in segments and where[0] == "scenario":
                if problem := _segment_problem(scenario[int(where[1])], name):
                    yield source.problem(place, problem)
            elif name not in by_name:
                unknown += 1
                if unknown > _MAX_UNKNOWN:
                    return
                yield source.problem(place, f"found {name!r}, {_expected_target(name, by_name)}")
            elif name in ambiguous:
                yield source.problem(
                    place, f"found {name!r}, which is both a device and a group: rename one of the two"
                )
            elif where[0] == "scenario" and scenario[int(where[1])].background is not None:
                yield source.problem(
                    place,
                    f"{name} is no segment, and only segments have background traffic: name a segment, "
                    "or remove background",
                )
    if not unknown:
        yield from _too_early(scenario, groups, by_group, source)


def _segment_problem(entry: ScenarioEntry, segment: str) -> str | None:
    if entry.verb not in ("set", "disconnect") or entry.cpu is not None or entry.battery is not None:
        return f"{segment} is a segment: only set with link or background, and disconnect, apply to it"
    return None


def _too_early(
    scenario: Sequence[ScenarioEntry],
    groups: Sequence[DeviceGroup],
    by_group: Mapping[str, tuple[str, ...]],
    source: Source,
) -> Iterator[Problem]:
    """A crash, pause or disconnection must not happen while all its devices are still absent, and some
    device must be present when the run starts."""
    joins = _join_times(scenario, by_group)
    for index, entry in enumerate(scenario):
        devices = expand(entry.targets, by_group)
        if (
            entry.verb in ("crash", "pause", "disconnect")
            and devices
            and all(entry.at < joins.get(device, 0.0) for device in devices)
        ):
            reason = f"{devices[0]} is absent until it joins at {joins[devices[0]]:g} s"
            yield source.problem(("scenario", index, "at"), f"{reason}: write a later time")
    absent = absent_at_start(scenario, groups)
    if len(absent) == len({device for devices in by_group.values() for device in devices}):
        yield source.problem(
            ("scenario",) if joins else ("devices",),
            "every device joins later, expected at least one that is present from the start",
            at_key=True,
        )


def _expected_target(name: str, by_name: Mapping[str, tuple[str, ...]]) -> str:
    known = list(itertools.islice(by_name, _MAX_COMPARED))  # groups come first
    guess = did_you_mean(name, known)
    return "expected a device or a group" + (f"; {guess}" if guess else f" such as {known[0]}")
