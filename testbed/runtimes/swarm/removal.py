"""Removal of everything that a run has on a Swarm and its nodes."""

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
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.docker.specifications import COMPONENT_LABEL, RUN_LABEL, object_name
from testbed.runtimes.swarm import services
from testbed.runtimes.swarm.engine_proxies import COMPONENTS, IMAGE_LABEL, EngineProxies, is_proxy

_NETWORKS_TIMEOUT_SECONDS = 10.0
_PENDING_LABEL = "testbed.owed"
"""Ids of nodes that could not be cleaned up because they did not answer. The label is on a configuration
that stays in the Swarm, so that `testbed down` finds the run."""
_PARALLEL = 8
"""Maximum number of requests at the same time."""


def objects(
    manager: docker.DockerClient, run: str | None = None
) -> Iterator[tuple[str, dict[str, str]]]:
    """Kind and labels of each object; of all runs if `run` is None."""
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
    """Remove everything of `run` through the nodes' engines, and the `proxies` to these last.

    Logs, and the files that devices need to resume, are saved to `directory`. A node that does not
    answer gets no further requests. After all else is removed, HostError reports all nodes that could
    not be cleaned up and all files that could not be saved.
    """
    failed = dict(_pending(manager, proxies, run))
    unsaved: list[str] = []

    @contextmanager
    def requests_to(node: str) -> Iterator[None]:
        try:
            yield
        except docker_engine.ERRORS as error:
            proxies.unreachable.add(node)
            failed[node] = f"{proxies.names.get(node, node)}: {error}"

    def answering() -> list[tuple[str, docker.DockerClient]]:
        return [(node, engine) for node, engine in proxies.engines.items() if node not in failed]

    if directory is not None and directory.logs.is_dir():
        for node, engine in answering():
            with requests_to(node):
                unsaved += executor.save_logs(engine, run, directory, is_proxy)
                unsaved += _save_disks(engine, run, directory)
    with as_host_error("remove the services"):
        others = [
            one
            for one in services.list_services(manager, run)
            if one["Spec"]["Labels"].get(COMPONENT_LABEL) not in COMPONENTS
        ]
        services.remove_services(manager, others)
    for node, engine in answering():
        with requests_to(node):
            executor.remove_containers(engine, run, is_proxy)
            executor.remove_volumes(engine, run)
    for node, engine in answering():
        if node != proxies.here:
            with requests_to(node):
                _await_networks(engine, run)
    proxies.close(spare=failed)
    with as_host_error("remove the services"):
        services.remove_services(manager, services.list_services(manager, run))
        executor.remove_containers(manager, run)
        services.remove_rest(manager, run)
        if failed:
            labels = {RUN_LABEL: run, _PENDING_LABEL: ",".join(failed), IMAGE_LABEL: proxies.image}
            services.create_config(manager, object_name(run, "pending"), b"-", labels, "")
    if reasons := "; ".join([*unsaved, *failed.values()]):
        raise HostError(
            f"{run} is removed from the Swarm, but something of it may be left on a node, or logs and "
            f"updates of devices could not be saved: {reasons}. When its nodes answer again: testbed "
            f"down {run}"
        )


@contextmanager
def temporary_proxies(
    manager: docker.DockerClient, nodes: Sequence[Node], image: str, purpose: str
) -> Iterator[EngineProxies]:
    """Proxies with a run id that begins with `purpose`, by which `testbed down` finds them. Raises
    HostError."""
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
    """Yield id, and message for the user, of nodes that this or an earlier removal of `run` could not
    reach, and that still have objects of it."""
    api: Any = manager.api
    with as_host_error("list the nodes"):
        names = {one["ID"]: one["Description"]["Hostname"] for one in api.nodes()}
        pending = {*proxies.unreachable}
        for config in api.configs(filters=services.label_filter(run)):
            pending |= {*config["Spec"]["Labels"].get(_PENDING_LABEL, "").split(",")}
    for node in sorted(pending & names.keys() - proxies.engines.keys()):
        yield node, f"{names[node]} does not answer (if it is gone for good: docker node rm --force)"


def _save_disks(engine: docker.DockerClient, run: str, directory: RunDirectory) -> list[str]:
    """End the devices of a node first. Return a message for each device whose files could not be saved.
    Raises ERRORS."""
    unsaved: list[str] = []

    def save(container: Mapping[str, Any]) -> None:
        disk = directory.disk(container["Labels"][COMPONENT_LABEL])
        try:
            with suppress(APIError):  # it has ended
                engine.api.kill(container["Id"])
            executor.fetch_folder(engine, container["Id"], agent_configs.DISK, disk)
        except (APIError, OSError, tarfile.TarError) as error:
            unsaved.append(f"{disk}: {error}")

    known = {path.name for path in directory.disks.glob("*")}  # labels may have any text
    found = [
        one for one in executor.containers(engine, run) if one["Labels"].get(COMPONENT_LABEL) in known
    ]
    with ThreadPoolExecutor(_PARALLEL) as pool:
        list(pool.map(save, found))
    return unsaved


def _await_networks(engine: docker.DockerClient, run: str) -> None:
    """The Swarm removes a network from the node when the last task that needs it has ended. This wait
    needs the engine proxy, so it comes before the removal of that."""
    deadline = time.monotonic() + _NETWORKS_TIMEOUT_SECONDS
    while time.monotonic() < deadline and any(
        one["Labels"].get(COMPONENT_LABEL) not in COMPONENTS for one in executor.networks(engine, run)
    ):
        time.sleep(0.1)
