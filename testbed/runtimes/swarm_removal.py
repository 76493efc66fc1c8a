"""Finds and removes all that a Swarm and its nodes have of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import docker

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import doors, executor, swarm_executor
from testbed.runtimes.containers import PART_LABEL
from testbed.runtimes.doors import Doors
from testbed.runtimes.executor import as_host_error

_NETWORKS_TIMEOUT_SECONDS = 10.0


def things(manager: docker.DockerClient, run: str | None = None) -> Iterator[tuple[str, dict[str, str]]]:
    """Kind and labels of all that this Swarm has of `run`, of all runs."""
    api: Any = manager.api
    filters = swarm_executor.labelled(run)
    for kind, found in (
        ("service", api.services(filters=filters)),
        ("secret", api.secrets(filters=filters)),
        ("config", api.configs(filters=filters)),
    ):
        for one in found:
            yield kind, one["Spec"]["Labels"]
    for one in api.networks(filters=filters):
        if one["Scope"] != "local":
            yield "network", one["Labels"]


def remove(manager: docker.DockerClient, made: Doors, run: str, directory: RunDirectory | None) -> None:
    """Remove all of `run`, through the doors `made`, which go last. What a node that does not answer
    keeps is told once all else is gone. Raises HostError."""
    failed: list[str] = []

    @contextmanager
    def on(node: str) -> Iterator[None]:
        try:
            yield
        except docker_engine.ERRORS as error:
            failed.append(f"{node}: {error}")

    if directory is not None and directory.logs.is_dir():
        for node, engine in made.engines.items():
            with on(node):
                failed += executor.save_logs(engine, run, directory, doors.is_last)
    with as_host_error("remove the services"):
        found = swarm_executor.services(manager, run)
        swarm_executor.remove_services(
            manager, (one for one in found if one["Spec"]["Labels"].get(PART_LABEL) not in doors.PARTS)
        )
    for node, engine in made.engines.items():
        with on(node):
            executor.remove_containers(engine, run, doors.is_last)
            executor.remove_volumes(engine, run)
    for node, engine in made.engines.items():
        if node != made.here:
            with on(node):
                _await_networks(engine, run)
    made.shut()
    with as_host_error("remove the services"):
        swarm_executor.remove_services(manager, swarm_executor.services(manager, run))
        executor.remove_containers(manager, run)
        swarm_executor.remove_rest(manager, run)
    if failed:
        told = "; ".join(failed)
        raise HostError(
            f"{run} is removed from the Swarm, but something of it may be left, or logs could not be "
            f"saved: {told}. Once its nodes answer again: testbed down {run}"
        )


def _await_networks(engine: docker.DockerClient, run: str) -> None:
    """Until a node's own parts of the networks of `run` are gone, which the Swarm removes with the last
    task that needs them: without a door nobody would see that."""
    deadline = time.monotonic() + _NETWORKS_TIMEOUT_SECONDS
    while time.monotonic() < deadline and any(
        one["Labels"].get(PART_LABEL) not in doors.PARTS for one in executor.networks(engine, run)
    ):
        time.sleep(0.1)
