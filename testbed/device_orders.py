"""What is told to others, so that they do to a device what the controller cannot do itself."""

from __future__ import annotations

from typing import assert_never

from agents import messages
from testbed.topology.timeline import (
    Crash,
    Disconnect,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetLink,
)

Order = tuple[str, messages.Order]
"""Which part of the run is told what over the control network."""


def order(
    device: str,
    action: SetLink | Crash | Restart | Pause | Resume | Disconnect | Reconnect | Leave | Join,
) -> messages.DeviceOrder:
    """The message for `action` on `device`; CPU limits are the runtimes' own to set."""
    match action:
        case SetLink(changes):
            return messages.SetLink(device, changes)
        case Crash():
            return messages.Crash(device)
        case Restart():
            return messages.Restart(device)
        case Pause():
            return messages.Pause(device)
        case Resume():
            return messages.Resume(device)
        case Disconnect():
            return messages.Disconnect(device)
        case Reconnect():
            return messages.Reconnect(device)
        case Leave():
            return messages.Leave(device)
        case Join():
            return messages.Join(device)
        case _:
            assert_never(action)
