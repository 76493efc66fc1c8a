"""What is done to a device during a run: the actions, their JSON form, and what they make of a device.

Pure. Three things keep a device from working, none of which depends on another: it is down, frozen, or
cut off.

- A process exists while the device is there and not down. One that starts while the device is frozen is
  frozen as soon as it can be; while the device is cut off no packet passes. A device that is down can be
  frozen, thawed, cut off and connected, and it leaves without a goodbye.
- `Join` starts a device that is not there: from the start, since it left, or since a `Crash` for good.
  Nothing holds it then.
- `SetCpu` and `SetLink` are of the device and not of its process: they outlive crashes and absence.

A new action is a class, a member of `Switching` and a row of `_HOLDS`; one that carries a figure is a
class and a member of `Action`. The type checker then names all that does not handle it yet, each runtime
among them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

_MAX_CORES = 1e6
_MAX_BITS_PER_SECOND = 10**15
_MAX_SECONDS = 1e10
_Rate = Annotated[int, Meta(ge=1, le=_MAX_BITS_PER_SECOND)]
_Seconds = Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]


class _DeviceAction(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """An action's JSON form names it as `action`."""


class SetCpu(_DeviceAction, frozen=True, tag="set"):
    cpu: float
    """Share of one host core."""


class SetLink(_DeviceAction, frozen=True, tag="set"):
    changes: Mapping[str, int | float | None] = msgspec.field(name="link")
    """Fields of `agents.config.Link` in its units; the others stay as they are."""


class _LinkChanges(Struct, forbid_unknown_fields=True):
    up: _Rate | None = None
    down: _Rate | None = None
    rtt: _Seconds | None = None
    jitter: _Seconds | None = None
    loss: Annotated[float, Meta(ge=0, le=1)] | None = None


class Crash(_DeviceAction, frozen=True):
    """Kill it at once, without a goodbye."""


class Restart(_DeviceAction, frozen=True):
    """Start it again after a crash."""


class Pause(_DeviceAction, frozen=True):
    """Freeze it."""


class Resume(_DeviceAction, frozen=True):
    """Let it go on where it was."""


class Disconnect(_DeviceAction, frozen=True):
    """Let no packet pass; its process goes on."""


class Reconnect(_DeviceAction, frozen=True):
    """Let packets pass again."""


class Leave(_DeviceAction, frozen=True):
    """Leave in order: the client says goodbye and ends."""


class Join(_DeviceAction, frozen=True):
    """It comes, for the first time or again; nothing of what held it before does so any more."""


Switching = Crash | Restart | Pause | Resume | Disconnect | Reconnect | Leave | Join
"""Actions that carry no figure: each begins or ends what keeps a device from working."""
Action = SetCpu | SetLink | Switching


class _Set(_DeviceAction, frozen=True, tag="set"):
    cpu: Annotated[float, Meta(ge=0, le=_MAX_CORES)] | None = None
    link: _LinkChanges | None = None


class _AnyAction(Struct):
    """What `parsed` checks."""

    action: _Set | Switching


Hold = Literal["down", "frozen", "cut off"]
"""What keeps a device from working: it has no process, its process is frozen, or no packet passes."""

_HOLDS: Mapping[type[Switching], Mapping[Hold, bool]] = {
    Crash: {"down": True},
    Restart: {"down": False},
    Pause: {"frozen": True},
    Resume: {"frozen": False},
    Disconnect: {"cut off": True},
    Reconnect: {"cut off": False},
    Leave: {"down": True},
    Join: {"down": False, "frozen": False, "cut off": False},
}
"""What each action begins (True) and ends (False). The first is what the action is about."""


def holds(action: Switching) -> Mapping[Hold, bool]:
    """What `action` begins (True) and ends (False)."""
    return _HOLDS[type(action)]


def hold_of(action: Switching) -> Hold:
    """The hold whose begin or end `action` is; a `Join` is about `down`, and ends the others as well."""
    return next(iter(_HOLDS[type(action)]))


def name_of(action: Switching) -> str:
    """In the JSON form: `crash`."""
    return type(action).__name__.lower()


BY_NAME: Mapping[str, Switching] = {name_of(action): action for action in (kind() for kind in _HOLDS)}


def to_json(action: Action) -> dict[str, Any]:
    """`{"action": "crash"}`, or a figure: `{"action": "set", "cpu": 0.05}`, and for links
    `{"action": "set", "link": {"up": 1000000}}`, with rates in bit/s and times in seconds."""
    return dict(msgspec.to_builtins(action, enc_hook=float))  # the hook: of a NumPy number


def from_json(details: Mapping[str, Any]) -> Action | None:
    """The action with this JSON form; None for one that this version does not know. Whole numbers may
    be floats, as they are after they have been in a table."""
    match details:
        case {"link": Mapping() as link}:
            whole = {key: int(x) for key, x in link.items() if isinstance(x, float) and x.is_integer()}
            details = {**details, "link": {**link, **whole}}
    try:
        return parse(details)
    except msgspec.ValidationError:
        return None


def parse(details: Mapping[str, Any]) -> Action:
    """As `from_json`. Raises msgspec.ValidationError, which has the path of what is wrong."""
    action = msgspec.convert({"action": details}, _AnyAction).action
    if not isinstance(action, _Set):
        return action
    if action.cpu is not None:
        return SetCpu(action.cpu)
    if action.link is None:
        raise msgspec.ValidationError("Expected `cpu` or `link` - at `$.action`")
    return SetLink(details["link"])


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What actions have made of a device since the run began: a fold over them by `with_action`."""

    cpu: float | None = None
    """Share of one host core; None: as at the beginning."""
    link: Mapping[str, float | None] = field(default_factory=dict)
    """What has changed of its link since the beginning, as in `SetLink`."""
    switched: Mapping[Hold, Switching] = field(default_factory=dict)
    """The last action about each hold, in the order they were done in; none where a `Join` ended it."""

    def with_action(self, action: Action) -> DeviceState:
        """What `action` makes of it."""
        match action:
            case SetCpu(cpu):
                return dataclasses.replace(self, cpu=cpu)
            case SetLink(changes):
                return dataclasses.replace(self, link={**self.link, **changes})
            case _:
                ended = holds(action)
                others = {hold: last for hold, last in self.switched.items() if hold not in ended}
                return dataclasses.replace(self, switched={**others, hold_of(action): action})

    @property
    def is_held(self) -> bool:
        """Whether anything keeps it from working."""
        return any(holds(last)[hold] for hold, last in self.switched.items())

    def actions(self) -> Iterator[Action]:
        """The fewest that make the same of a device that is as at the beginning."""
        if self.cpu is not None:
            yield SetCpu(self.cpu)
        if self.link:
            yield SetLink(self.link)
        yield from self.switched.values()
