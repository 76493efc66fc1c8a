"""Finds and removes all that a Swarm and its nodes have of a run."""

from __future__ import annotations

import secrets
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError

from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.host.nodes import Node
from testbed.plan import agent_configs
from testbed.rundir.directory import RunDirectory
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.containers import COMPONENT_LABEL, RUN_LABEL
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.docker.specifications import object_name
from testbed.runtimes.swarm import services
from testbed.runtimes.swarm.engine_proxies import COMPONENTS, IMAGE_LABEL, EngineProxies, is_proxy

_NETWORKS_TIMEOUT_SECONDS = 10.0
_PENDING_LABEL = "testbed.owed"
"""Ids of the nodes whose clean-up is pending as they did not answer: a label of a configuration that is
all that the Swarm still has of the run, so that `down` finds it. (Its value is that of 0.2.0, too.)"""
_PARALLEL = 8


def objects(
    manager: docker.DockerClient, run: str | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Kind and labels of all that this Swarm has of `run`, of all runs."""
    api: Any = manager.api
    filters = services.label_filter(run)
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


def remove(
    manager: docker.DockerClient, proxies: EngineProxies, run: str, directory: RunDirectory | None
) -> None:
    """Remove all of `run` by the nodes' engines; the `proxies` to these go last. Logs, and what a
    resumed run goes on from, are brought to `directory`. A node that does not answer is asked but once,
    and reported once all else is removed. Raises HostError."""
    failed = dict(_pending(manager, proxies, run))
    unsaved: list[str] = []

    @contextmanager
    def on(node: str) -> Iterator[None]:
        try:
            yield
        except docker_engine.ERRORS as error:
            proxies.unreachable.add(node)
            failed[node] = f"{proxies.names.get(node, node)}: {error}"

    def answering() -> list[tuple[str, docker.DockerClient]]:
        return [(node, engine) for node, engine in proxies.engines.items() if node not in failed]

    if directory is not None and directory.logs.is_dir():
        for node, engine in answering():
            with on(node):
                unsaved += executor.save_logs(engine, run, directory, is_proxy)
                unsaved += _keep_disks(engine, run, directory)
    with as_host_error("remove the services"):
        others = [
            one
            for one in services.list_services(manager, run)
            if one["Spec"]["Labels"].get(COMPONENT_LABEL) not in COMPONENTS
        ]
        services.remove_services(manager, others)
    for node, engine in answering():
        with on(node):
            executor.remove_containers(engine, run, is_proxy)
            executor.remove_volumes(engine, run)
    for node, engine in answering():
        if node != proxies.here:
            with on(node):
                _await_networks(engine, run)
    proxies.close(spare=failed)
    with as_host_error("remove the services"):
        services.remove_services(manager, services.list_services(manager, run))
        executor.remove_containers(manager, run)
        services.remove_rest(manager, run)
        if failed:
            labels = {RUN_LABEL: run, _PENDING_LABEL: ",".join(failed), IMAGE_LABEL: proxies.image}
            services.create_config(manager, object_name(run, "pending"), b"-", labels, "")
    if told := "; ".join([*unsaved, *failed.values()]):
        raise HostError(
            f"{run} is removed from the Swarm, but something of it may be left on a node, or logs and "
            f"updates of devices could not be saved: {told}. Once its nodes answer again: testbed down "
            f"{run}"
        )


@contextmanager
def temporary_proxies(
    manager: docker.DockerClient, nodes: Sequence[Node], image: str, purpose: str
) -> Iterator[EngineProxies]:
    """Proxies to the engines of all nodes, until the end of the block; `testbed down` finds them by
    `purpose`. Raises HostError."""
    run = f"{purpose}-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
        proxies = EngineProxies(manager, nodes, image, run, {RUN_LABEL: run}, Path(folder))
        try:
            with as_host_error("reach the other nodes"):
                proxies.open()
                yield proxies
        finally:
            remove(manager, proxies, run, None)


def _pending(
    manager: docker.DockerClient, proxies: EngineProxies, run: str
) -> Iterator[tuple[str, str]]:
    """Nodes of the Swarm that this or an earlier removal of `run` could not reach, and that there is no
    connection to now, with what to say of them."""
    api: Any = manager.api
    with as_host_error("list the nodes"):
        names = {one["ID"]: one["Description"]["Hostname"] for one in api.nodes()}
        pending = {*proxies.unreachable}
        for config in api.configs(filters=services.label_filter(run)):
            pending |= {*config["Spec"]["Labels"].get(_PENDING_LABEL, "").split(",")}
    for node in sorted(pending & names.keys() - proxies.engines.keys()):
        yield node, f"{names[node]} does not answer (if it never will again: docker node rm --force)"


def _keep_disks(engine: docker.DockerClient, run: str, directory: RunDirectory) -> list[str]:
    """End the devices of a node, and bring what their clients remember to `directory`; return what could
    not be saved, and why. Raises ERRORS."""
    unsaved: list[str] = []

    def keep(container: Mapping[str, Any]) -> None:
        disk = directory.disk(container["Labels"][COMPONENT_LABEL])
        try:
            with suppress(APIError):  # it has ended
                engine.api.kill(container["Id"])
            executor.fetch_folder(engine, container["Id"], agent_configs.DISK, disk)
        except (APIError, OSError, tarfile.TarError) as error:
            unsaved.append(f"{disk}: {error}")

    known = {path.name for path in directory.disks.glob("*")}  # whatever a label says
    found = [
        one for one in executor.containers(engine, run) if one["Labels"].get(COMPONENT_LABEL) in known
    ]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(keep, found))
    return unsaved


def _await_networks(engine: docker.DockerClient, run: str) -> None:
    """Until a node's own pieces of the networks of `run` are gone, which the Swarm removes with the last
    task that needs them: without an engine proxy nobody would see that."""
    deadline = time.monotonic() + _NETWORKS_TIMEOUT_SECONDS
    while time.monotonic() < deadline and any(
        one["Labels"].get(COMPONENT_LABEL) not in COMPONENTS for one in executor.networks(engine, run)
    ):
        time.sleep(0.1)
