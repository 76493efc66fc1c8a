"""Actions on devices during a run: classes, JSON form, and their effect on a device's state. No I/O and
no clock.

A device does not work while one of four independent conditions, the holds, is true: it is down, frozen,
cut off, or unpowered.

- The device's process runs while the device is present, powered and not down. A process that starts
  while the device is frozen is frozen as soon as possible. While the device is cut off, no packet
  passes. A device that is down can still be frozen, thawed, cut off and connected. If it leaves, no
  goodbye is sent.
- `Join` starts a device that is absent, because it has not joined yet, has left, or has had a permanent
  `Crash`. `Join` ends all holds except `unpowered`.
- `PowerOff` and `PowerOn` follow from the device's own state: nobody orders them. A power-off kills the
  process as a crash does. A device that is restarted or joins while it is unpowered starts when its
  power returns.
- `SetLink`, `SetBackground`, `Disconnect` and `Reconnect` may also name a segment of the network.
- `SetCpu`, `SetLink` and the actions of features (`agents.features.Action`) apply to the device, not to
  its process: they persist over crashes and absence.

To add an action without a value, write a class, add it to `Switching`, and add a row to `_HOLDS`. To add
an action with a value, write a class and add it to `Action`. The type checker then reports each place
that does not handle the action yet, in every runtime.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from agents import features
from agents.checks import convert
from agents.fields import ActionFields, FeatureAction

_MAX_CORES = 1e6
_MAX_BITS_PER_SECOND = 10**15
_MAX_SECONDS = 1e10
_Rate = Annotated[int, Meta(ge=1, le=_MAX_BITS_PER_SECOND)]
_Seconds = Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]


class SetCpu(ActionFields, frozen=True, tag="set"):
    """Change the CPU share."""

    cpu: float
    """Host cores."""


class SetLink(ActionFields, frozen=True, tag="set"):
    """Change properties of the link."""

    changes: Mapping[str, int | float | None] = msgspec.field(name="link")
    """New values of fields of `agents.config.AccessLink`. Others do not change."""


class _LinkChanges(Struct, forbid_unknown_fields=True):
    up: _Rate | None = None
    down: _Rate | None = None
    rtt: _Seconds | None = None
    jitter: _Seconds | None = None
    loss: Annotated[float, Meta(ge=0, le=1)] | None = None


class SetBackground(ActionFields, frozen=True, tag="background"):
    """Traffic of other people on a segment."""

    on: bool


class Crash(ActionFields, frozen=True):
    """Kill the device's process, without a goodbye."""


class Restart(ActionFields, frozen=True):
    """Start the process again after a crash."""


class Pause(ActionFields, frozen=True):
    """Freeze the process."""


class Resume(ActionFields, frozen=True):
    """Continue the frozen process."""


class Disconnect(ActionFields, frozen=True):
    """Block all packets. The process continues."""


class Reconnect(ActionFields, frozen=True):
    """Let packets pass again."""


class Leave(ActionFields, frozen=True):
    """Leave the run: the client says goodbye and ends."""


class Join(ActionFields, frozen=True):
    """Join the run, for the first time or again. All holds except `unpowered` end."""


class PowerOff(ActionFields, frozen=True):
    """Power off: kill the process, without a goodbye."""


class PowerOn(ActionFields, frozen=True):
    """Start again because there is power."""


Switching = Crash | Restart | Pause | Resume | Disconnect | Reconnect | Leave | Join | PowerOff | PowerOn
"""Actions without a value. Each begins or ends a hold."""
DeviceAction = SetCpu | SetLink | features.Action | Switching
Action = DeviceAction | SetBackground
SegmentAction = SetLink | SetBackground | Disconnect | Reconnect
"""Named in place of a device. `Disconnect` cuts the segment."""


class _Set(ActionFields, frozen=True, tag="set"):
    cpu: Annotated[float, Meta(ge=0, le=_MAX_CORES)] | None = None
    link: _LinkChanges | None = None


class _AnyAction(Struct):
    """Wrapper for the union of actions, which `parse` validates."""

    action: _Set | SetBackground | features.Action | Switching


Hold = Literal["down", "frozen", "cut off", "unpowered"]
"""No process, a frozen process, no packets, or no power."""

_HOLDS: Mapping[type[Switching], Mapping[Hold, bool]] = {
    Crash: {"down": True},
    Restart: {"down": False},
    Pause: {"frozen": True},
    Resume: {"frozen": False},
    Disconnect: {"cut off": True},
    Reconnect: {"cut off": False},
    Leave: {"down": True},
    Join: {"down": False, "frozen": False, "cut off": False},
    PowerOff: {"unpowered": True},
    PowerOn: {"unpowered": False},
}
"""Holds that each action begins (True) or ends (False). Of several, `hold_of` returns the first."""


def holds(action: Switching) -> Mapping[Hold, bool]:
    return _HOLDS[type(action)]


def hold_of(action: Switching) -> Hold:
    """`down` for a `Join`, which ends several holds."""
    return next(iter(_HOLDS[type(action)]))


def name_of(action: Switching) -> str:
    return type(action).__name__.lower()


BY_NAME: Mapping[str, Switching] = {name_of(action): action for action in (kind() for kind in _HOLDS)}


def to_json(action: Action) -> dict[str, Any]:
    """Return the JSON form, such as `{"action": "crash"}`, `{"action": "set", "cpu": 0.05}` or
    `{"action": "set", "link": {"up": 1000000}}`, with rates in bit/s, times in seconds and powers in
    watts."""
    return dict(msgspec.to_builtins(action, enc_hook=float))  # the hook converts NumPy numbers


def from_json(details: Mapping[str, Any]) -> Action | None:
    """None if this version does not know the action. Integers in `link` may be floats, as some tables
    store them."""
    match details:
        case {"link": Mapping() as link}:
            whole = {key: int(x) for key, x in link.items() if isinstance(x, float) and x.is_integer()}
            details = {**details, "link": {**link, **whole}}
    try:
        return parse(details)
    except msgspec.ValidationError:
        return None


def parse(details: Mapping[str, Any]) -> Action:
    """Raises msgspec.ValidationError with the path of the wrong value."""
    action = convert({"action": details}, _AnyAction).action
    if not isinstance(action, _Set):
        return action
    if action.cpu is not None:
        return SetCpu(action.cpu)
    if action.link is None:
        raise msgspec.ValidationError("Expected `cpu` or `link` - at `$.action`")
    return SetLink(details["link"])


@dataclass(frozen=True, slots=True)
class DeviceState:
    """State of a device after all actions since the start of the run."""

    cpu: float | None = None
    """Host cores."""
    link: Mapping[str, float | None] = field(default_factory=dict)
    """Changed fields, as in `SetLink`."""
    background: bool | None = None
    features: Mapping[str, features.Action] = field(default_factory=dict)
    """Last action on each part of the state, in order (`FeatureAction.sets`)."""
    switched: Mapping[Hold, Switching] = field(default_factory=dict)
    """Last action on each hold, in order. A `Join` removes all but that of `unpowered`, and is stored as
    the last on `down`."""

    def with_action(self, action: Action) -> DeviceState:
        match action:
            case SetCpu(cpu):
                return dataclasses.replace(self, cpu=cpu)
            case SetLink(changes):
                return dataclasses.replace(self, link={**self.link, **changes})
            case SetBackground(on):
                return dataclasses.replace(self, background=on)
            case FeatureAction():
                if (part := action.sets) is None:
                    return self
                rest = {name: last for name, last in self.features.items() if name != part}
                return dataclasses.replace(self, features={**rest, part: action})
            case _:
                ended = holds(action)
                others = {hold: last for hold, last in self.switched.items() if hold not in ended}
                return dataclasses.replace(self, switched={**others, hold_of(action): action})

    @property
    def is_held(self) -> bool:
        """Any hold keeps the device from working."""
        return any(holds(last)[hold] for hold, last in self.switched.items())

    def actions(self) -> Iterator[Action]:
        """Shortest list of actions that brings a new device into this state."""
        if self.cpu is not None:
            yield SetCpu(self.cpu)
        if self.link:
            yield SetLink(self.link)
        if self.background is not None:
            yield SetBackground(self.background)
        yield from self.features.values()
        yield from self.switched.values()
