"""Routers of a run on a Swarm: one on each node with devices, between these and the broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agents.config import dump
from agents.topics import ROUTER
from testbed.broker import Account, router_user
from testbed.errors import HostError
from testbed.plan import agent_configs
from testbed.runtimes import executor
from testbed.runtimes.containers import PART_LABEL
from testbed.runtimes.services import Placed
from testbed.runtimes.swarm_site import At, Site

FILES = str(Path(agent_configs.SHARD).parent)
"""Where a device, and a router, find their files: a volume of their own."""
_FURNISHED = "furnished"
_WHEN_FURNISHED = f'until [ -e {FILES}/{_FURNISHED} ]; do sleep 0.1; done; exec "$@"'


class Routers:
    def __init__(self, site: Site) -> None:
        self._site = site
        self.at: dict[str, At] = {}
        """Of each, by its part."""
        self._parts: dict[str, str] = {}
        """By node."""

    def start(self, nodes: Sequence[str]) -> dict[str, str]:
        """Start a router on each node, which waits for what it has to know of its devices; return its
        address there, which no name service of such a network has a name for."""
        site, router = self._site, self._site.launch.router
        if router is None:
            raise HostError("a run of many hosts has routers")
        made = {}
        for number, node in enumerate(nodes):
            part = f"{ROUTER}.{number}"
            own = replace(
                router,
                part=part,
                name=site.named(part),
                labels={**router.labels, PART_LABEL: part},
                group=0,
                command=("sh", "-c", _WHEN_FURNISHED, "sh", *router.command),
            )
            volume = site.volume(f"{part}-files", FILES)
            at = Placed(nodes=(f"node.id == {node}",), volumes=[volume])
            made[site.create(own, at)] = part
            self._parts[node] = part
        for service, found in site.running(dict.fromkeys(made, 1), made).items():
            self.at[made[service]] = site.located(found[0])
        return {node: site.addresses(node)[self.at[part].id] for node, part in self._parts.items()}

    def furnish(
        self,
        devices: Mapping[str, At],
        accounts: Mapping[str, Account],
        places: agent_configs.Places,
        certificate: str,
    ) -> None:
        """Tell each router what it has to know, as the `devices` are there."""
        site = self._site
        for node, part in self._parts.items():
            login = accounts[router_user(node)].at(*places.router, certificate)
            found = site.addresses(node)
            on = {name: devices[name].id for name in site.on(node)}
            addresses = {name: found[at] for name, at in on.items() if at in found}  # else it has ended
            if not addresses:  # the barrier will tell
                continue
            config = agent_configs.router(site.spec, login, places, addresses, site.names[node])
            file = site.spec.directory.config(part)
            dump(config, file)
            name = Path(agent_configs.ROUTER_CONFIG).name
            files: dict[str, bytes | Path] = {name: file, _FURNISHED: b""}
            executor.put(self.at[part].engine, self.at[part].id, FILES, files)
