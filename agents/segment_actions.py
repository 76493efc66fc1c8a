"""Actions on segments during a run. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

_Rate = Annotated[int, Meta(ge=1, le=10**15)]
_Seconds = Annotated[float, Meta(ge=0, le=1e10)]


class _SegmentAction(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """An action on a segment. Its JSON form has the action's name in the field `action`."""


class SetSegment(_SegmentAction, frozen=True, tag="set"):
    """Change properties of the segment."""

    changes: Mapping[str, int | float | None]
    """New values of fields of `agents.config.Segment`: `up`, `down`, `rtt`, `jitter` and `loss`, in the
    units of those fields. Other fields do not change."""


class CutSegment(_SegmentAction, frozen=True, tag="cut"):
    """Let no packet pass."""


class RestoreSegment(_SegmentAction, frozen=True, tag="restore"):
    """Let packets pass again."""


class SetBackground(_SegmentAction, frozen=True, tag="background"):
    """Switch background traffic of the segment on or off."""

    on: bool
    """Whether the traffic is on from now on."""
    number: Annotated[int, Meta(ge=0)] | None = None
    """Number of the traffic (`agents.config.Background.number`); None for all of the segment."""


SegmentAction = SetSegment | CutSegment | RestoreSegment | SetBackground


class SegmentChanges(Struct, forbid_unknown_fields=True):
    """Allowed fields of `SetSegment.changes`, with their ranges."""

    up: _Rate | None = None
    down: _Rate | None = None
    rtt: _Seconds = 0.0
    jitter: _Seconds = 0.0
    loss: Annotated[float, Meta(ge=0, le=1)] = 0.0
