"""The `swarm` runtime: devices are services of a Docker Swarm, on all of its nodes.

    this node      broker, aggregator, proxy client, node agent, router, and devices
    other nodes    engine proxy, node agent, router, and devices

    data           a separate bridge on each node: its devices and its router
    server         overlay: broker, aggregator, routers
    control        overlay: broker, node agents, routers
    engines        overlay: proxy client, engine proxies

As in the docker runtime, a device's only network is its link. The device's container has the same
specification, too (`testbed.runtimes.docker.specifications`). The device's init reaches the broker
through a Unix socket of the node agent (`testbed.runtimes.swarm.node_services`). The node agent is a
proxy to the broker over TLS, and compares the node's clock with the manager's.

The Swarm starts the services on the nodes that the plan chooses, and carries the services' secrets. The
nodes' engines do the rest: they receive shards, isolate the devices and set CPU limits. Each engine is
reached through its engine proxy (`testbed.runtimes.swarm.engine_proxies`).
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import docker

from agents.config import BrokerAccess
from agents.device import turns
from agents.device_actions import DeviceAction, SetCpu
from agents.mqtt.topics import CONTROLLER, ROUTER
from agents.wire.messages import AddressedOrder
from testbed import broker as brokers
from testbed import images
from testbed.broker import BROKER, SOCKET, TLS_SOCKET
from testbed.broker.access import PublicPort, new_identity
from testbed.errors import BadInputError, HostError
from testbed.host import cpus, docker_engine, kernel
from testbed.host.nodes import Node, local_swarm_nodes, manages_swarm, swarm_nodes
from testbed.images import Images
from testbed.plan import agent_configs
from testbed.plan.agent_configs import MQTT_PORT, TLS_PORT, RunSpec
from testbed.rundir.directory import RunDirectory, last_lines
from testbed.runtimes import LiveRun
from testbed.runtimes.docker import container_files, executor
from testbed.runtimes.docker.container_actions import ContainerDevices
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.docker.meter import RunningContainers
from testbed.runtimes.docker.specifications import (
    COMPONENT_LABEL,
    DIRECTORY_LABEL,
    RUN_LABEL,
    Container,
    CpuLimits,
    launch,
)
from testbed.runtimes.swarm import engine_proxies, node_preparation, removal, services
from testbed.runtimes.swarm.engine_proxies import EngineProxies
from testbed.runtimes.swarm.node_services import (
    FILES,
    INFRASTRUCTURE_PER_CORE,
    NodeAgents,
    Routers,
    SwarmContext,
    SwarmMeter,
    without_group,
)
from testbed.runtimes.swarm.services import ServiceOptions, short_name
from testbed.view import View

_MTU = 1450
"""Bytes per packet on the bridges, less than the usual 1500, because overlay networks add headers."""
_PARALLEL = 8
"""Maximum number of requests at the same time."""
_ANSWER_TIMEOUT_SECONDS = 20
"""Request to a node during a run: short, because the actions of the scenario wait for the answer."""


def is_available() -> bool:
    """An engine answers within 2 s and manages a Swarm."""
    with _manager() as manager:
        return manager is not None


@contextmanager
def _manager() -> Iterator[docker.DockerClient | None]:
    with docker_engine.connect_if_present() as client:
        try:
            manages = client is not None and manages_swarm(client.info())
        except docker_engine.ERRORS:
            manages = False
        yield client if manages else None


def check_host() -> None:
    """Raise HostError unless this host manages a Swarm that can be used for runs."""
    local_swarm_nodes()


@contextmanager
def launcher(spec: RunSpec, view: View) -> Iterator[SwarmRuntime]:
    """Build missing images first, and push them if the topology names a registry. Raises HostError."""
    with closing(docker_engine.connect()) as client:
        nodes = swarm_nodes(client)
        there = {node.id for node in nodes}
        if gone := [node.name for node in spec.plan.nodes if node.id not in there]:
            raise HostError(
                f"the Swarm has changed since the run was planned: {', '.join(gone)} does not accept "
                "work now. Start the run again"
            )
        built = container_files.ensure_images(client, spec, view.progress)
        registry = spec.topology.runtime.registry
        built = node_preparation.push_images(client, built, registry, view.progress)
        spec.directory.write_manifest(images=asdict(built))
        runtime = SwarmRuntime(client, nodes, built, spec, view)
        spec.directory.write_manifest(
            congestion_control=runtime.congestion_control,
            nodes={
                node.id: {"name": node.name, "engine": node.engine, "cores": node.cores}
                for node in nodes
            },
            placement=dict(spec.plan.placement),
        )
        yield runtime


def live_runs() -> list[LiveRun]:
    """Runs that have a service, network, secret or configuration in this Swarm."""
    with _manager() as manager:
        if manager is None:
            return []
        components: Counter[str] = Counter()
        directories: dict[str, str | None] = {}
        with as_host_error("list the services"):
            for kind, labels in removal.objects(manager):
                run = labels[RUN_LABEL]
                if directories.get(run) is None:
                    directories[run] = labels.get(DIRECTORY_LABEL)
                proxy = labels.get(COMPONENT_LABEL) in engine_proxies.COMPONENTS
                components[run] += kind == "service" and not proxy
    return [
        LiveRun.from_labels(run, "swarm", components[run], folder) for run, folder in directories.items()
    ]


def take_down(run: str, directory: RunDirectory | None) -> bool:
    """Save logs to `directory`. Return False if this host manages no Swarm. Raises HostError if
    something may be left."""
    with _manager() as manager:
        if manager is None:
            return False
        with as_host_error("list the services"):
            if not any(removal.objects(manager, run)):
                return True
        nodes = swarm_nodes(manager)
        current = images.current_tags(images.FOLDER, images.AGENTS)
        image = engine_proxies.proxy_image(manager, run) or current["base"]
        with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
            # New proxies: only the process that started existing ones has their keys.
            suffix = f"-{secrets.token_hex(2)}"
            proxies = EngineProxies(manager, nodes, image, run, {RUN_LABEL: run}, Path(folder), suffix)
            try:
                with as_host_error("reach the other nodes"):
                    proxies.open()
            except HostError:
                connected = proxies.engines.keys()
                proxies.unreachable |= {node.id for node in proxies.others} - connected
                raise
            finally:
                removal.remove(manager, proxies, run, directory)
        return True


def logs(run: str, tail: int) -> dict[str, list[str]]:
    """Last `tail` lines, by component; empty if no Swarm answers."""
    with _manager() as manager:
        if manager is None:
            return {}
        api: Any = manager.api
        texts = {}
        with as_host_error("read the logs"):
            for one in services.list_services(manager, run):
                component = one["Spec"]["Labels"][COMPONENT_LABEL]
                if component not in engine_proxies.COMPONENTS:
                    text = api.service_logs(one["ID"], stdout=True, stderr=True, tail=tail, is_tty=False)
                    texts[component] = last_lines(text, tail)
        return texts


class SwarmRuntime:
    def __init__(
        self,
        manager: docker.DockerClient,
        nodes: Sequence[Node],
        built: Images,
        spec: RunSpec,
        view: View,
    ) -> None:
        self._manager = manager
        self._spec = spec
        self._images = built
        self._view = view
        self._directory = spec.directory
        self._run = spec.directory.run
        self._owner = container_files.owner()
        self.congestion_control = kernel.congestion_control()
        """TCP congestion control of all containers; None for the setting of each host."""
        self._launch = launch(
            spec,
            built,
            owner=self._owner,
            congestion_control=self.congestion_control,
            cgroup_driver="cgroupfs",
        )
        labels = {RUN_LABEL: self._run, DIRECTORY_LABEL: str(self._directory.path)}
        folder = self._directory.work / "engines"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._proxies = EngineProxies(manager, nodes, built.base, self._run, labels, folder)
        self._context = SwarmContext(
            manager=manager,
            names={node.id: node.name for node in nodes},
            spec=spec,
            launch=self._launch,
            base=built.base,
            labels=labels,
            proxies=self._proxies,
        )
        self._node_agents, self._routers = NodeAgents(self._context), Routers(self._context)
        self._containers = RunningContainers()
        self._devices = ContainerDevices(spec, self._containers.exit_code, self._set_limits)
        self.meter = SwarmMeter(self._context, self._containers, self._node_agents)
        self._services: dict[str, str] = {}
        """Broker and aggregator, by component."""
        self._pool = ThreadPoolExecutor(_PARALLEL)
        self._folder_fd: int | None = None
        self._port: PublicPort | None = None
        """Port for real devices."""

    def start(self) -> BrokerAccess:
        used = list(dict.fromkeys(self._spec.plan.placement.values()))
        topology, server = self._spec.topology, self._spec.plan.server
        accounts = brokers.accounts(self._run, topology.device_names, used, peers=topology.has_exchange)
        names = () if server is None else (server[0],)
        identity = new_identity(agent_configs.SERVER, agent_configs.CONTROL, *names)
        certificate = identity.certificate
        places = replace(
            agent_configs.container_places(certificate if topology.broker.tls else None),
            router=(agent_configs.CONTROL, TLS_PORT),
            clock=f"{agent_configs.CONTROL_FOLDER}/{agent_configs.CLOCK}",
            real=None if server is None else agent_configs.real_places(server, certificate),
        )
        agent_configs.write(self._spec, accounts, places)
        container_files.prepare(
            self._spec, self._owner, accounts, identity, forwarded=server is not None
        )
        with as_host_error("start the services"):
            self._proxies.open()
            if topology.runtime.registry is None:
                self._copy_images(used)
            self._make_networks()
            self._start_servers(certificate)
            routers = self._routers.start(used)
            for planned in self._spec.plan.nodes:  # the Swarm may have further nodes by now
                self._context.pin_infrastructure(planned.id)
            self._start_devices(routers)
            self._containers |= self._routers.containers
            for node in used:
                self._pool.submit(self._isolate, node).result()
            self._routers.send_configs(self._containers, accounts, places, certificate)
            self._node_agents.await_clocks(used)
            # The devices wait for these files: only now are they isolated, and clocks compared.
            for planned in self._spec.plan.nodes:
                if planned.id in used:
                    cores = len({*planned.infrastructure, *planned.devices})
                    started = (*turns.names(cores), agent_configs.ISOLATED)
                    self._node_agents.put_files(planned.id, dict.fromkeys(started, b""))
        if server is not None:
            self._open_port(server)
        return accounts[CONTROLLER].at(self._broker_socket(), MQTT_PORT)

    def _open_port(self, server: tuple[str, int]) -> None:
        """Listen for real devices at `server` of this host: the Swarm could publish a port of the broker
        only on all interfaces."""
        directory, cpus = self._directory, self._spec.plan.infrastructure_cpus
        config = directory.work / "port.json"
        self._port = PublicPort(server, directory.control / TLS_SOCKET, config, cpus)
        self.meter.more_pids.append(self._port.pid)

    def _broker_socket(self) -> str:
        """Path of the broker's socket. The path goes through the descriptor of the folder, because the
        path of a Unix socket may have at most 107 characters."""
        self._folder_fd = os.open(self._directory.control, os.O_PATH)
        return f"/proc/self/fd/{self._folder_fd}/{SOCKET}"

    def _copy_images(self, nodes: Sequence[str]) -> None:
        """Agents and device groups, to nodes that lack them."""
        for image in dict.fromkeys((self._images.agent, *self._images.groups.values())):
            node_preparation.copy_images(self._manager, self._proxies, nodes, image, self._view.progress)
            self._context.ids.update(
                node_preparation.common_ids(self._manager, self._proxies, nodes, image)
            )
        here = (self._proxies.here,)
        broker = self._images.broker
        self._context.ids.update(node_preparation.common_ids(self._manager, self._proxies, here, broker))

    def _make_networks(self) -> None:
        for network in self._launch.networks:
            bridge = network.name == self._context.object_name("data")
            options = {"com.docker.network.driver.mtu": f"{_MTU}"} if bridge else {}
            services.create_network(self._manager, replace(network, internal=True, options=options))

    def _start_servers(self, certificate: str) -> None:
        options = ServiceOptions(nodes=(f"node.id == {self._proxies.here}",), binds=True)
        aggregator = self._launch.aggregator
        # Not for the devices: their nodes may have other processors.
        environment = {**cpus.chosen_kernels(), **aggregator.environment}
        servers = (self._launch.broker, replace(aggregator, environment=environment))
        made = {self._context.create(one, options): (one.component, 1) for one in servers}
        made |= self._node_agents.create(certificate)
        found = self._context.await_tasks(
            {one: count for one, (_, count) in made.items()},
            {one: component for one, (component, _) in made.items()},
        )
        tasks = {component: found[one] for one, (component, _) in made.items()}
        self._services = {component: one for one, (component, _) in made.items()}
        for container in servers:
            self._record_server(container.component, tasks.pop(container.component)[0])
        self._node_agents.record_tasks([task for agents in tasks.values() for task in agents])

    def _record_server(self, component: str, task: Mapping[str, Any]) -> None:
        """Limit its CPU, too."""
        container = self._launch.broker if component == BROKER else self._launch.aggregator
        self._containers[component] = self._context.container_of(task)
        limits = replace(container.cpu, weight=INFRASTRUCTURE_PER_CORE)
        executor.limit(self._manager, self._containers[component].id, limits, container.memory)

    def _start_devices(self, routers: Mapping[str, str]) -> None:
        """Send the devices the files that they wait for, too. `routers`: address of each node's
        router."""
        servers = [routers[self._spec.plan.placement[one.component]] for one in self._launch.devices]
        made = dict(
            zip(
                self._pool.map(self._start_device, self._launch.devices, servers),
                (one.component for one in self._launch.devices),
                strict=True,
            )
        )
        for service, found in self._context.await_tasks(dict.fromkeys(made, 1), made).items():
            self._containers[made[service]] = self._context.container_of(found[0])
        list(self._pool.map(self._send_files, self._launch.devices))

    def _start_device(self, container: Container, server: str) -> str:
        name = container.component
        planned = self._devices.states[name].planned
        configs = [
            services.create_secret(
                self._manager,
                self._context.object_name(f"{name}-{kind}"),
                self._directory.config(config).read_bytes(),
                container.labels,
                target,
                user=user,
            )
            for kind, config, target, user in (
                ("init", agent_configs.init_name(name), agent_configs.DEVICE_CONFIG, 0),
                ("client", name, agent_configs.CLIENT_CONFIG, agent_configs.CLIENT_USER),
            )
        ]
        options = ServiceOptions(
            nodes=(f"node.id == {self._spec.plan.placement[name]}",),
            secrets=configs,
            volumes=[
                self._context.volume(f"{name}-files", FILES),
                self._context.volume("control", agent_configs.CONTROL_FOLDER, read_only=True),
            ],
            names={agent_configs.SERVER: server},
            cores=0.0 if self._spec.plan.is_oversubscribed else planned.host_cpu,
        )
        container = replace(container, group=0)
        return self._context.create(container, options)

    def _send_files(self, container: Container) -> None:
        """Shard, and the other files that a device reads."""
        made = self._containers[container.component]
        planned = self._devices.states[container.component].planned
        update: Any = made.engine.api
        update.update_container(made.id, mem_limit=planned.memory, memswap_limit=planned.memory)
        sent = agent_configs.files_to_send(self._spec, container.component)
        files: dict[str, bytes | Path] = {Path(path).name: source for path, source in sent.items()}
        disk, client = Path(agent_configs.DISK).name, agent_configs.CLIENT_USER
        saved = self._directory.disk(container.component)  # from before a resume
        files |= {f"{disk}/{path.name}": path for path in saved.iterdir() if path.is_file()}
        executor.put_files(made.engine, made.id, FILES, files, folders={disk: client})

    def _isolate(self, node: str) -> None:
        engine = self._proxies.engines[node]
        network = short_name(self._context.object_name("data"))
        ids = {self._containers[name].id for name in self._context.devices_on(node)}
        found = executor.addresses(engine, network)
        endpoints = {key: each for key, each in found.items() if key in ids}
        executor.isolate(engine, self._images.agent, self._run, network, endpoints, here=False)

    def limit(self, device: str) -> None:
        """No effect on a device that has ended."""
        self._devices.limit(device)

    def measure_again(self, devices: Sequence[str]) -> list[AddressedOrder]:
        return self._devices.measure_again(devices)

    def begin(self) -> None:
        self._devices.begin()
        self._proxies.set_timeout(_ANSWER_TIMEOUT_SECONDS)

    def act(self, device: str, action: DeviceAction) -> list[AddressedOrder]:
        """Carry out an action as in the docker runtime. The engine of the device's node sets CPU
        limits."""
        if isinstance(action, SetCpu):
            self._check_share(device, action.cpu)
        return self._devices.act(device, action)

    def _check_share(self, device: str, share: float) -> None:
        """Raise BadInputError if the node has too few cores for `share`, unless the plan is
        oversubscribed."""
        node = self._spec.plan.node_of(device)
        on = self._context.devices_on(node.id) if node else ()
        shares = {name: self._devices.states[name].planned.host_cpu for name in on}
        shares[device] = share / self._spec.plan.dilation
        if (
            node
            and not self._spec.plan.is_oversubscribed
            and sum(shares.values()) > node.capacity + 1e-9
        ):
            raise BadInputError(
                f"{device} cannot have cpu {share:g}: the devices on {node.name} would need "
                f"{sum(shares.values()):g} cores, but it has {node.capacity:g} for them"
            )

    def exit_codes(self) -> dict[str, int]:
        if self._port is not None:
            self._port.check()
        listed = []
        for node, engine in self._proxies.engines.items():
            with self._context.requests_to(node):
                listed += executor.containers(engine, self._run)
        self._node_agents.check(self._containers.update_states(listed))
        routers = self._routers.containers
        return {
            ROUTER if name in routers else name: code for name, code in self._containers.codes.items()
        }

    def restart(self, component: str) -> int | None:
        with as_host_error(f"start the {component} again"):
            self._pool.submit(self._start_again, component).result()
        self._containers.forget_exit(component)
        return None  # the broker's socket on this node is the same

    def _start_again(self, component: str) -> None:
        service = self._services[component]
        earlier = services.restart(self._manager, service)
        found = self._context.await_tasks({service: 1}, {service: component}, earlier)
        self._record_server(component, found[service][0])

    def stop(self) -> None:
        self._proxies.set_timeout()
        self._pool.shutdown(cancel_futures=True)
        if self._port is not None:
            self._port.close()
        if self._folder_fd is not None:
            os.close(self._folder_fd)
            self._folder_fd = None
        removal.remove(self._manager, self._proxies, self._run, self._directory)

    def _set_limits(self, device: str, limits: CpuLimits, memory: int) -> None:
        self._containers.limit(device, without_group(limits), memory)
