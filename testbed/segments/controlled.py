"""Segments in the controller: their telemetry, the start of their background traffic, and actions."""

from __future__ import annotations

from collections.abc import Sequence

from agents.device_actions import Action, SegmentAction, SetLink
from agents.mqtt.topics import ROUTER
from agents.wire.messages import (
    AddressedOrder,
    DeviceOrder,
    Message,
    NetworkProbe,
    NetworkStart,
    NetworkUse,
)
from testbed.errors import BadInputError
from testbed.plan.planned_devices import to_host_time
from testbed.run.part import ControllerPart


class ControlledSegments(ControllerPart):
    def message(self, message: Message, at: float) -> bool:
        if not isinstance(message, NetworkProbe | NetworkUse):
            return False
        self._run.write(message)
        if isinstance(message, NetworkProbe):
            self._run.unmeasured -= {one.segment for one in message.segments}
        return True

    def start(self, begin: float, at: float) -> None:
        if self._run.plan.segments:
            self._run.order(ROUTER, NetworkStart(max(0.0, self._run.device_time(at))))

    def carry_out(self, name: str, action: Action) -> Sequence[AddressedOrder] | None:
        if name not in self._run.plan.segments:
            return None
        if not isinstance(action, SegmentAction):
            raise BadInputError(
                f"{name} is a segment: only its link and its background traffic change, and it can be "
                "disconnected and connected"
            )
        if isinstance(action, SetLink):
            action = SetLink(to_host_time(action.changes, self._run.dilation))
        return [(ROUTER, DeviceOrder(name, action))]
