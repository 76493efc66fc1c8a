"""Types of the fields of messages (`agents.wire.messages`), and base classes of messages and
actions."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

NAME = "[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
"""Names of runs, devices and clients."""
MAX_TEXT_CHARACTERS = 4096
_MAX_SECONDS = 1e10
_MAX_COUNT = 2**63 - 1
NO_LIMIT = -1
"""Quota, memory or swap of a control group that is not set."""

Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
Name = Annotated[str, Meta(pattern=rf"\A{NAME}\Z")]
Seconds = Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
DeviceTime = Annotated[float, Meta(ge=-_MAX_SECONDS, le=_MAX_SECONDS)]
"""Slightly negative when the host's clock is adjusted."""
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
Count = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
Cpuset = Annotated[
    str,
    Meta(
        max_length=MAX_TEXT_CHARACTERS,
        pattern=r"\A(([0-9]{1,5}(-[0-9]{1,5})?)(,[0-9]{1,5}(-[0-9]{1,5})?)*)?\Z",
    ),
]
"""Core numbers, such as `0,2-3`."""
Limit = Annotated[int, Meta(ge=NO_LIMIT, le=_MAX_COUNT)]


class Fields(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A field whose value is None is omitted or null."""


def _order_name(class_name: str) -> str:
    """`do` of an order's class, such as `start` for `StartOrder`."""
    return class_name.removesuffix("Order").lower()


class AggregatorOrderFields(Fields, frozen=True, tag_field="do", tag=_order_name):
    """The order's name is in the field `do`."""


class ActionFields(Struct, frozen=True, forbid_unknown_fields=True, tag_field="action", tag=str.lower):
    """The JSON form has the action's name in the field `action`."""


class FeatureAction(ActionFields, frozen=True):
    """Changes a feature of a device (`agents.features.Action`)."""

    sets: ClassVar[str | None] = None
    """Part of the device's state that the action replaces; None if the state does not keep it."""
