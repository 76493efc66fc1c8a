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
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class SetCpu:
    share: float
    """Of one host core."""


@dataclass(frozen=True, slots=True)
class SetLink:
    changes: Mapping[str, float | None]
    """Fields of `agents.config.Link` in its units; the others stay as they are."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Kill it at once, without a goodbye."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after a crash."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Freeze it."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Let it go on where it was."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Let no packet pass; its process goes on."""


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Let packets pass again."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave in order: the client says goodbye and ends."""


@dataclass(frozen=True, slots=True)
class Join:
    """It comes, for the first time or again; nothing of what held it before does so any more."""


Switching = Crash | Restart | Pause | Resume | Disconnect | Reconnect | Leave | Join
"""Actions that carry no figure: each begins or ends what keeps a device from working."""
Action = SetCpu | SetLink | Switching

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


def about(action: Switching) -> Hold:
    """The hold whose begin or end `action` is; a `Join` is about `down`, and ends the others as well."""
    return next(iter(_HOLDS[type(action)]))


def name_of(action: Switching) -> str:
    """In the JSON form: `crash`."""
    return type(action).__name__.lower()


BY_NAME: Mapping[str, Switching] = {name_of(action): action for action in (kind() for kind in _HOLDS)}


def to_json(action: Action) -> dict[str, Any]:
    """`{"action": "crash"}`, or a figure: `{"action": "set", "cpu": 0.05}`, and for links
    `{"action": "set", "link": {"up": 1000000}}`, with rates in bit/s and times in seconds."""
    match action:
        case SetCpu(share):
            return {"action": "set", "cpu": share}
        case SetLink(changes):
            return {"action": "set", "link": dict(changes)}
        case _:
            return {"action": name_of(action)}


def from_json(details: Mapping[str, Any]) -> Action | None:
    """What `to_json` gave; None for an action that this version does not know."""
    match details:
        case {"action": "set", "cpu": float() | int() as share}:
            return SetCpu(float(share))
        case {"action": "set", "link": Mapping() as changes}:
            return SetLink(changes)
        case {"action": str() as name}:
            return BY_NAME.get(name)
    return None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What actions have made of a device since the run began: a fold over them by `after`."""

    cpu: float | None = None
    """Share of one host core; None: as at the beginning."""
    link: Mapping[str, float | None] = field(default_factory=dict)
    """What has changed of its link since the beginning, as in `SetLink`."""
    switched: Mapping[Hold, Switching] = field(default_factory=dict)
    """The last action about each hold, in the order they were done in; none where a `Join` ended it."""

    def after(self, action: Action) -> DeviceState:
        """What `action` makes of it."""
        match action:
            case SetCpu(share):
                return dataclasses.replace(self, cpu=share)
            case SetLink(changes):
                return dataclasses.replace(self, link={**self.link, **changes})
            case _:
                ended = holds(action)
                others = {hold: last for hold, last in self.switched.items() if hold not in ended}
                return dataclasses.replace(self, switched={**others, about(action): action})

    @property
    def held(self) -> bool:
        """Whether anything keeps it from working."""
        return any(holds(last)[hold] for hold, last in self.switched.items())

    def actions(self) -> Iterator[Action]:
        """The fewest that make the same of a device that is as at the beginning."""
        if self.cpu is not None:
            yield SetCpu(self.cpu)
        if self.link:
            yield SetLink(self.link)
        yield from self.switched.values()
