"""The containers of a live run, and the meter of the resources that they use on this host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker

from agents.device.control_group import is_stopped
from agents.wire.messages import Measurement
from testbed.gpu.metered import ContainerGpus
from testbed.host import kernel
from testbed.host.kernel import DEVICES
from testbed.plan.agent_configs import RunSpec
from testbed.runtimes import SERVERS, Meter
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.docker.specifications import CpuLimits


@dataclass(frozen=True, slots=True)
class ContainerRef:
    engine: docker.DockerClient
    id: str


class RunningContainers(dict[str, ContainerRef]):
    """Containers by component. Requests to an engine raise HostError if it does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: dict[str, int] = {}
        """Components that have ended."""
        self.paused: set[str] = set()
        """Components that were paused at the last update."""
        self._pids: dict[str, int] = {}

    def update_states(self, listed: Collection[Mapping[str, Any]]) -> set[str]:
        """`listed`: all containers of the run, by the engines. Return the ids of those that have not
        ended."""
        alive = {one["Id"] for one in listed if one["State"] not in ("exited", "dead")}
        paused = {one["Id"] for one in listed if one["State"] == "paused"}
        self.paused = {component for component, one in self.items() if one.id in paused}
        for component, one in self.items():
            if one.id in alive or component in self.codes:
                continue
            if (code := self.exit_code(component)) is not None:
                self.codes[component] = code
        return alive

    def exit_code(self, component: str) -> int | None:
        """None while the container runs."""
        with as_host_error(f"inspect {component}"):
            return executor.exit_code(self[component].engine, self[component].id)

    def pid(self, component: str) -> int:
        """First process; 0 if the container has ended, or the process is not visible on this host."""
        if component not in self._pids:
            with as_host_error(f"inspect {component}"):
                self._pids[component] = executor.pid(self[component].engine, self[component].id)
        return self._pids[component]

    def pids(self, components: Iterable[str]) -> list[int]:
        """First processes that are visible on this host."""
        return [pid for one in components if one in self and (pid := self.pid(one))]

    def stopped(self, servers: Iterable[str]) -> set[str]:
        """Components that were paused at the last update, and `servers` whose first process a signal has
        stopped."""
        return self.paused | {one for one in servers if one in self and is_stopped(self.pid(one))}

    def limit(self, component: str, limits: CpuLimits, memory: int | None) -> None:
        """`memory`: the limit in bytes, which stays unchanged. No effect on a container that has
        ended."""
        with as_host_error(f"limit the CPU of {component}"):
            executor.limit(self[component].engine, self[component].id, limits, memory)

    def forget_exit(self, component: str) -> None:
        self.codes.pop(component, None)
        self._pids.pop(component, None)


class DockerMeter(Meter):
    """Devices send their CPU use, memory and traffic themselves."""

    def __init__(self, spec: RunSpec, containers: RunningContainers) -> None:
        self._run = spec.directory.run
        self._containers = containers
        self.gpus = ContainerGpus(spec.plan.devices, containers.pids)

    def telemetry(self) -> Sequence[Measurement]:
        return self.gpus.samples()

    def externally_stopped(self) -> set[str]:
        """Containers that were paused in the last list, and servers that a signal has stopped. A
        device's init reports that itself."""
        return self._containers.stopped(SERVERS)

    def groups(self) -> Collection[str]:
        return kernel.cgroup_names(self._run)

    def server_pids(self) -> list[int]:
        return self._containers.pids(SERVERS)

    def device_cpu_seconds(self) -> float | None:
        return kernel.cgroup_cpu_seconds(self._run, DEVICES)
