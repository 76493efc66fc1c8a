"""The user's choices on the screen, and the effect of keys on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan

from agents.device_actions import Crash, Pause, Restart, Resume, Switching, name_of
from analysis.activity import PAUSED
from analysis.figures import FIGURES
from analysis.part import DeviceFigure
from testbed.watching.rows import SORTS, Row

HELP = "↑↓ select  s sort  / filter  g group  b bar  p pause  x kill  r restart"
COMMAND_KEYS = ("p", "x", "r")
"""Keys that need a selected row."""
_ACTIONS: dict[str, Switching] = {"x": Crash(), "r": Restart()}
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -(10**9), "end": 10**9}
_PAGES = {"page up": -1, "page down": 1}
_VERBS: dict[Switching, str] = {Crash(): "kill"}


@dataclass(frozen=True, slots=True)
class Command:
    """Action that the user wants to perform on devices."""

    action: Switching
    devices: tuple[str, ...]
    label: str

    def __str__(self) -> str:
        return f"{_VERBS.get(self.action, name_of(self.action))} {self.label}"


@dataclass(frozen=True, slots=True)
class Quit:
    pass


Request = Command | Quit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    sort: str = ""
    """Key of `rows.SORTS`."""
    reverse: bool = False
    matching: str = ""
    """Text in the name, group or state of the rows shown."""
    typing: bool = False
    """True while the user types the filter: keys are added to `matching`."""
    grouped: bool | None = None
    """None if the user has not chosen: then true if the devices do not fit on the screen."""
    stacked: bool = False
    """Bars show the share of each state in the last minute, else the states over time."""
    selected: str | None = None
    unconfirmed: Command | None = None
    """Waits for the user's confirmation."""


def press_key(
    choices: Choices, key: str, rows: Sequence[Row], *, page: int, grouped: bool
) -> tuple[Choices, Request]:
    """Return the new choices and the request, if any. `page`: number of rows on the screen. `grouped`:
    whether rows are groups."""
    if choices.unconfirmed is not None:
        return replace(choices, unconfirmed=None), choices.unconfirmed if key in ("y", "Y") else None
    if choices.typing:
        return _typed(choices, key), None
    if key in _MOVES or key in _PAGES:
        steps = _MOVES.get(key, 0) + page * _PAGES.get(key, 0)
        return replace(choices, selected=_moved(choices, rows, steps)), None
    match key:
        case "q":
            return choices, Quit()
        case "s":
            unknown = {one.title for one in FIGURES.values() if one.sort and not _is_known(one, rows)}
            sorts = [name for name in SORTS if name not in unknown]
            following = sorts[(sorts.index(choices.sort) + 1) % len(sorts)]
            return replace(choices, sort=following, reverse=False), None
        case "S":
            return replace(choices, reverse=not choices.reverse), None
        case "/":
            return replace(choices, typing=True), None
        case "escape":
            return replace(choices, matching="", selected=None), None
        case "g":
            return replace(choices, grouped=not grouped, selected=None), None
        case "b":
            return replace(choices, stacked=not choices.stacked), None
        case _ if key in COMMAND_KEYS:
            return _command(choices, key, rows)
    return choices, None


def _is_known(figure: DeviceFigure, rows: Sequence[Row]) -> bool:
    return any(not isnan(row.figures[figure.name]) for row in rows)


def _typed(choices: Choices, key: str) -> Choices:
    match key:
        case "enter":
            return replace(choices, typing=False)
        case "escape":
            return replace(choices, typing=False, matching="")
        case "backspace":
            return replace(choices, matching=choices.matching[:-1])
        case _ if len(key) == 1 and key.isprintable():
            return replace(choices, matching=choices.matching + key)
    return choices


def _moved(choices: Choices, rows: Sequence[Row], steps: int) -> str | None:
    names = [row.name for row in rows]
    if not names:
        return None
    if choices.selected not in names:
        return names[-1] if steps > 1 and steps >= len(names) else names[0]
    return names[min(max(0, names.index(choices.selected) + steps), len(names) - 1)]


def _command(choices: Choices, key: str, rows: Sequence[Row]) -> tuple[Choices, Request]:
    """A command that kills devices needs confirmation, so that a wrong key does not ruin an
    experiment."""
    row = next((row for row in rows if row.name == choices.selected), None)
    if row is None:
        return choices, None
    pause_or_resume = Resume() if row.state == PAUSED else Pause()
    command = Command(_ACTIONS.get(key, pause_or_resume), row.devices, row.label)
    return (replace(choices, unconfirmed=command), None) if key == "x" else (choices, command)
