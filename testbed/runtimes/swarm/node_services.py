"""Services of a run on each node, beside devices: a node agent, and a router between devices and
broker."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.config import dump
from agents.mqtt.topics import ROUTER
from testbed.broker import SOCKET, Account, router_user
from testbed.errors import HostError
from testbed.fidelity.host_load import CpuTimes, HostSample, Sampler, cpu_times
from testbed.plan import agent_configs
from testbed.plan.agent_configs import TLS_PORT
from testbed.plan.placement import PlannedNode
from testbed.runtimes import HostReading
from testbed.runtimes.docker import executor
from testbed.runtimes.docker.containers import COMPONENT_LABEL, Attachment
from testbed.runtimes.docker.running_containers import ContainerRef
from testbed.runtimes.swarm import services
from testbed.runtimes.swarm.context import SwarmContext
from testbed.runtimes.swarm.engine_proxies import IDENTITY, NAME, node_container
from testbed.runtimes.swarm.services import ServiceOptions

NODE_AGENT, MANAGER_AGENT = "node.agent", "node.manager-agent"
"""Node agents: on other nodes, and on this one, the manager."""
_STAT = "stat"
"""Counters of a node's CPUs, in the control folder."""
_CLOCK_PORT = 7001
_CLOCK = "clock"
"""Host name of the agent on this node, whose clock is that of the run."""
_TIMEOUT_SECONDS = 30.0
"""Maximum seconds to wait until the clocks of all nodes are compared."""
FILES = str(Path(agent_configs.SHARD).parent)
"""Folder of a device or router, in a volume. They do not start before their last file is in it."""
_FILES_READY = "files-ready"
_WHEN_FILES_READY = f'until [ -e {FILES}/{_FILES_READY} ]; do sleep 0.1; done; exec "$@"'


class NodeAgents:
    """A node agent passes messages of its node's devices from a Unix socket to the broker, over TLS,
    compares the node's clock with the manager's, and reads the counters of the node's CPUs."""

    def __init__(self, context: SwarmContext) -> None:
        self._context = context
        self._containers: dict[str, str] = {}
        """Ids of the agents' containers, by node."""
        self._samplers: dict[str, Sampler] = {}
        """Load on other nodes."""
        self._latest: dict[str, tuple[dict[int, CpuTimes], float]] = {}
        """Latest input of the samplers, by node: counters of the CPUs, and CPU seconds of the node's
        devices."""

    def create(self, certificate: str) -> dict[str, tuple[str, int]]:
        """Return component and number of tasks, by service id. `certificate`: the broker's, in PEM
        format."""
        context = self._context
        control = context.volume("control", agent_configs.CONTROL_FOLDER)
        trust = services.create_config(
            context.manager,
            context.object_name("broker-pem"),
            certificate.encode(),
            context.labels,
            "/testbed/broker.pem",
        )
        to_broker = {
            "host": agent_configs.CONTROL,
            "port": TLS_PORT,
            "name": agent_configs.CONTROL,
            "trust": trust.target,
        }
        proxies = [{"listen": {"path": f"{control.target}/{SOCKET}"}, "to": to_broker}]
        clock = {"host": "0.0.0.0", "port": _CLOCK_PORT, "identity": IDENTITY}  # noqa: S104
        ask = {"host": _CLOCK, "port": _CLOCK_PORT, "identity": IDENTITY, "name": NAME}
        file = f"{control.target}/{agent_configs.CLOCK}"
        here, others = f"node.id == {context.proxies.here}", len(context.proxies.others)
        made = {}
        for component, config, node, count, aliases in (
            (MANAGER_AGENT, {"serve_clock": clock}, here, 1, (_CLOCK,)),
            (
                NODE_AGENT,
                {
                    "compare_clock": {"ask": ask, "write": file},
                    "cpu_counters": f"{control.target}/{_STAT}",
                },
                here.replace("==", "!="),
                others,
                (),
            ),
        ):
            if count == 0:
                continue
            container = node_container(
                component,
                context.object_name(component),
                context.base,
                {**context.labels, COMPONENT_LABEL: component},
                (Attachment(context.object_name("control"), aliases),),
            )
            service = context.proxies.service(
                container,
                {"proxies": proxies, **config},
                (node,),
                everywhere=component == NODE_AGENT,
                volumes=[control],
                more_configs=[trust],
            )
            made[service] = component, count
        return made

    def record_tasks(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Containers of the running `tasks`."""
        for task in tasks:
            self._containers[task["NodeID"]] = task["Status"]["ContainerStatus"]["ContainerID"]

    def check(self, alive: Collection[str]) -> None:
        """Raise HostError if a node agent is not in `alive`: the devices of its node can no longer
        communicate."""
        for node, container in self._containers.items():
            if container not in alive:
                name = self._context.names.get(node, node)
                raise HostError(f"the node agent of {name} has ended: see its log")

    def put_files(self, node: str, files: Mapping[str, bytes]) -> None:
        """Write `files`, name -> content, into the control folder, in this order."""
        engine, where = self._context.proxies.engines[node], agent_configs.CONTROL_FOLDER
        executor.put_files(engine, self._containers[node], where, files)

    def await_clocks(self, nodes: Sequence[str]) -> None:
        """Wait until each node has an estimate of this node's clock; that of the agent here is exact.
        Raises HostError if one takes too long."""
        exact = {"at": 0, "offset": 0, "drift": 0.0, "uncertainty": 0}
        self.put_files(self._context.proxies.here, {agent_configs.CLOCK: json.dumps(exact).encode()})
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        for node in nodes:
            while self._clock(node) is None:
                if time.monotonic() > deadline:
                    name = self._context.names[node]
                    raise HostError(f"the clock of {name} cannot be compared with this host's")
                time.sleep(0.1)

    def _clock(self, node: str) -> dict[str, Any] | None:
        """Estimate of this node's clock by the agent on `node`; None if it has none yet."""
        text = self._read(node, agent_configs.CLOCK)
        return None if text is None else dict(json.loads(text))

    def _read(self, node: str, name: str) -> bytes | None:
        path = f"{agent_configs.CONTROL_FOLDER}/{name}"
        return executor.read_file(self._context.proxies.engines[node], self._containers[node], path)

    def readings(self, at: float, used: Mapping[str, float]) -> dict[str, HostReading]:
        """Return a reading (clock and load) of each other node, by node name. `at` is the run time in
        seconds. `used` has the CPU seconds that each device has used so far."""
        found = {}
        for planned in self._context.spec.plan.nodes:
            if planned.here or planned.id not in self._containers:
                continue
            with self._context.requests_to(planned.id):
                clock, stat = self._clock(planned.id), self._read(planned.id, _STAT)
            found[planned.name] = HostReading(
                math.inf if clock is None else clock["uncertainty"] / 1e9,
                None if stat is None else self._load(planned, stat.decode("ascii"), at, used),
            )
        return found

    def _load(
        self, planned: PlannedNode, stat: str, at: float, used: Mapping[str, float]
    ) -> HostSample | None:
        """Since the last call; None at the first. `stat`: present counters of the node's CPUs."""
        node = planned.id
        own = math.fsum(used.get(name, 0.0) for name in self._context.devices_on(node))
        self._latest[node] = cpu_times(stat), own
        if node not in self._samplers:
            self._samplers[node] = Sampler(
                {*planned.infrastructure, *planned.devices},
                set(planned.devices),
                own=lambda: self._latest[node][1],
                read=lambda: self._latest[node][0],
                dilation=self._context.spec.plan.dilation,
                controlled=False,
            )
        return self._samplers[node].sample(at, 0.0)


class Routers:
    def __init__(self, context: SwarmContext) -> None:
        self._context = context
        self.containers: dict[str, ContainerRef] = {}
        self._components: dict[str, str] = {}
        """Components of the routers, by node."""

    def start(self, nodes: Sequence[str]) -> dict[str, str]:
        """Routers wait for their configurations. Return their addresses on their nodes' bridges, which
        have no name service, by node."""
        context, router = self._context, self._context.launch.router
        if router is None:
            raise HostError("the plan has no router, which a run on a Swarm needs")
        made = {}
        for number, node in enumerate(nodes):
            component = f"{ROUTER}.{number}"
            own = replace(
                router,
                component=component,
                name=context.object_name(component),
                labels={**router.labels, COMPONENT_LABEL: component},
                group=0,
                command=("sh", "-c", _WHEN_FILES_READY, "sh", *router.command),
            )
            volume = context.volume(f"{component}-files", FILES)
            options = ServiceOptions(nodes=(f"node.id == {node}",), volumes=[volume])
            made[context.create(own, options)] = component
            self._components[node] = component
        for service, found in context.await_tasks(dict.fromkeys(made, 1), made).items():
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
        """With the addresses of the running `devices`."""
        context = self._context
        for node, component in self._components.items():
            login = accounts[router_user(node)].at(*places.router, certificate)
            found = context.addresses(node)
            ids = {name: devices[name].id for name in context.devices_on(node)}
            # For devices that have ended already, the controller reports that the start has failed.
            addresses = {name: found[one] for name, one in ids.items() if one in found}
            if not addresses:
                continue
            config = agent_configs.router_config(
                context.spec, login, places, addresses, context.names[node]
            )
            file = context.spec.directory.config(component)
            dump(config, file)
            name = Path(agent_configs.ROUTER_CONFIG).name
            files: dict[str, bytes | Path] = {name: file, _FILES_READY: b""}
            executor.put_files(
                self.containers[component].engine, self.containers[component].id, FILES, files
            )
