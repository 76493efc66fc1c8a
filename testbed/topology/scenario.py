"""Keys `scenario` and `churn` of a topology: actions on devices during a run. And the timeline of a run:
scenario, heat, churn and availability as steps with a time and a device.

No clock and no I/O. `agents.device_actions` defines the actions.

Overlapping causes are merged, such as a pause within a pause, or churn of a device that the scenario has
crashed. A device is down, paused or disconnected as long as at least one cause lasts. The actions that
begin and end this state alternate.

Until it joins, an absent device gets only actions that last over absence, such as `SetCpu` and
`SetLink`. If the device joins during a pause or disconnection, the pause or disconnection begins at the
same time. The earlier crashes of a device that joins no longer count.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self, assert_never, cast, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from agents import random_generators
from agents.device_actions import (
    BY_NAME,
    Action,
    Crash,
    Disconnect,
    Hold,
    Join,
    Leave,
    Pause,
    PowerOff,
    PowerOn,
    Reconnect,
    Restart,
    Resume,
    SetBackground,
    SetCpu,
    SetLink,
    Switching,
    hold_of,
)
from agents.energy.messages import Charge, SetBattery, Unplug
from agents.fields import FeatureAction
from agents.timing import durations
from agents.timing.nanoseconds import Nanoseconds, from_seconds
from testbed.topology.devices import DeviceGroup
from testbed.topology.fields import (
    Cpu,
    Duration,
    Frequency,
    Model,
    PositiveSeconds,
    Seconds,
    Share,
    Thermal,
    Watts,
    optional,
)
from testbed.topology.links import Availability, LinkSettings
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


@dataclass(frozen=True, slots=True)
class Step:
    at: Nanoseconds
    """Device time, counted from the start of the run clock."""
    device: str
    action: Action


@dataclass(frozen=True, slots=True)
class Heat:
    cpu: float
    """At the start of the run; 1 is one host core."""
    thermal: Thermal


class _CausedStep(NamedTuple):
    step: Step
    cause: object = None
    """Object that identifies a span, such as the time from a crash to the restart. The steps that begin
    and end the span have the same object. None if the step belongs to no span."""


_ENDED_BY: Mapping[Switching, Switching] = {
    Crash(): Restart(),
    Pause(): Resume(),
    Disconnect(): Reconnect(),
}


def timeline(
    scenario: Sequence[ScenarioEntry],
    churn: Churn | None,
    groups: Sequence[DeviceGroup],
    seed: int,
    horizon: Nanoseconds | None = None,
    heat: Mapping[str, Heat] = MappingProxyType({}),
) -> Iterator[Step]:
    """Yield all steps in the order of time.

    `horizon`: yield only the steps before this time. `heat`: by device.

    Steps of the same time are sorted: first scenario entries in the order of the file, then heat, the
    groups' own actions, churn and availability, each in device order. The iterator is lazy, and endless
    under churn. The iterator's memory grows with the number of devices and the size of the file, not
    with time. The same arguments give the same steps.
    """
    by_group = devices_by_group(groups)
    ends = _ends(scenario, by_group)
    scripted = _scenario_steps(scenario, by_group)
    streams: list[Iterable[_CausedStep]] = [scripted, _heat_steps(scripted, heat)]
    streams += [
        _listed_steps(group.actions, device)
        for group in groups
        if group.actions
        for device in group.device_names
    ]
    for device, drawn in _random_steps(churn, groups, by_group, seed):
        # No random steps after a device has left for good: dropping them one by one would never end.
        streams.append(_before(ends.get(device), drawn))
    merged = heapq.merge(*streams, key=_time)
    return _effective_steps(_before(horizon, merged), absent_at_start(scenario, groups))


def _time(due: _CausedStep) -> Nanoseconds:
    return due.step.at


def _before(end: Nanoseconds | None, dues: Iterator[_CausedStep]) -> Iterator[_CausedStep]:
    return dues if end is None else itertools.takewhile(lambda due: due.step.at < end, dues)


def _ends(
    scenario: Iterable[ScenarioEntry], by_group: Mapping[str, tuple[str, ...]]
) -> dict[str, Nanoseconds]:
    """Map each device that leaves or crashes for good to the time of that action."""
    last = {device: entries[-1] for device, entries in movements(scenario, by_group).items()}
    return {device: from_seconds(entry.at) for device, entry in last.items() if entry.verb != "join"}


def _scenario_steps(
    scenario: Iterable[ScenarioEntry], by_group: Mapping[str, tuple[str, ...]]
) -> list[_CausedStep]:
    dues: list[_CausedStep] = []
    for entry in scenario:
        at = from_seconds(entry.at)
        for device in expand(entry.targets, by_group):
            if entry.cpu is not None:
                dues.append(_CausedStep(Step(at, device, SetCpu(entry.cpu))))
            if entry.link is not None:
                dues.append(_CausedStep(Step(at, device, SetLink(entry.link.changes))))
            if entry.background is not None:
                dues.append(_CausedStep(Step(at, device, SetBackground(entry.background))))
            if entry.battery is not None:
                dues.append(_CausedStep(Step(at, device, SetBattery(entry.battery))))
            if entry.verb == "charge":
                dues.append(_CausedStep(Step(at, device, Charge(entry.watts))))
            elif entry.verb == "unplug":
                dues.append(_CausedStep(Step(at, device, Unplug())))
            elif entry.duration is not None:
                dues += _span(at, from_seconds(entry.duration), device, BY_NAME[entry.verb])
            elif entry.verb != "set":
                dues.append(_CausedStep(Step(at, device, BY_NAME[entry.verb])))
    return sorted(dues, key=_time)  # stable: keeps the order of the file


def _heat_steps(scripted: Iterable[_CausedStep], heat: Mapping[str, Heat]) -> list[_CausedStep]:
    """Return one `SetCpu` per device in `heat`, at the time `thermal.after` of the device. The new CPU
    share is the device's share at that time, multiplied by `thermal.to`. If the scenario sets the share
    later, the new share is not multiplied."""
    cpu = {device: one.cpu for device, one in heat.items()}
    at = {device: from_seconds(one.thermal.after) for device, one in heat.items()}
    for step, _ in scripted if heat else ():
        if step.device in heat and step.at <= at[step.device] and isinstance(step.action, SetCpu):
            cpu[step.device] = step.action.cpu
    dues = [
        _CausedStep(Step(at[device], device, SetCpu(cpu[device] * one.thermal.to)))
        for device, one in heat.items()
    ]
    return sorted(dues, key=_time)


def _span(
    at: Nanoseconds, duration: Nanoseconds, device: str, begin: Switching
) -> tuple[_CausedStep, _CausedStep]:
    cause = object()
    return (
        _CausedStep(Step(at, device, begin), cause),
        _CausedStep(Step(at + duration, device, _ENDED_BY[begin]), cause),
    )


def _listed_steps(actions: Sequence[tuple[float, str]], device: str) -> list[_CausedStep]:
    """A crash that no restart follows is for good, as in the scenario."""
    cause = object()
    moves = [name for _, name in actions if name in ("crash", "restart", "leave", "join")]
    restarted = iter([*moves, ""][1:])  # what follows each move
    dues = []
    for at, name in actions:
        lasts = name in ("leave", "join") or (name == "crash" and next(restarted) != "restart")
        if name in ("restart", "leave", "join"):
            next(restarted)
        dues.append(_CausedStep(Step(from_seconds(at), device, BY_NAME[name]), None if lasts else cause))
    return dues


def _random_steps(
    churn: Churn | None,
    groups: Sequence[DeviceGroup],
    by_group: Mapping[str, tuple[str, ...]],
    seed: int,
) -> Iterator[tuple[str, Iterator[_CausedStep]]]:
    """The churn of all devices comes first, and then the availability of all devices."""
    if churn is not None:
        named = by_group if churn.devices is None else churn.devices
        churned = frozenset(expand(named, by_group))
        for device in (device for group in groups for device in group.device_names):
            if device in churned:
                yield device, _churn_steps(churn, seed, device)
    for group in groups:
        if group.availability is not None:
            for device in group.device_names:
                yield device, _availability_steps(group.availability, seed, device)


def _churn_steps(churn: Churn, seed: int, device: str) -> Iterator[_CausedStep]:
    # Two generators, so that another downtime does not change the times between crashes.
    between = random_generators.generator(seed, device, "churn")
    downtime = durations.sampler(
        churn.downtime.plain(), random_generators.generator(seed, device, "downtime")
    )
    at: Nanoseconds = 0
    while True:
        at += from_seconds(between.exponential(1 / churn.rate))
        down = from_seconds(downtime())
        yield from _span(at, down, device, Crash())
        at += down


def _availability_steps(availability: Availability, seed: int, device: str) -> Iterator[_CausedStep]:
    cause = object()  # one for all: a device is not off twice at the same time
    for at, is_on in availability.changes(seed, device):
        yield _CausedStep(Step(at, device, Reconnect() if is_on else Disconnect()), cause)


def _effective_steps(dues: Iterable[_CausedStep], absent: Iterable[str]) -> Iterator[Step]:
    gone = set(absent)
    held: defaultdict[tuple[str, Hold], set[object]] = defaultdict(set)
    for step, cause in dues:
        device, action = step.device, step.action
        match action:
            case SetCpu() | SetLink() | SetBackground() | FeatureAction():
                yield step
            case Join():
                if device in gone:
                    gone.remove(device)
                    yield step
                    for begin in (Pause(), Disconnect()):
                        if held[device, hold_of(begin)]:
                            yield Step(step.at, device, begin)
            case Leave():
                if device not in gone:
                    gone.add(device)
                    held.pop((device, "down"), None)
                    yield step
            case Crash() if cause is None:
                if device not in gone:
                    gone.add(device)
                    if not held.pop((device, "down"), None):
                        yield step
            case Crash() if device in gone:
                pass
            case Crash() | Pause() | Disconnect():
                causes = held[device, hold_of(action)]
                causes.add(cause)
                if len(causes) == 1 and device not in gone:
                    yield step
            case Restart() | Resume() | Reconnect():
                causes = held[device, hold_of(action)]
                if cause in causes:  # else its crash was forgotten when the device left
                    causes.remove(cause)
                    if not causes and device not in gone:
                        yield step
            case PowerOff() | PowerOn():
                raise ValueError(f"{action} cannot be planned: it follows from the battery")
            case _:
                assert_never(action)
