"""Routers of a run on a Swarm: one on each node with devices, between these and the broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agents.config import dump
from agents.mqtt.topics import ROUTER
from testbed.broker import Account, router_user
from testbed.errors import HostError
from testbed.plan import agent_configs
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.containers import COMPONENT_LABEL
from testbed.runtimes.docker.running_containers import ContainerRef
from testbed.runtimes.swarm.context import SwarmContext
from testbed.runtimes.swarm.services import ServiceOptions

FILES = str(Path(agent_configs.SHARD).parent)
"""Where a device, and a router, find their files: a volume of their own. Neither begins before the last
of them is there."""
_FILES_READY = "files-ready"
_WHEN_FILES_READY = f'until [ -e {FILES}/{_FILES_READY} ]; do sleep 0.1; done; exec "$@"'


class Routers:
    """Those of one run."""

    def __init__(self, context: SwarmContext) -> None:
        self._context = context
        self.containers: dict[str, ContainerRef] = {}
        """By component."""
        self._components: dict[str, str] = {}
        """By node."""

    def start(self, nodes: Sequence[str]) -> dict[str, str]:
        """Start a router on each node, which waits for what it has to know of its devices; return its
        address there, which no name service of such a network has a name for."""
        context, router = self._context, self._context.launch.router
        if router is None:
            raise HostError("a run of many hosts has routers")
        made = {}
        for number, node in enumerate(nodes):
            component = f"{ROUTER}.{number}"
            own = replace(
                router,
                component=component,
                name=context.named(component),
                labels={**router.labels, COMPONENT_LABEL: component},
                group=0,
                command=("sh", "-c", _WHEN_FILES_READY, "sh", *router.command),
            )
            volume = context.volume(f"{component}-files", FILES)
            options = ServiceOptions(nodes=(f"node.id == {node}",), volumes=[volume])
            made[context.create(own, options)] = component
            self._components[node] = component
        for service, found in context.running(dict.fromkeys(made, 1), made).items():
            self.containers[made[service]] = context.container_of(found[0])
        return {
            node: context.addresses(node)[self.containers[component].id]
            for node, component in self._components.items()
        }

    def send_configs(
        self,
        devices: Mapping[str, ContainerRef],
        accounts: Mapping[str, Account],
        places: agent_configs.Places,
        certificate: str,
    ) -> None:
        """Send each router its configuration, with the addresses of the `devices` that run by now."""
        context = self._context
        for node, component in self._components.items():
            login = accounts[router_user(node)].at(*places.router, certificate)
            found = context.addresses(node)
            ids = {name: devices[name].id for name in context.devices_on(node)}
            # Of those that have ended meanwhile, the controller reports that the start has failed.
            addresses = {name: found[one] for name, one in ids.items() if one in found}
            if not addresses:
                continue
            config = agent_configs.router(context.spec, login, places, addresses, context.names[node])
            file = context.spec.directory.config(component)
            dump(config, file)
            name = Path(agent_configs.ROUTER_CONFIG).name
            files: dict[str, bytes | Path] = {name: file, _FILES_READY: b""}
            executor.put(self.containers[component].engine, self.containers[component].id, FILES, files)
