"""State that the parts of the controller's core share, and the interface of a part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Never

from agents import events, user_code
from agents.device_actions import Action, DeviceState
from agents.mqtt.topics import AGGREGATOR, ROUTER, Topics
from agents.wire import messages
from agents.wire.messages import AddressedOrder, Measurement, Message, MessageError, NoteOrder, Order
from testbed.fidelity.part import FeatureFigures
from testbed.plan.agent_configs import RunSpec
from testbed.run.inputs import (
    ControllerAction,
    ControllerPhase,
    FailRun,
    Publish,
    Show,
    WriteSample,
)
from testbed.rundir.live_files import Samples


class EndOfRunError(Exception):
    """Ends the handling of an input: the run has failed."""

    def __init__(self, action: FailRun) -> None:
        super().__init__(action.reason)
        self.action = action


class ControlledRun:
    """State of the run, and actions and orders that parts have requested."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.plan, self.dilation = spec, spec.plan, spec.plan.dilation
        self.topics = Topics(spec.directory.run)
        self.devices = {device.name: device for device in spec.plan.devices}
        self.phase = ControllerPhase.LAUNCHING
        self.status: dict[str, str] = {}
        self.exit_codes: dict[str, int] = {}
        self.states: dict[str, DeviceState] = {}
        """State of each device after actions on it. Devices without an action are left out."""
        self.unmeasured = set(spec.plan.probed_devices)
        """Devices whose link, and segments whose rate, is still being measured by others."""
        self.was_over = False
        """Whether the aggregator has reported that the run is over."""
        self.ended_early: set[str] = set()
        """Components that ended before the run was over."""
        self.epoch: float | None = None
        """Reading of the monotonic clock at device time 0; None before the run clock has started."""
        self.ended: events.RunEnded | None = None
        self.failures: list[str] = []
        """One sentence per failure, such as an action on a device that could not be carried out."""
        self.disruptions: list[events.Disrupted] = []
        """Disruptions that this process has learned of since the run clock started."""
        self.actions: list[ControllerAction] = []
        """Actions that follow from the present input."""
        self.orders: list[AddressedOrder] = []
        """Orders that are sent at the end of the tick, once the run clock starts."""
        self.postponed: list[AddressedOrder] | None = None
        """Orders for the aggregator that are held back during a restart of the aggregator or a flood,
        because these orders would be lost. None if orders are sent at once."""

    @property
    def is_over(self) -> bool:
        """Whether only the last evaluation of the run is missing. The devices then have nothing left to
        do."""
        return self.status.get(AGGREGATOR) == "over"

    @property
    def has_started(self) -> bool:
        """Whether the aggregator has the order to start the run clock."""
        return self.phase >= ControllerPhase.STARTING

    def start_clock(self, at: float, begin: float) -> None:
        """The run clock has started at `at`, with the device time `begin`."""
        self.epoch = at - begin * self.dilation

    def device_time(self, at: float) -> float:
        """Return the device time at `at`; 0 before the run clock has started."""
        return 0.0 if self.epoch is None else (at - self.epoch) / self.dilation

    def host_time(self, at: float) -> float:
        """Return the reading of the monotonic clock at device time `at`; infinity before the run clock
        has started."""
        return math.inf if self.epoch is None else self.epoch + at * self.dilation

    def state(self, device: str) -> DeviceState:
        return self.states.get(device, DeviceState())

    def title(self, component: str) -> str:
        if component in self.devices:
            return f"the {'container' if self.plan.traits.images else 'client'} of {component}"
        relayed = component == ROUTER and not self.plan.traits.images
        return "the relay" if relayed else f"the {component}"

    def user_code_on(self, component: str) -> str:
        """Return the names of the user's own classes that run there."""
        topology = self.spec.topology
        parts = topology.exchangeable.values()
        names = [topology.task.name] if component in self.devices else [one.named.name for one in parts]
        return " or ".join(filter(user_code.is_user_code, names)) or "own code"

    def do(self, action: ControllerAction) -> None:
        self.actions.append(action)

    def show(self, text: str) -> None:
        self.do(Show(text))

    def write(self, sample: Measurement) -> None:
        self.do(WriteSample(messages.encode(sample).decode() + "\n"))

    def order(self, component: str, order: Order) -> None:
        """Send `order` at the end of the tick."""
        self.orders.append((component, order))

    def publish(self, component: str, order: Order) -> None:
        """Send `order` now."""
        try:
            payload = messages.encode(order)
        except MessageError as error:
            self.record_failure(f"an order to {component} could not be sent: {error}")
        else:
            self.do(Publish(self.topics.control(component), payload))

    def publish_orders(self) -> None:
        orders, self.orders = self.orders, []
        for component, order in orders:
            if self.postponed is not None and component == AGGREGATOR:
                self.postponed.append((component, order))
            else:
                self.publish(component, order)

    def postpone_orders(self) -> None:
        self.postponed = self.postponed or []

    def note(self, what: str) -> None:
        self.order(AGGREGATOR, NoteOrder(what))

    def record_failure(self, what: str) -> None:
        """The run continues, but is not valid."""
        self.failures.append(what)
        self.note(what)

    def fail(self, reason: str, log_of: str | None = None, log_lines: int = 12) -> Never:
        raise EndOfRunError(FailRun(reason, log_of, log_lines))


class ControllerPart:
    """A part of the controller's core, such as that of a feature of devices. A subclass overrides the
    methods for what it takes part in. Parts request actions, orders and failures of the run from
    `run`."""

    def __init__(self, run: ControlledRun) -> None:
        self._run = run

    def message(self, message: Message, at: float) -> bool:
        """Handle the message if it is for this part; return whether it is. Raises MessageError."""
        return False

    def resume(self, past: Sequence[events.Record], samples: Samples) -> None:
        """Take over the state of the run's earlier legs: their records and telemetry."""

    def start(self, begin: float, at: float) -> None:
        """The run clock has started, at device time `begin` in seconds."""

    def record(self, record: events.Record, at: float) -> None: ...

    def carry_out(self, name: str, action: Action) -> Sequence[AddressedOrder] | None:
        """Return the orders that carry out an action on the device or segment `name`; None if that is
        the runtime's. Raises BadInputError if the action is not possible."""
        return None

    def sample(self, at: float) -> None:
        """Called about once a second while the run clock goes and the run is not over."""

    def tick(self, at: float) -> None: ...

    def finish(self, ended: events.RunEnded) -> None:
        """The run has ended, and all its records are read."""

    def figures(self) -> FeatureFigures | None:
        """Return what this part has measured; None if nothing."""
        return None

    def problems(self) -> Iterator[str]:
        """Yield what cannot be in the state of this part."""
        yield from ()
