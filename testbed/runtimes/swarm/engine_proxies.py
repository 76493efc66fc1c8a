"""Proxies to the Docker engines of a Swarm's other nodes. The controller uses these engines for what a
Swarm cannot do for its services.

    controller ── Unix socket per node ── proxy client ══ TLS, overlay ══ engine proxy ── engine's socket

An engine proxy is a service on each other node (`agents.node.node_agent`). No other service has the
engine's socket. The engine proxy listens on an overlay network of its own, with TLS and certificates on
both sides, and accepts only the proxy client. The proxy client is a service on this host. Its Unix
sockets are in a folder that only the controller may read. Therefore no engine listens on a network of
the hosts, and no device can reach an engine proxy.

The program of the engine proxy needs only Python, and is sent to the nodes as a file. Its image is the
base of all other images, and hardly ever changes. Further images that a node lacks are loaded through
the node's engine proxy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker

from agents.timing import clock_sync
from testbed.broker.access import new_identity
from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.host.nodes import Node
from testbed.plan import costs
from testbed.runtimes.docker import container_files, executor
from testbed.runtimes.docker.specifications import (
    COMPONENT_LABEL,
    Attachment,
    BridgeNetwork,
    Container,
    Mount,
    object_name,
)
from testbed.runtimes.swarm import services
from testbed.runtimes.swarm.services import ServiceFile, ServiceOptions, Volume

PROGRAMS, CONFIG, IDENTITY = "/testbed", "/testbed/node.json", "/testbed/node.pem"
NAME = "node"
"""Name in the certificate of the nodes."""
COMPONENTS = ENGINE_PROXY, PROXY_CLIENT = "node.engine-proxy", "node.proxy-client"
"""Connect to the engines of other nodes, and are therefore removed last. Names have a dot, so that no
device can have them."""
IMAGE_LABEL = "testbed.image"
"""Names the image of the engine proxies, which the nodes may have from a registry. The label is on the
configuration that remains in the Swarm if a node could not be cleaned up."""
_PORT = 7000
_ENGINE = "/var/run/docker.sock"
_SOCKETS = "/sockets"
_AGENTS = Path(clock_sync.__file__).parents[1]
_OPEN_TIMEOUT_SECONDS = 30.0


class EngineProxies:
    """`engines`: client for the engine of each node, by node id."""

    def __init__(
        self,
        manager: docker.DockerClient,
        nodes: Sequence[Node],
        image: str,
        run: str,
        labels: Mapping[str, str],
        folder: Path,
        suffix: str = "",
    ) -> None:
        """`folder`: for sockets, accessible to this process only. `suffix`: end of the services' names;
        a new process needs another one, as an earlier one of the run may have left services behind."""
        self._manager = manager
        self._nodes = nodes
        self.image = image
        self.run = run
        self._labels = labels
        self._folder = folder
        self._suffix = suffix
        self._folder_fd: int | None = None
        self._service = ""
        """The engine proxies; empty until `open` is called."""
        here = next(node for node in nodes if node.here)
        self.here = here.id
        self.engines: dict[str, docker.DockerClient] = {here.id: manager}
        self.unreachable: set[str] = set()
        """Ids of nodes that did not answer, and get no further requests."""

    @property
    def others(self) -> list[Node]:
        return [node for node in self._nodes if node.id != self.here]

    def open(self) -> None:
        """Start the proxies and connect to the engines. Raises HostError."""
        pem = new_identity(NAME)
        self._pem = (pem.certificate + pem.key).encode()
        if not self.others:
            return
        network = self._object_name("engines")
        labels = self._labels_of(ENGINE_PROXY)
        services.create_network(self._manager, BridgeNetwork(name=network, labels=labels))
        tasks = self._start_proxies(network)
        self._start_client(
            network, {one["NodeID"]: services.task_address(one, network) for one in tasks}
        )
        self._folder_fd = os.open(self._folder, os.O_PATH)
        for number, node in enumerate(self.others):
            # By the folder's descriptor: the path of a Unix socket may have at most 107 characters.
            url = f"unix:///proc/self/fd/{self._folder_fd}/{number}"
            self.engines[node.id] = self._client(node, url)

    def _client(self, node: Node, url: str) -> docker.DockerClient:
        try:
            return docker_engine.connect_to(url, _OPEN_TIMEOUT_SECONDS)
        except HostError as error:
            log = services.log_tail(self._manager, self._object_name(PROXY_CLIENT))
            raise HostError(f"the engine of {node.name} does not answer: {error}{log}") from error

    def _start_proxies(self, network: str) -> list[dict[str, Any]]:
        proxy = {"listen": _tls_address(IDENTITY, "0.0.0.0"), "to": {"path": _ENGINE}}  # noqa: S104
        container = self._container(ENGINE_PROXY, network, (Mount(_ENGINE, _ENGINE, read_only=False),))
        made = self.service(
            container,
            {"proxies": [proxy]},
            [f"node.id != {self.here}"],
            everywhere=True,
        )
        self._service = made
        return self._running({made: len(self.others)})[made]

    def _start_client(self, network: str, addresses: Mapping[str, str]) -> None:
        proxies = [
            {
                "listen": {"path": f"{_SOCKETS}/{number}"},
                "to": {**_tls_address(IDENTITY, addresses[node.id]), "name": NAME},
            }
            for number, node in enumerate(self.others)
        ]
        mount = Mount(str(self._folder), _SOCKETS, read_only=False)
        container = self._container(PROXY_CLIENT, network, (mount,))
        user, group = container_files.owner()
        container_files.give_to_containers((user, group), self._folder)
        container = replace(container, user=user, group=group)
        made = self.service(container, {"proxies": proxies}, [f"node.id == {self.here}"])
        self._running({made: 1})

    def service(
        self,
        container: Container,
        config: Mapping[str, Any],
        nodes: Sequence[str],
        *,
        everywhere: bool = False,
        volumes: Sequence[Volume] = (),
        more_configs: Sequence[ServiceFile] = (),
    ) -> str:
        """A service of `agents.node.node_agent`; return its id."""
        labels, name = container.labels, container.name
        target = f"{PROGRAMS}/agents"
        configs = [
            self._config(
                f"{name}-{Path(file).name}", (_AGENTS / file).read_bytes(), f"{target}/{file}", labels
            )
            for file in ("node/node_agent.py", "timing/clock_sync.py")
        ]
        configs.append(self._config(f"{name}-json", json.dumps(config).encode(), CONFIG, labels))
        secret = services.create_secret(
            self._manager, f"{name}-pem", self._pem, labels, IDENTITY, user=container.user
        )
        options = ServiceOptions(
            nodes=tuple(nodes),
            everywhere=everywhere,
            binds=True,
            secrets=[secret],
            configs=[*configs, *more_configs],
            volumes=volumes,
        )
        return services.create(self._manager, container, options)

    def _config(self, name: str, data: bytes, target: str, labels: Mapping[str, str]) -> ServiceFile:
        return services.create_config(self._manager, name, data, labels, target)

    def _running(self, expected: Mapping[str, int]) -> dict[str, list[dict[str, Any]]]:
        try:
            return services.await_tasks(
                self._manager, expected, lambda _: "the proxy to the engine", self.names
            )
        except HostError as error:
            if "No such image" not in str(error):
                raise
            raise HostError(
                f"a node of the Swarm lacks the image {self.image}, and no registry has it: {error}. On "
                f"this host, for each node that lacks it, run: docker save {self.image} | ssh NODE "
                "docker load"
            ) from error

    def _container(self, component: str, network: str, mounts: tuple[Mount, ...]) -> Container:
        return node_container(
            component,
            self._object_name(component),
            self.image,
            self._labels_of(component),
            (Attachment(network, ()),),
            mounts,
        )

    def _object_name(self, what: str) -> str:
        return object_name(self.run, f"{what}{self._suffix}")

    def _labels_of(self, component: str) -> dict[str, str]:
        return {**self._labels, COMPONENT_LABEL: component}

    @property
    def names(self) -> dict[str, str]:
        return {node.id: node.name for node in self._nodes}

    def set_timeout(self, seconds: int | None = None) -> None:
        """Seconds for requests to other nodes' engines; None for the longer timeout at the start and end
        of a run."""
        for node, engine in self.engines.items():
            if node != self.here and node not in self.unreachable:
                engine.api.timeout = seconds or docker_engine.REQUEST_TIMEOUT_SECONDS

    def close(self, spare: Collection[str] = ()) -> None:
        """Remove the containers, except on the nodes in `spare`.

        Each node's engine removes its own proxy. The engine's answer is lost, because it would have to
        pass through the removed proxy. The Swarm would remove the containers, too, but would not report
        the end of that.
        """
        for node, engine in self.engines.items():
            if node != self.here and node not in spare:
                with suppress(*docker_engine.ERRORS):
                    executor.remove_containers(engine, self.run, self._is_own)
                    executor.remove_containers(engine, self.run)
        self._disconnect()

    def _is_own(self, container: Mapping[str, Any]) -> bool:
        """Proxies of an earlier process that was killed do not count."""
        return bool(container["Labels"].get(executor.SERVICE_LABEL) == self._service)

    def _disconnect(self) -> None:
        for node in [node for node in self.engines if node != self.here]:
            self.engines.pop(node).close()
        if self._folder_fd is not None:
            os.close(self._folder_fd)
            self._folder_fd = None


def is_proxy(container: Mapping[str, Any]) -> bool:
    return container["Labels"].get(COMPONENT_LABEL) in COMPONENTS


def proxy_image(manager: docker.DockerClient, run: str) -> str | None:
    """None if unknown. It is known even if only the clean-up of the run is left to do."""
    for one in services.list_services(manager, run):
        if one["Spec"]["Labels"].get(COMPONENT_LABEL) == ENGINE_PROXY:
            return str(one["Spec"]["TaskTemplate"]["ContainerSpec"]["Image"])
    api: Any = manager.api
    found = (one["Spec"]["Labels"] for one in api.configs(filters=services.label_filter(run)))
    return next((labels[IMAGE_LABEL] for labels in found if IMAGE_LABEL in labels), None)


def node_container(
    component: str,
    name: str,
    image: str,
    labels: Mapping[str, str],
    networks: tuple[Attachment, ...],
    mounts: tuple[Mount, ...] = (),
) -> Container:
    """Container for `agents.node.node_agent`. The node agent runs as root without capabilities."""
    return Container(
        component=component,
        name=name,
        image=image,
        command=("python3", "-m", "agents.node.node_agent", CONFIG),
        environment={"PYTHONPATH": PROGRAMS},
        user=0,
        group=0,
        labels=labels,
        networks=networks,
        mounts=mounts,
        memory=costs.NODE_AGENT,
        cgroup_parent="",
        sysctls={},
    )


def _tls_address(identity: str, host: str) -> dict[str, Any]:
    return {"host": host, "port": _PORT, "identity": identity}
