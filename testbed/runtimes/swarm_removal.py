"""Finds and removes all that a Swarm and its nodes have of a run."""

from __future__ import annotations

import tarfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import docker
from docker.errors import APIError

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.plan import agent_configs
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import doors, executor, swarm_executor
from testbed.runtimes.containers import PART_LABEL, RUN_LABEL
from testbed.runtimes.doors import Doors
from testbed.runtimes.executor import as_host_error
from testbed.runtimes.launch import name_of

_NETWORKS_TIMEOUT_SECONDS = 10.0
_OWED_LABEL = "testbed.owed"
"""Of a configuration that stays where nodes could not be asked: their ids. By it `down` finds the run
again, of which the Swarm has nothing else."""
_PARALLEL = 8


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
    """Remove all of `run`, through the doors `made`, which go last. Logs, and what a resumed run goes on
    from, are brought to `directory`. What a node that does not answer keeps is told once all else is
    gone; it is asked but once. Raises HostError."""
    failed = dict(_still_away(manager, made, run))
    unsaved: list[str] = []

    @contextmanager
    def on(node: str) -> Iterator[None]:
        try:
            yield
        except docker_engine.ERRORS as error:
            made.lost.add(node)
            failed[node] = f"{made.names.get(node, node)}: {error}"

    def answering() -> list[tuple[str, docker.DockerClient]]:
        return [(node, engine) for node, engine in made.engines.items() if node not in failed]

    if directory is not None and directory.logs.is_dir():
        for node, engine in answering():
            with on(node):
                unsaved += executor.save_logs(engine, run, directory, doors.is_last)
                unsaved += _keep_disks(engine, run, directory)
    with as_host_error("remove the services"):
        found = swarm_executor.services(manager, run)
        swarm_executor.remove_services(
            manager, (one for one in found if one["Spec"]["Labels"].get(PART_LABEL) not in doors.PARTS)
        )
    for node, engine in answering():
        with on(node):
            executor.remove_containers(engine, run, doors.is_last)
            executor.remove_volumes(engine, run)
    for node, engine in answering():
        if node != made.here:
            with on(node):
                _await_networks(engine, run)
    made.shut(spare=failed)
    with as_host_error("remove the services"):
        swarm_executor.remove_services(manager, swarm_executor.services(manager, run))
        executor.remove_containers(manager, run)
        swarm_executor.remove_rest(manager, run)
        if failed:
            owed = ",".join(failed)
            labels = {RUN_LABEL: run, _OWED_LABEL: owed, doors.IMAGE_LABEL: made.image}
            swarm_executor.configure(manager, name_of(run, "owed"), b"-", labels, "")
    if told := "; ".join([*unsaved, *failed.values()]):
        raise HostError(
            f"{run} is removed from the Swarm, but something of it may be left on a node, or logs and "
            f"updates of devices could not be saved: {told}. Once its nodes answer again: testbed down "
            f"{run}"
        )


def _still_away(manager: docker.DockerClient, made: Doors, run: str) -> Iterator[tuple[str, str]]:
    """Nodes of the Swarm that this or an earlier removal of `run` could not ask, and that there is no
    door to now, with what to say of them."""
    api: Any = manager.api
    with as_host_error("list the nodes"):
        names = {one["ID"]: one["Description"]["Hostname"] for one in api.nodes()}
        owed = {*made.lost}
        for config in api.configs(filters=swarm_executor.labelled(run)):
            owed |= {*config["Spec"]["Labels"].get(_OWED_LABEL, "").split(",")}
    for node in sorted(owed & names.keys() - made.engines.keys()):
        yield node, f"{names[node]} does not answer (if it never will again: docker node rm --force)"


def _keep_disks(engine: docker.DockerClient, run: str, directory: RunDirectory) -> list[str]:
    """End the devices of a node, and bring what their clients remember to `directory`; return what could
    not be saved, and why. Raises ERRORS."""
    unsaved: list[str] = []

    def keep(container: Mapping[str, Any]) -> None:
        disk = directory.disk(container["Labels"][PART_LABEL])
        try:
            with suppress(APIError):  # it has ended
                engine.api.kill(container["Id"])
            executor.fetch_folder(engine, container["Id"], agent_configs.DISK, disk)
        except (APIError, OSError, tarfile.TarError) as error:
            unsaved.append(f"{disk}: {error}")

    known = {path.name for path in directory.disks.glob("*")}  # whatever a label says
    found = [one for one in executor.containers(engine, run) if one["Labels"].get(PART_LABEL) in known]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(keep, found))
    return unsaved


def _await_networks(engine: docker.DockerClient, run: str) -> None:
    """Until a node's own parts of the networks of `run` are gone, which the Swarm removes with the last
    task that needs them: without a door nobody would see that."""
    deadline = time.monotonic() + _NETWORKS_TIMEOUT_SECONDS
    while time.monotonic() < deadline and any(
        one["Labels"].get(PART_LABEL) not in doors.PARTS for one in executor.networks(engine, run)
    ):
        time.sleep(0.1)
