"""Doors to the engines of a Swarm's other nodes: what a Swarm's services cannot be told, their node's
engine is, as the engine of this host is for its containers.

On each of those nodes a service of ours (`agents.node`) pipes connections to the engine's socket, which
it alone has. It listens on an overlay network of its own, with TLS in both directions, for one other:
the hub, a service on this host, which has a Unix socket for each node in a folder that is the
controller's alone. So no engine listens on any network of the hosts, and no device reaches a door.

The program needs nothing but Python and is handed to the nodes as it is, so that the image of the doors
is the base of all others, which hardly ever changes: what else a node lacks comes through its door.
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

from agents import clock_sync
from testbed.broker.identity import new_identity
from testbed.errors import HostError
from testbed.host import docker_engine
from testbed.host.nodes import Node
from testbed.runtimes import container_files, executor, swarm_executor
from testbed.runtimes.containers import (
    PART_LABEL,
    Attachment,
    Container,
    Mount,
    Network,
)
from testbed.runtimes.launch import name_of
from testbed.runtimes.services import Handed, Placed, Volume

PROGRAMS, CONFIG, IDENTITY = "/testbed", "/testbed/node.json", "/testbed/node.pem"
NAME = "node"
"""In the nodes' certificate."""
PARTS = DOORS, HUB = "node.doors", "node.hub"
"""Parts of a run that its engines are reached by, and so the last ones to go. No device's name has a
dot."""
IMAGE_LABEL = "testbed.image"
"""Of what stays of a run that still owes something to a node: the image of its doors, which the node may
have from a registry."""
_PORT = 7000
_ENGINE = "/var/run/docker.sock"
_SOCKETS = "/sockets"
_MODULES = Path(clock_sync.__file__).parent
_OPEN_TIMEOUT_SECONDS = 30.0


class Doors:
    """Of one run; `engines` has a client of each node's engine, by the node's id."""

    def __init__(
        self,
        manager: docker.DockerClient,
        nodes: Sequence[Node],
        image: str,
        run: str,
        labels: Mapping[str, str],
        folder: Path,
        again: str = "",
    ) -> None:
        """`folder` is this process's alone, `image` that of the services. `again` names doors that are
        made while others of the run may still be there."""
        self._manager = manager
        self._nodes = nodes
        self.image = image
        self.run = run
        self._labels = labels
        self._folder = folder
        self._again = again
        self._folder_fd: int | None = None
        self._service = ""
        """Id of that of the doors."""
        here = next(node for node in nodes if node.here)
        self.here = here.id
        self.engines: dict[str, docker.DockerClient] = {here.id: manager}
        self.lost: set[str] = set()
        """Nodes that did not answer once."""

    @property
    def others(self) -> list[Node]:
        return [node for node in self._nodes if node.id != self.here]

    def open(self) -> None:
        """Raises HostError."""
        pem = new_identity(NAME)
        self._pem = (pem.certificate + pem.key).encode()
        if not self.others:
            return
        network = self._named("doors-net")
        swarm_executor.create_network(self._manager, Network(name=network, labels=self._labelled(DOORS)))
        task = self._start_doors(network)
        self._start_hub(network, {one["NodeID"]: swarm_executor.address(one, network) for one in task})
        self._folder_fd = os.open(self._folder, os.O_PATH)
        for number, node in enumerate(self.others):
            # By the folder's number, as a path of a Unix socket has at most 107 characters.
            url = f"unix:///proc/self/fd/{self._folder_fd}/{number}"
            self.engines[node.id] = self._client(node, url)

    def _client(self, node: Node, url: str) -> docker.DockerClient:
        try:
            return docker_engine.at(url, _OPEN_TIMEOUT_SECONDS)
        except HostError as error:
            told = swarm_executor.log(self._manager, self._named(HUB))
            raise HostError(f"the engine of {node.name} does not answer: {error}{told}") from error

    def _start_doors(self, network: str) -> list[dict[str, Any]]:
        pipe = {"listen": _over(IDENTITY, "0.0.0.0"), "to": {"path": _ENGINE}}  # noqa: S104
        container = self._container(DOORS, network, (Mount(_ENGINE, _ENGINE, read_only=False),))
        made = self.service(
            container,
            {"pipes": [pipe]},
            [f"node.id != {self.here}"],
            everywhere=True,
        )
        self._service = made
        return self._running({made: len(self.others)})[made]

    def _start_hub(self, network: str, addresses: Mapping[str, str]) -> None:
        pipes = [
            {
                "listen": {"path": f"{_SOCKETS}/{number}"},
                "to": {**_over(IDENTITY, addresses[node.id]), "name": NAME},
            }
            for number, node in enumerate(self.others)
        ]
        mount = Mount(str(self._folder), _SOCKETS, read_only=False)
        container = self._container(HUB, network, (mount,))
        user, group = container_files.owner()
        container_files.give((user, group), self._folder)
        container = replace(container, user=user, group=group)
        made = self.service(container, {"pipes": pipes}, [f"node.id == {self.here}"])
        self._running({made: 1})

    def service(
        self,
        container: Container,
        config: Mapping[str, Any],
        nodes: Sequence[str],
        *,
        everywhere: bool = False,
        volumes: Sequence[Volume] = (),
        more_configs: Sequence[Handed] = (),
    ) -> str:
        """Create a service of `agents.node` with `config`; return its id."""
        labels, name = container.labels, container.name
        target = f"{PROGRAMS}/agents"
        configs = [
            self._config(
                f"{name}-{module}", (_MODULES / module).read_bytes(), f"{target}/{module}", labels
            )
            for module in ("node.py", "clock_sync.py")
        ]
        configs.append(self._config(f"{name}-json", json.dumps(config).encode(), CONFIG, labels))
        secret = swarm_executor.hand(
            self._manager, f"{name}-pem", self._pem, labels, IDENTITY, user=container.user
        )
        at = Placed(
            nodes=tuple(nodes),
            everywhere=everywhere,
            binds=True,
            secrets=[secret],
            configs=[*configs, *more_configs],
            volumes=volumes,
        )
        return swarm_executor.create(self._manager, container, at)

    def _config(self, name: str, data: bytes, target: str, labels: Mapping[str, str]) -> Handed:
        return swarm_executor.configure(self._manager, name, data, labels, target)

    def _running(self, expected: Mapping[str, int]) -> dict[str, list[dict[str, Any]]]:
        try:
            return swarm_executor.running(self._manager, expected, lambda _: "the door", self.names)
        except HostError as error:
            if "No such image" not in str(error):
                raise
            raise HostError(
                f"a node of the Swarm has no image {self.image}, and no registry has it: {error}. On "
                f"this machine, for each node that lacks it: docker save {self.image} | ssh NODE "
                "docker load"
            ) from error

    def _container(self, part: str, network: str, mounts: tuple[Mount, ...]) -> Container:
        return node_container(
            part,
            self._named(part),
            self.image,
            self._labelled(part),
            (Attachment(network, ()),),
            mounts,
        )

    def _named(self, what: str) -> str:
        return name_of(self.run, f"{what}{self._again}")

    def _labelled(self, part: str) -> dict[str, str]:
        return {**self._labels, PART_LABEL: part}

    @property
    def names(self) -> dict[str, str]:
        """Of the nodes, by id."""
        return {node.id: node.name for node in self._nodes}

    def be_patient(self, seconds: int | None = None) -> None:
        """How long an engine of another node has for an answer; None: as long as the work takes that
        begins and ends a run."""
        for node, engine in self.engines.items():
            if node != self.here and node not in self.lost:
                engine.api.timeout = seconds or docker_engine.REQUEST_TIMEOUT_SECONDS

    def shut(self, spare: Collection[str] = ()) -> None:
        """Remove the doors' containers, but for those of the nodes to `spare`: each by its own engine,
        whose answer it does not live to pass on. The Swarm would do it too, but not say when."""
        for node, engine in self.engines.items():
            if node != self.here and node not in spare:
                with suppress(*docker_engine.ERRORS):
                    executor.remove_containers(engine, self.run, self._is_own)
                    executor.remove_containers(engine, self.run)
        self._close()

    def _is_own(self, container: Mapping[str, Any]) -> bool:
        """Whether it is one of these doors, and not of an earlier process that was killed."""
        return bool(container["Labels"].get(executor.SERVICE_LABEL) == self._service)

    def _close(self) -> None:
        for node in [node for node in self.engines if node != self.here]:
            self.engines.pop(node).close()
        if self._folder_fd is not None:
            os.close(self._folder_fd)
            self._folder_fd = None


def is_last(container: Mapping[str, Any]) -> bool:
    """Whether a container is one that engines are reached by."""
    return container["Labels"].get(PART_LABEL) in PARTS


def image_of(manager: docker.DockerClient, run: str) -> str | None:
    """What the doors of `run` are made of, or were where there is only something owed."""
    for one in swarm_executor.services(manager, run):
        if one["Spec"]["Labels"].get(PART_LABEL) == DOORS:
            return str(one["Spec"]["TaskTemplate"]["ContainerSpec"]["Image"])
    api: Any = manager.api
    found = (one["Spec"]["Labels"] for one in api.configs(filters=swarm_executor.labelled(run)))
    return next((labels[IMAGE_LABEL] for labels in found if IMAGE_LABEL in labels), None)


def node_container(
    part: str,
    name: str,
    image: str,
    labels: Mapping[str, str],
    networks: tuple[Attachment, ...],
    mounts: tuple[Mount, ...] = (),
) -> Container:
    """A container of `agents.node`: root, who has no capabilities."""
    return Container(
        part=part,
        name=name,
        image=image,
        command=("python3", "-m", "agents.node", CONFIG),
        environment={"PYTHONPATH": PROGRAMS},
        user=0,
        group=0,
        labels=labels,
        networks=networks,
        mounts=mounts,
        cgroup_parent="",
        sysctls={},
    )


def _over(identity: str, host: str) -> dict[str, Any]:
    return {"host": host, "port": _PORT, "identity": identity}
