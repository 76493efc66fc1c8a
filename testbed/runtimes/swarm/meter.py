"""Meter of the resources that a run uses on the nodes of a Swarm."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from agents.device.control_group import ControlGroup
from testbed.runtimes import HostReading, Meter
from testbed.runtimes.docker.running_containers import RunningContainers
from testbed.runtimes.swarm.context import SwarmContext
from testbed.runtimes.swarm.node_services import NodeAgents


class SwarmMeter(Meter):
    """Devices send CPU, memory and traffic themselves."""

    def __init__(
        self, context: SwarmContext, containers: RunningContainers, node_agents: NodeAgents
    ) -> None:
        self._containers = containers
        self._node_agents = node_agents
        self._manager = context.manager
        self._devices = {device.name for device in context.spec.plan.devices}
        self._here = context.devices_on(context.proxies.here)
        self._used: dict[str, float] = {}
        """CPU seconds of each device on this node, when last read."""
        self.more_pids: list[int] = []
        """Processes of this host that serve the devices beside the containers."""

    def externally_stopped(self) -> set[str]:
        """Containers that were paused in the last list, and servers on this host that a signal has
        stopped."""
        return self._containers.stopped(self._servers_here())

    def groups(self) -> Collection[str]:
        return [one.id for one in self._containers.values()]

    def server_pids(self) -> list[int]:
        return [*self._containers.pids(self._servers_here()), *self.more_pids]

    def _servers_here(self) -> list[str]:
        return [
            name
            for name, one in self._containers.items()
            if name not in self._devices and one.engine is self._manager
        ]

    def device_cpu_seconds(self) -> float | None:
        """Total on this node. Devices that have ended count with their last reading."""
        for name in self._here:
            used = ControlGroup.of_process(self._containers.pid(name)).cpu_seconds()
            if used is not None:
                self._used[name] = used
        return math.fsum(self._used.values()) if self._used or not self._here else None

    def other_hosts(self, at: float, used: Mapping[str, float]) -> Mapping[str, HostReading]:
        return self._node_agents.readings(at, used)
