"""The containers of a run while it goes: their exit codes, processes and limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import docker

from testbed.runtimes.docker import executor
from testbed.runtimes.docker.containers import CpuLimits
from testbed.runtimes.docker.executor import as_host_error


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container, and the engine that has it."""

    engine: docker.DockerClient
    id: str


class RunningContainers(dict[str, ContainerRef]):
    """By component. What is asked of an engine raises HostError if that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: dict[str, int] = {}
        """Exit codes of the components that have ended."""
        self.paused: set[str] = set()
        """Components whose containers were paused when last listed."""
        self._pids: dict[str, int] = {}

    def note(self, listed: Collection[Mapping[str, Any]]) -> set[str]:
        """Note the states of all containers of the run, as the engines list them; return the ids of
        those that are alive."""
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
        """None while it runs."""
        with as_host_error(f"look at {component}"):
            return executor.exit_code(self[component].engine, self[component].id)

    def pid(self, component: str) -> int:
        """Id of its first process; 0 if it has ended or this host does not see it."""
        if component not in self._pids:
            with as_host_error(f"look at {component}"):
                self._pids[component] = executor.pid(self[component].engine, self[component].id)
        return self._pids[component]

    def pids(self, components: Iterable[str]) -> list[int]:
        """Ids of the first processes of those of `components` that run where this host sees them."""
        return [pid for one in components if one in self and (pid := self.pid(one))]

    def limit(self, component: str, limits: CpuLimits, memory: int | None) -> None:
        """Set its CPU limits. See `executor.limit`."""
        with as_host_error(f"limit the CPU of {component}"):
            executor.limit(self[component].engine, self[component].id, limits, memory)

    def restarted(self, component: str) -> None:
        """Forget how it ended: it was started again."""
        self.codes.pop(component, None)
        self._pids.pop(component, None)
