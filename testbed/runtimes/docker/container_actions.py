"""Actions on devices in containers: new CPU limits, and orders to other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from agents import device_actions as actions
from agents.fields import FeatureAction
from agents.mqtt.topics import ROUTER
from agents.wire.messages import AddressedOrder, DeviceOrder, MeasureOrder
from testbed.errors import BadInputError
from testbed.plan import PlannedDevice, to_host_time
from testbed.plan.agent_configs import IMPAIRMENTS, RunSpec
from testbed.runtimes.docker.specifications import UNLIMITED, CpuLimits, planned_limits, starting_limits


@dataclass(frozen=True, slots=True)
class ContainerDevice:
    """A device's state after the actions so far."""

    planned: PlannedDevice
    away: bool
    """Absent, or ordered to end. The client may start again."""
    unpowered: bool = False
    """No client starts before the power returns."""


@dataclass(frozen=True, slots=True)
class Response:
    device: ContainerDevice
    orders: list[AddressedOrder]
    limits: CpuLimits | None = None
    """None if they stay unchanged."""


def respond(
    spec: RunSpec, device: ContainerDevice, action: actions.DeviceAction, exit_code: int | None = None
) -> Response:
    """Without I/O and clock. `exit_code`: of the device's container; None while it runs. Raises
    BadInputError if the action is not possible."""
    name = device.planned.name
    match action:
        case actions.SetCpu(cpu):
            planned = replace(device.planned, cpu=cpu)
            return Response(replace(device, planned=planned), [], planned_limits(planned))
        case actions.SetLink(changes):
            return Response(device, _link_orders(spec, name, changes))
        case actions.Crash() | actions.Leave():
            return Response(replace(device, away=True), [(name, DeviceOrder(name, action))])
        case actions.Restart() | actions.Join() if exit_code is not None:
            raise BadInputError(
                f"{name} cannot restart: its client exited unexpectedly, and its container with it "
                f"(exit code {exit_code}). See its log."
            )
        case actions.Restart() | actions.Join() if (
            device.away
        ):  # else it is running, and keeps its quota
            limits = None if device.unpowered else UNLIMITED
            return Response(replace(device, away=False), [(name, DeviceOrder(name, action))], limits)
        case (
            actions.Restart()
            | actions.Join()
            | actions.Pause()
            | actions.Resume()
            | actions.Disconnect()
            | actions.Reconnect()
        ):
            return Response(device, [(name, DeviceOrder(name, action))])
        case FeatureAction():
            return Response(device, [(name, DeviceOrder(name, action))])
        case actions.PowerOff():  # the init has ended the client already
            return Response(replace(device, unpowered=True), [])
        case actions.PowerOn():
            limits = None if device.away else UNLIMITED
            return Response(
                replace(device, unpowered=False), [(name, DeviceOrder(name, action))], limits
            )
        case _:
            assert_never(action)


def _link_orders(
    spec: RunSpec, device: str, requested: Mapping[str, float | None]
) -> list[AddressedOrder]:
    """`requested`: new values by link setting, in device time. Raises BadInputError if no device of the
    run has a link."""
    changes = to_host_time(requested, spec.plan.dilation)
    impaired = {name: value or 0.0 for name, value in changes.items() if name in IMPAIRMENTS}
    rates = {name: value for name, value in changes.items() if name not in IMPAIRMENTS}
    if impaired and not spec.plan.is_routed:
        raise BadInputError(
            f"{', '.join(impaired)} cannot change in this run, because no device has a link: add one to "
            "the topology, such as link: {rtt: 1ms}"
        )
    if spec.plan.uses_netem:
        return [(device, DeviceOrder(device, actions.SetLink(rates | impaired)))]
    orders: list[AddressedOrder] = (
        [(device, DeviceOrder(device, actions.SetLink(rates)))] if rates else []
    )
    if impaired:
        orders.append((ROUTER, DeviceOrder(device, actions.SetLink(impaired))))
    return orders


class ContainerDevices:
    """`exit_code`: of a device's container; None while it runs. `set_limits`: has the engine set CPU
    limits and the memory limit in bytes."""

    def __init__(
        self,
        spec: RunSpec,
        exit_code: Callable[[str], int | None],
        set_limits: Callable[[str, CpuLimits, int], None],
    ) -> None:
        self._spec = spec
        self._exit_code = exit_code
        self._set_limits = set_limits
        absent = spec.plan.absent
        self.states = {d.name: ContainerDevice(d, d.name in absent) for d in spec.plan.emulated_devices}
        self._limited: set[str] = set()

    def limit(self, name: str) -> None:
        self._limit(name, planned_limits(self.states[name].planned))

    def measure_again(self, names: Sequence[str]) -> list[AddressedOrder]:
        """Lift the CPU limits, which would slow down a measurement of links. Return the orders to
        measure."""
        for name in names:
            self._limit(name, UNLIMITED)
            self._limited.discard(name)
        return [(name, MeasureOrder([name])) for name in names]

    def begin(self) -> None:
        """Limit devices without a limit, when the run clock starts."""
        for name in self.states.keys() - self._limited:
            self._limit(name, starting_limits(self.states[name].planned))

    def act(self, name: str, action: actions.DeviceAction) -> list[AddressedOrder]:
        """Return orders for other processes. Raises BadInputError if the action is not possible."""
        code = self._exit_code(name) if isinstance(action, actions.Restart | actions.Join) else None
        response = respond(self._spec, self.states[name], action, code)
        if response.limits is not None:
            self._limit(name, response.limits)
        self.states[name] = response.device
        return response.orders

    def _limit(self, name: str, limits: CpuLimits) -> None:
        self._set_limits(name, limits, self.states[name].planned.memory)
        self._limited.add(name)
