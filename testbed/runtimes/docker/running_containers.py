"""The containers of a live run: their exit codes, processes and limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import docker

from agents.device.resource_usage import is_stopped
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.containers import CpuLimits
from testbed.runtimes.docker.executor import as_host_error


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container, with the engine that runs it."""

    engine: docker.DockerClient
    id: str


class RunningContainers(dict[str, ContainerRef]):
    """Containers of a run, by component. Methods that send a request to an engine raise HostError if
    that engine does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: dict[str, int] = {}
        """Exit codes of the components that have ended."""
        self.paused: set[str] = set()
        """Components whose containers were paused at the last update."""
        self._pids: dict[str, int] = {}

    def update_states(self, listed: Collection[Mapping[str, Any]]) -> set[str]:
        """Update `codes` and `paused` from the engines' lists of all containers of the run. Return the
        ids of the containers that have not ended."""
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
        """Exit code of the component's container; None while the container runs."""
        with as_host_error(f"inspect {component}"):
            return executor.exit_code(self[component].engine, self[component].id)

    def pid(self, component: str) -> int:
        """Id of the container's first process; 0 if the container has ended, or the process is not
        visible on this host."""
        if component not in self._pids:
            with as_host_error(f"inspect {component}"):
                self._pids[component] = executor.pid(self[component].engine, self[component].id)
        return self._pids[component]

    def pids(self, components: Iterable[str]) -> list[int]:
        """Ids of the containers' first processes. Processes that are not visible on this host are left
        out."""
        return [pid for one in components if one in self and (pid := self.pid(one))]

    def stopped(self, servers: Iterable[str]) -> set[str]:
        """Components whose containers were paused at the last update, and those of `servers` whose first
        process a signal has stopped."""
        return self.paused | {one for one in servers if one in self and is_stopped(self.pid(one))}

    def limit(self, component: str, limits: CpuLimits, memory: int | None) -> None:
        """Set the component's CPU limits. For a container that has ended, the call has no effect.
        `memory` is the component's memory limit in bytes, which stays unchanged; None if the component
        has no memory limit."""
        with as_host_error(f"limit the CPU of {component}"):
            executor.limit(self[component].engine, self[component].id, limits, memory)

    def forget_exit(self, component: str) -> None:
        """Forget the exit code of a component that was restarted."""
        self.codes.pop(component, None)
        self._pids.pop(component, None)
