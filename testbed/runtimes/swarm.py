"""The `swarm` runtime: devices as services of a Docker Swarm, on all of its nodes.

    this node      broker, aggregator, hub, gate and router, and devices
    other nodes    door, gate and router, and devices

    data           a bridge on each node, for itself: its devices, and its router
    server         overlay: broker, aggregator, routers
    control        overlay: broker, gates, routers
    doors          overlay: hub, doors

A device is its link, as in the docker runtime, and its containers are made of the same specifications
(`testbed.runtimes.launch`). Its init reaches the broker by a Unix socket, which is its node's gate's:
that pipes it to the broker over TLS, and keeps the estimate of this node's clock. The Swarm places and
starts the services, where the plan says, and carries their secrets; the node's engine, which is reached
through a door (`testbed.runtimes.doors`), gets the shards, isolates the devices, limits their CPU.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound

from agents.config import Broker, dump
from agents.device_actions import Action, Join, Restart, SetCpu
from agents.messages import AddressedOrder, Telemetry
from agents.topics import AGGREGATOR, CONTROLLER, ROUTER
from testbed import broker as brokers
from testbed import images
from testbed.broker import BROKER, SOCKET, router_user
from testbed.broker.identity import new_identity
from testbed.errors import BadInputError, HostError
from testbed.fidelity.host_load import CpuTimes, HostSample, Sampler, cpu_times
from testbed.host import cgroups, docker_engine, kernel, swarm
from testbed.host.nodes import Node
from testbed.images import Images, own
from testbed.plan import agent_configs
from testbed.plan.agent_configs import MQTT_PORT, TLS_PORT, RunSpec
from testbed.rundir.directory import RunDirectory, last_lines
from testbed.runtimes import LiveRun, container_files, doors, executor, swarm_executor, swarm_removal
from testbed.runtimes.container_actions import Device, respond
from testbed.runtimes.containers import (
    DIRECTORY_LABEL,
    PART_LABEL,
    RUN_LABEL,
    Attachment,
    Container,
    CpuLimits,
)
from testbed.runtimes.doors import Doors, node_container
from testbed.runtimes.executor import as_host_error
from testbed.runtimes.launch import launch, name_of, planned_limits
from testbed.runtimes.services import Placed, Volume, short
from testbed.view import View

GATE, CLOCK_GATE = "node.gate", "node.clock"
"""Parts of a run beside those of other runtimes: on other nodes, and on this one."""
_STAT = "stat"
"""Name of the file in the control folder with the counters of a node's CPUs."""
_CLOCK_PORT = 7001
_CLOCK = "clock"
"""Name of the gate of this node, whose clock is that of the run."""
_MTU = 1450
"""Of the bridges: what an overlay carries of 1500."""
_PARALLEL = 8
_GATE_TIMEOUT_SECONDS = 30.0
_FILES = str(Path(agent_configs.SHARD).parent)
"""Where a device finds its files: a volume of its own."""
_FURNISHED = "furnished"
_WHEN_FURNISHED = f'until [ -e {_FILES}/{_FURNISHED} ]; do sleep 0.1; done; exec "$@"'


def available() -> bool:
    """Whether an engine answers within 2 s and manages a Swarm."""
    with _manager() as manager:
        return manager is not None


@contextmanager
def _manager() -> Iterator[docker.DockerClient | None]:
    with docker_engine.if_present() as client:
        try:
            manages = client is not None and swarm.manages(client.info())
        except docker_engine.ERRORS:
            manages = False
        yield client if manages else None


@contextmanager
def launcher(spec: RunSpec, view: View) -> Iterator[SwarmRuntime]:
    """See `testbed.runtimes.Emulator`."""
    with closing(docker_engine.connect()) as client:
        nodes = swarm.nodes(client)
        built = images.ensure(client, view.progress, container_files.own_image(spec))
        built = replace(built, groups=own.of_groups(client, spec.topology, built, view.progress))
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
        parts: Counter[str] = Counter()
        directories: dict[str, str | None] = {}
        with as_host_error("list the services"):
            for kind, labels in swarm_removal.things(manager):
                run = labels[RUN_LABEL]
                if directories.get(run) is None:
                    directories[run] = labels.get(DIRECTORY_LABEL)
                parts[run] += kind == "service" and labels.get(PART_LABEL) not in doors.PARTS
    return [LiveRun.labelled(run, "swarm", parts[run], folder) for run, folder in directories.items()]


def take_down(run: str, directory: RunDirectory | None) -> bool:
    """See `testbed.runtimes.Emulator`."""
    with _manager() as manager:
        if manager is None:
            return False
        with as_host_error("list the services"):
            if not any(swarm_removal.things(manager, run)):
                return True
        nodes = swarm.nodes(manager)
        image = images.current_tags(images.FOLDER, images.AGENTS)["base"]
        with tempfile.TemporaryDirectory(prefix="testbed-") as folder:
            # Whoever made the doors that may be there has taken their keys along.
            again = f"-{secrets.token_hex(2)}"
            made = Doors(manager, nodes, image, run, {RUN_LABEL: run}, Path(folder), again)
            try:
                made.open()
            finally:
                swarm_removal.remove(manager, made, run, directory)
        return True


def logs(run: str, tail: int) -> dict[str, list[str]]:
    """The last `tail` lines of each service of `run`, by its part; none where no Swarm answers."""
    with _manager() as manager:
        if manager is None:
            return {}
        api: Any = manager.api
        texts = {}
        with as_host_error("read the logs"):
            for one in swarm_executor.services(manager, run):
                part = one["Spec"]["Labels"][PART_LABEL]
                if part not in doors.PARTS:
                    text = api.service_logs(one["ID"], stdout=True, stderr=True, tail=tail, is_tty=False)
                    texts[part] = last_lines(text, tail)
        return texts


@dataclass(frozen=True, slots=True)
class _At:
    """Where a container is."""

    engine: docker.DockerClient
    id: str


class SwarmRuntime:
    """Implements `testbed.runtimes.Runtime`."""

    def __init__(
        self,
        manager: docker.DockerClient,
        nodes: Sequence[Node],
        built: Images,
        spec: RunSpec,
        view: View,
    ) -> None:
        self._manager = manager
        self._names = {node.id: node.name for node in nodes}
        self._spec = spec
        self._images = built
        self._view = view
        self._directory = spec.directory
        self._run = spec.directory.run
        self._owner = container_files.owner()
        self.congestion_control = kernel.congestion_control()
        """Of all containers' TCP; None: the hosts'."""
        self._launch = launch(
            spec,
            built,
            owner=self._owner,
            congestion_control=self.congestion_control,
            cgroup_driver="cgroupfs",
        )
        self._labels = {RUN_LABEL: self._run, DIRECTORY_LABEL: str(self._directory.path)}
        folder = self._directory.work / "doors"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._doors = Doors(manager, nodes, built.base, self._run, self._labels, folder)
        absent = spec.absent
        self._devices = {d.name: Device(d, d.name in absent) for d in spec.plan.devices}
        self._at: dict[str, _At] = {}
        """Each part's container."""
        self._samplers: dict[str, Sampler] = {}
        """Of the load of other nodes, by node."""
        self._looks: dict[str, tuple[list[CpuTimes], float]] = {}
        """What they read: counters of the CPUs, and CPU seconds of the devices, by node."""
        self._pids: dict[str, int] = {}
        """Of the devices on this node, as `_used`."""
        self._used: dict[str, float] = {}
        """CPU seconds, when last looked at."""
        self._gates: dict[str, str] = {}
        """Container, by node."""
        self._routers: dict[str, str] = {}
        """Part, by node."""
        self._codes: dict[str, int] = {}
        self._server_pids: list[int] = []
        self._pool = ThreadPoolExecutor(_PARALLEL)
        self._folder_fd: int | None = None

    def start(self) -> Broker:
        used = list(dict.fromkeys(self._spec.plan.placement.values()))
        accounts = brokers.accounts(self._run, self._devices, used)
        tls = self._spec.topology.broker.tls
        identity = new_identity(agent_configs.SERVER, agent_configs.CONTROL)
        places = replace(
            agent_configs.in_containers(identity.certificate if tls else None),
            router=(agent_configs.CONTROL, TLS_PORT),
            clock=f"{agent_configs.CONTROL_FOLDER}/{agent_configs.CLOCK}",
        )
        agent_configs.write(self._spec, accounts, places)
        container_files.prepare(self._spec, self._owner, accounts, identity)
        with as_host_error("start the services"):
            self._doors.open()
            self._bring_images(used)
            self._make_networks()
            gates = self._start_servers(identity.certificate)
            self._start_devices(self._start_routers(used))
            for node in used:
                self._pool.submit(self._isolate, node).result()
            self._furnish_routers(accounts, places, identity.certificate)
            self._await_clocks(used, gates)
            control = agent_configs.CONTROL_FOLDER
            for node in used:
                executor.put(
                    self._doors.engines[node], gates[node], control, {agent_configs.ISOLATED: b""}
                )
            self._gates = gates
        return accounts[CONTROLLER].at(self._broker_socket(), MQTT_PORT)

    def _broker_socket(self) -> str:
        """By the folder's number, as a path of a Unix socket has at most 107 characters."""
        self._folder_fd = os.open(self._directory.control, os.O_PATH)
        return f"/proc/self/fd/{self._folder_fd}/{SOCKET}"

    def _bring_images(self, nodes: Sequence[str]) -> None:
        """Copy the images of agents and of device groups to the nodes that lack them, by the engines'
        own save and load."""
        wanted = dict.fromkeys((self._images.agent, *self._images.groups.values()))
        for node, image in itertools.product(nodes, wanted):
            api: Any = self._doors.engines[node].api
            try:
                api.inspect_image(image)
            except ImageNotFound:
                self._view.progress(f"Copying {image} to {self._names[node]}")
                for _ in api.load_image(self._manager.api.get_image(image)):
                    pass

    def _make_networks(self) -> None:
        for network in self._launch.networks:
            bridge = network.name == name_of(self._run, "data")
            options = {"com.docker.network.driver.mtu": f"{_MTU}"} if bridge else {}
            swarm_executor.create_network(
                self._manager, replace(network, internal=True, options=options)
            )

    def _start_servers(self, certificate: str) -> dict[str, str]:
        """Start broker, aggregator and the gates; return the containers of the gates, by node."""
        here = (f"node.id == {self._doors.here}",)
        at = Placed(nodes=here, binds=True)
        made = {
            part.part: swarm_executor.create(self._manager, part, at)
            for part in (self._launch.broker, self._launch.aggregator)
        }
        control = Volume(short(name_of(self._run, "control")), agent_configs.CONTROL_FOLDER)
        trust = swarm_executor.configure(
            self._manager,
            name_of(self._run, "broker-pem"),
            certificate.encode(),
            self._labels,
            "/testbed/broker.pem",
        )
        to_broker = {
            "host": agent_configs.CONTROL,
            "port": TLS_PORT,
            "name": agent_configs.CONTROL,
            "trust": trust.target,
        }
        pipes = [{"listen": {"path": f"{control.target}/{SOCKET}"}, "to": to_broker}]
        clock = {"host": "0.0.0.0", "port": _CLOCK_PORT, "identity": doors.IDENTITY}  # noqa: S104
        ask = {"host": _CLOCK, "port": _CLOCK_PORT, "identity": doors.IDENTITY, "name": doors.NAME}
        file = f"{control.target}/{agent_configs.CLOCK}"
        counts = dict.fromkeys(made.values(), 1)
        for part, config, nodes, everywhere, aliases in (
            (CLOCK_GATE, {"serve": clock}, here, False, (_CLOCK,)),
            (
                GATE,
                {"follow": {"ask": ask, "write": file}, "watch": f"{control.target}/{_STAT}"},
                (f"node.id != {self._doors.here}",),
                True,
                (),
            ),
        ):
            if everywhere and not self._doors.others:
                continue
            container = node_container(
                part,
                name_of(self._run, part),
                self._images.base,
                {**self._labels, PART_LABEL: part},
                (Attachment(name_of(self._run, "control"), aliases),),
            )
            made[part] = self._doors.service(
                container,
                {"pipes": pipes, **config},
                nodes,
                everywhere=everywhere,
                volumes=[control],
                more_configs=[trust],
            )
            counts[made[part]] = len(self._doors.others) if everywhere else 1
        found = self._running(counts, {one: part for part, one in made.items()})
        for part in (BROKER, AGGREGATOR):
            container = self._launch.broker if part == BROKER else self._launch.aggregator
            self._at[part] = self._located(found[made[part]][0])
            executor.limit(self._manager, self._at[part].id, container.cpu)
        return {
            task["NodeID"]: task["Status"]["ContainerStatus"]["ContainerID"]
            for part in (CLOCK_GATE, GATE)
            if part in made
            for task in found[made[part]]
        }

    def _located(self, task: Mapping[str, Any]) -> _At:
        engine = self._doors.engines[task["NodeID"]]
        return _At(engine, task["Status"]["ContainerStatus"]["ContainerID"])

    def _running(
        self, expected: Mapping[str, int], parts: Mapping[str, str]
    ) -> dict[str, list[dict[str, Any]]]:
        return swarm_executor.running(
            self._manager,
            expected,
            lambda service: parts[service],
            lambda node: self._names.get(node, node),
        )

    def _start_devices(self, routers: Mapping[str, str]) -> None:
        """Start the devices, and give each its files, which it waits for; `routers` are the addresses of
        the routers, by node."""
        servers = [routers[self._spec.plan.placement[one.part]] for one in self._launch.devices]
        made = dict(
            zip(
                self._pool.map(self._start_device, self._launch.devices, servers),
                (one.part for one in self._launch.devices),
                strict=True,
            )
        )
        for service, found in self._running(dict.fromkeys(made, 1), made).items():
            self._at[made[service]] = self._located(found[0])
        list(self._pool.map(self._furnish, self._launch.devices))

    def _start_device(self, container: Container, server: str) -> str:
        name = container.part
        planned = self._devices[name].planned
        handed = [
            swarm_executor.hand(
                self._manager,
                name_of(self._run, f"{name}-{kind}"),
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
        at = Placed(
            nodes=(f"node.id == {self._spec.plan.placement[name]}",),
            secrets=handed,
            volumes=[
                Volume(short(name_of(self._run, f"{name}-files")), _FILES),
                Volume(
                    short(name_of(self._run, "control")), agent_configs.CONTROL_FOLDER, read_only=True
                ),
            ],
            names={agent_configs.SERVER: server},
            cores=0.0 if self._spec.plan.oversubscribed else planned.share,
        )
        container = replace(container, group=0)
        return swarm_executor.create(self._manager, container, at)

    def _furnish(self, container: Container) -> None:
        """Send a device its shard, and what else it reads: checked by hash, in pieces."""
        at = self._at[container.part]
        planned = self._devices[container.part].planned
        update: Any = at.engine.api
        update.update_container(at.id, mem_limit=planned.memory, memswap_limit=planned.memory)
        sent = agent_configs.sent(self._spec, container.part)
        files: dict[str, bytes | Path] = {Path(path).name: source for path, source in sent.items()}
        disk, client = Path(agent_configs.DISK).name, agent_configs.CLIENT_USER
        executor.put(at.engine, at.id, _FILES, files, folders={disk: client})

    def _isolate(self, node: str) -> None:
        """Isolate the devices of a node from each other."""
        engine = self._doors.engines[node]
        network = short(name_of(self._run, "data"))
        ids = {self._at[name].id for name in self._on(node)}
        found = executor.addresses(engine, network)
        endpoints = {key: each for key, each in found.items() if key in ids}
        executor.isolate(engine, self._images.agent, self._run, network, endpoints, here=False)

    def _on(self, node: str) -> list[str]:
        return [name for name in self._devices if self._spec.plan.placement[name] == node]

    def _start_routers(self, nodes: Sequence[str]) -> dict[str, str]:
        """Start a router on each node, which waits for what it has to know of its devices; return its
        address there, which no name service of such a network has a name for."""
        router = self._launch.router
        if router is None:
            raise HostError("a run of many hosts has routers")
        made = {}
        for number, node in enumerate(nodes):
            part = f"{ROUTER}.{number}"
            own = replace(
                router,
                part=part,
                name=name_of(self._run, part),
                labels={**router.labels, PART_LABEL: part},
                group=0,
                command=("sh", "-c", _WHEN_FURNISHED, "sh", *router.command),
            )
            volume = Volume(short(name_of(self._run, f"{part}-files")), _FILES)
            at = Placed(nodes=(f"node.id == {node}",), volumes=[volume])
            made[swarm_executor.create(self._manager, own, at)] = part
            self._routers[node] = part
        for service, found in self._running(dict.fromkeys(made, 1), made).items():
            self._at[made[service]] = self._located(found[0])
        return {node: self._addresses(node)[self._at[part].id] for node, part in self._routers.items()}

    def _furnish_routers(
        self, accounts: Mapping[str, brokers.Account], places: agent_configs.Places, certificate: str
    ) -> None:
        for node, part in self._routers.items():
            login = accounts[router_user(node)].at(*places.router, certificate)
            found = self._addresses(node)
            addresses = {name: found[self._at[name].id] for name in self._on(node)}
            config = agent_configs.router(self._spec, login, places, addresses, several=True)
            file = self._directory.config(part)
            dump(config, file)
            name = Path(agent_configs.ROUTER_CONFIG).name
            files: dict[str, bytes | Path] = {name: file, _FURNISHED: b""}
            executor.put(self._at[part].engine, self._at[part].id, _FILES, files)

    def _addresses(self, node: str) -> dict[str, str]:
        """On the bridge of `node`, by container."""
        found = executor.addresses(self._doors.engines[node], short(name_of(self._run, "data")))
        return {container: address for container, (_, address) in found.items()}

    def _await_clocks(self, nodes: Sequence[str], gates: Mapping[str, str]) -> None:
        """Until each node has an estimate of this one's clock; this one's own is exact."""
        exact = {"at": 0, "offset": 0, "drift": 0.0, "uncertainty": 0}
        file = {agent_configs.CLOCK: json.dumps(exact).encode()}
        executor.put(self._manager, gates[self._doors.here], agent_configs.CONTROL_FOLDER, file)
        deadline = time.monotonic() + _GATE_TIMEOUT_SECONDS
        for node in nodes:
            while self._clock(node, gates[node]) is None:
                if time.monotonic() > deadline:
                    raise HostError(
                        f"the clock of {self._names[node]} cannot be compared with this host's"
                    )
                time.sleep(0.1)

    def _clock(self, node: str, gate: str) -> dict[str, Any] | None:
        """The estimate that a node's gate has of this node's clock."""
        path = f"{agent_configs.CONTROL_FOLDER}/{agent_configs.CLOCK}"
        text = executor.read_file(self._doors.engines[node], gate, path)
        return None if text is None else dict(json.loads(text))

    def limit(self, device: str) -> None:
        """Put `device` under its CPU quota; one that has ended meanwhile is left alone."""
        self._limit(device, planned_limits(self._spec, self._devices[device].planned))

    def begin(self) -> None:
        pass

    def act(self, device: str, action: Action) -> list[AddressedOrder]:
        """Do an action: as in the docker runtime, by the engine of the device's node."""
        code = None
        if isinstance(action, Restart | Join):
            with as_host_error(f"look at {device}"):
                code = executor.exit_code(self._at[device].engine, self._at[device].id)
        if isinstance(action, SetCpu):
            self._check_share(device, action.share)
        changed = respond(self._spec, self._devices[device], action, code)
        if changed.limits is not None:
            self._limit(device, changed.limits)
        self._devices[device] = changed.device
        return changed.orders

    def _check_share(self, device: str, share: float) -> None:
        """Raises BadInputError where the device's node has not as many cores."""
        node = self._spec.plan.node_of(device)
        shares = {name: self._devices[name].planned.share for name in self._on(node.id)} if node else {}
        shares[device] = share / self._spec.plan.dilation
        if node and not self._spec.plan.oversubscribed and sum(shares.values()) > node.capacity + 1e-9:
            raise BadInputError(
                f"{device} cannot have {share:g} cpu: the devices on {node.name} would ask for "
                f"{sum(shares.values()):g} cores, and it has {node.capacity:g} for them"
            )

    def ended(self) -> dict[str, int]:
        alive: set[str] = set()
        for node, engine in self._doors.engines.items():
            with as_host_error(f"list the containers of {self._names[node]}"):
                found = executor.containers(engine, self._run)
            alive |= {one["Id"] for one in found if one["State"] not in ("exited", "dead")}
        with as_host_error("look at the containers"):
            for part, at in self._at.items():
                if at.id in alive or part in self._codes:
                    continue
                if (code := executor.exit_code(at.engine, at.id)) is not None:
                    self._codes[part] = code
        routers = self._routers.values()
        return {ROUTER if part in routers else part: code for part, code in self._codes.items()}

    def restart(self, part: str) -> int | None:
        raise HostError(
            f"the {part} has ended, and where devices are on many hosts it is not started again: start "
            "a new run. Its log says why."
        )

    def telemetry(self) -> list[Telemetry]:
        """Nothing: the devices send their own."""
        return []

    def server_pids(self) -> list[int]:
        if not self._server_pids:
            with as_host_error("look at the servers"):
                here = [at for part, at in self._at.items() if part not in self._devices]
                pids = [executor.pid(at.engine, at.id) for at in here if at.engine is self._manager]
            self._server_pids = [pid for pid in pids if pid]
        return self._server_pids

    def device_cpu_seconds(self) -> float | None:
        """Of the devices on this node; those that have ended have their own in their last reading."""
        for name in self._on(self._doors.here):
            at = self._at[name]
            if name not in self._pids:
                with as_host_error(f"look at {name}"):
                    self._pids[name] = executor.pid(at.engine, at.id)
            if (used := cgroups.cpu_seconds_of(self._pids[name])) is not None:
                self._used[name] = used
        here = self._on(self._doors.here)
        return math.fsum(self._used.values()) if self._used or not here else None

    def clocks(self) -> dict[str, float]:
        found = {}
        for node, gate in self._gates.items():
            if node != self._doors.here:
                with as_host_error(f"read the clock of {self._names[node]}"):
                    estimate = self._clock(node, gate)
                found[self._names[node]] = (
                    math.inf if estimate is None else estimate["uncertainty"] / 1e9
                )
        return found

    def loads(self, at: float, used: Mapping[str, float]) -> dict[str, HostSample]:
        found = {}
        for node, gate in self._gates.items():
            planned = next(one for one in self._spec.plan.nodes if one.id == node)
            if planned.here:
                continue
            path = f"{agent_configs.CONTROL_FOLDER}/{_STAT}"
            with as_host_error(f"look at the load of {planned.name}"):
                text = executor.read_file(self._doors.engines[node], gate, path)
            if text is None:
                continue
            own = math.fsum(used.get(name, 0.0) for name in self._on(node))
            self._looks[node] = cpu_times(text.decode("ascii")), own
            if node not in self._samplers:
                cpus = {*planned.infrastructure, *planned.devices}
                self._samplers[node] = Sampler(
                    cpus,
                    set(planned.devices),
                    own=lambda node=node: self._looks[node][1],  # type: ignore[misc]
                    read=lambda node=node: self._looks[node][0],  # type: ignore[misc]
                    dilation=self._spec.plan.dilation,
                )
            sample = self._samplers[node].sample(at, 0.0)
            if sample is not None:
                found[planned.name] = sample
        return found

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._folder_fd is not None:
            os.close(self._folder_fd)
            self._folder_fd = None
        swarm_removal.remove(self._manager, self._doors, self._run, self._directory)

    def _limit(self, device: str, limits: CpuLimits) -> None:
        with as_host_error(f"limit the CPU of {device}"):
            executor.limit(self._at[device].engine, self._at[device].id, limits)
