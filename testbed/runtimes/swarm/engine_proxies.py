"""Proxies to the Docker engines of a Swarm's other nodes. What a Swarm cannot do for its services, their
node's engine does, as the engine of this host does it for containers.

    controller ── Unix socket per node ── proxy client ══ TLS, overlay ══ engine proxy ── engine's socket

An engine proxy is a service on each other node (`agents.node.node_agent`), and the only one with the
engine's socket. It listens on an overlay network of its own, with TLS and a certificate on both sides,
for the proxy client alone: a service on this host, whose Unix sockets are in a folder that only the
controller may read. So no engine listens on any network of the hosts, and no device reaches an engine
proxy.

The program needs nothing but Python and is sent to the nodes as it is, so that the image of the proxies
is the base of all others, which hardly ever changes: images that a node lacks are loaded through its
proxy.
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
from testbed.broker.identity import new_identity
from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.host.nodes import Node
from testbed.plan import memory
from testbed.runtimes.docker import container_files, executor
from testbed.runtimes.docker.containers import (
    COMPONENT_LABEL,
    Attachment,
    Container,
    Mount,
    Network,
)
from testbed.runtimes.docker.specifications import name_of
from testbed.runtimes.swarm import services
from testbed.runtimes.swarm.services import ServiceFile, ServiceOptions, Volume

PROGRAMS, CONFIG, IDENTITY = "/testbed", "/testbed/node.json", "/testbed/node.pem"
NAME = "node"
"""In the nodes' certificate."""
COMPONENTS = ENGINE_PROXY, PROXY_CLIENT = "node.engine-proxy", "node.proxy-client"
"""Components of a run by which its engines are reached: removed last. No device's name has a dot."""
IMAGE_LABEL = "testbed.image"
"""Of the configuration that stays where a node could not be cleaned up: the image of its engine proxy,
which the node may have from a registry."""
_PORT = 7000
_ENGINE = "/var/run/docker.sock"
_SOCKETS = "/sockets"
_AGENTS = Path(clock_sync.__file__).parents[1]
_OPEN_TIMEOUT_SECONDS = 30.0


class EngineProxies:
    """Those of one run; `engines` has a client of each node's engine, by the node's id."""

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
        """`folder` is this process's alone, `image` that of the services. `suffix` tells their names
        from those of an earlier process of the run, which may still be there."""
        self._manager = manager
        self._nodes = nodes
        self.image = image
        self.run = run
        self._labels = labels
        self._folder = folder
        self._suffix = suffix
        self._folder_fd: int | None = None
        self._service = ""
        """Id of that of the engine proxies."""
        here = next(node for node in nodes if node.here)
        self.here = here.id
        self.engines: dict[str, docker.DockerClient] = {here.id: manager}
        self.unreachable: set[str] = set()
        """Nodes that have failed to answer: they are not asked again."""

    @property
    def others(self) -> list[Node]:
        return [node for node in self._nodes if node.id != self.here]

    def open(self) -> None:
        """Raises HostError."""
        pem = new_identity(NAME)
        self._pem = (pem.certificate + pem.key).encode()
        if not self.others:
            return
        network = self._named("engines")
        labels = self._labelled(ENGINE_PROXY)
        services.create_network(self._manager, Network(name=network, labels=labels))
        tasks = self._start_proxies(network)
        self._start_client(network, {one["NodeID"]: services.address(one, network) for one in tasks})
        self._folder_fd = os.open(self._folder, os.O_PATH)
        for number, node in enumerate(self.others):
            # By the folder's number, as a path of a Unix socket has at most 107 characters.
            url = f"unix:///proc/self/fd/{self._folder_fd}/{number}"
            self.engines[node.id] = self._client(node, url)

    def _client(self, node: Node, url: str) -> docker.DockerClient:
        try:
            return docker_engine.connect_to(url, _OPEN_TIMEOUT_SECONDS)
        except HostError as error:
            told = services.log(self._manager, self._named(PROXY_CLIENT))
            raise HostError(f"the engine of {node.name} does not answer: {error}{told}") from error

    def _start_proxies(self, network: str) -> list[dict[str, Any]]:
        proxy = {"listen": _over(IDENTITY, "0.0.0.0"), "to": {"path": _ENGINE}}  # noqa: S104
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
                "to": {**_over(IDENTITY, addresses[node.id]), "name": NAME},
            }
            for number, node in enumerate(self.others)
        ]
        mount = Mount(str(self._folder), _SOCKETS, read_only=False)
        container = self._container(PROXY_CLIENT, network, (mount,))
        user, group = container_files.owner()
        container_files.give((user, group), self._folder)
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
        """Create a service of `agents.node.node_agent` with `config`; return its id."""
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
            return services.running(
                self._manager, expected, lambda _: "the proxy to the engine", self.names
            )
        except HostError as error:
            if "No such image" not in str(error):
                raise
            raise HostError(
                f"a node of the Swarm has no image {self.image}, and no registry has it: {error}. On "
                f"this machine, for each node that lacks it: docker save {self.image} | ssh NODE "
                "docker load"
            ) from error

    def _container(self, component: str, network: str, mounts: tuple[Mount, ...]) -> Container:
        return node_container(
            component,
            self._named(component),
            self.image,
            self._labelled(component),
            (Attachment(network, ()),),
            mounts,
        )

    def _named(self, what: str) -> str:
        return name_of(self.run, f"{what}{self._suffix}")

    def _labelled(self, component: str) -> dict[str, str]:
        return {**self._labels, COMPONENT_LABEL: component}

    @property
    def names(self) -> dict[str, str]:
        """Of the nodes, by id."""
        return {node.id: node.name for node in self._nodes}

    def set_timeout(self, seconds: int | None = None) -> None:
        """How long an engine of another node has for an answer; None: as long as the work takes that
        begins and ends a run."""
        for node, engine in self.engines.items():
            if node != self.here and node not in self.unreachable:
                engine.api.timeout = seconds or docker_engine.REQUEST_TIMEOUT_SECONDS

    def close(self, spare: Collection[str] = ()) -> None:
        """Remove the engine proxies' containers, but for those of the nodes to `spare`: each by its own
        engine, whose answer it does not live to pass on. The Swarm would do it too, but not say when."""
        for node, engine in self.engines.items():
            if node != self.here and node not in spare:
                with suppress(*docker_engine.ERRORS):
                    executor.remove_containers(engine, self.run, self._is_own)
                    executor.remove_containers(engine, self.run)
        self._disconnect()

    def _is_own(self, container: Mapping[str, Any]) -> bool:
        """Whether it is one of these proxies, and not of an earlier process that was killed."""
        return bool(container["Labels"].get(executor.SERVICE_LABEL) == self._service)

    def _disconnect(self) -> None:
        for node in [node for node in self.engines if node != self.here]:
            self.engines.pop(node).close()
        if self._folder_fd is not None:
            os.close(self._folder_fd)
            self._folder_fd = None


def is_proxy(container: Mapping[str, Any]) -> bool:
    """Whether a container is one by which engines are reached."""
    return container["Labels"].get(COMPONENT_LABEL) in COMPONENTS


def image_of(manager: docker.DockerClient, run: str) -> str | None:
    """The image of the engine proxies of `run`, also where only a clean-up is pending."""
    for one in services.listed(manager, run):
        if one["Spec"]["Labels"].get(COMPONENT_LABEL) == ENGINE_PROXY:
            return str(one["Spec"]["TaskTemplate"]["ContainerSpec"]["Image"])
    api: Any = manager.api
    found = (one["Spec"]["Labels"] for one in api.configs(filters=services.labelled(run)))
    return next((labels[IMAGE_LABEL] for labels in found if IMAGE_LABEL in labels), None)


def node_container(
    component: str,
    name: str,
    image: str,
    labels: Mapping[str, str],
    networks: tuple[Attachment, ...],
    mounts: tuple[Mount, ...] = (),
) -> Container:
    """A container of `agents.node.node_agent`: as root, without capabilities."""
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
        memory=memory.NODE_AGENT,
        cgroup_parent="",
        sysctls={},
    )


def _over(identity: str, host: str) -> dict[str, Any]:
    return {"host": host, "port": _PORT, "identity": identity}
