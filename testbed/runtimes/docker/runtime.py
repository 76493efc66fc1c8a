"""The `docker` runtime: the engine makes and changes what `…docker.specifications` describes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace

import docker
import psutil

from agents.config import Broker
from agents.device_actions import Action
from agents.mqtt.topics import AGGREGATOR, CONTROLLER, ROUTER
from agents.node import mps
from agents.wire.messages import AddressedOrder, GpuFigures, GpuSample, Telemetry
from testbed import broker as brokers
from testbed import images
from testbed.broker import BROKER
from testbed.broker.identity import new_identity
from testbed.errors import HostError
from testbed.fidelity.host_load import HostSample
from testbed.host import cgroups, docker_engine, kernel
from testbed.host.cgroups import DEVICES
from testbed.host.docker_engine import available
from testbed.host.gpus import MPS, Meter, Use
from testbed.images import Images, own
from testbed.plan import agent_configs
from testbed.plan.agent_configs import MQTT_PORT, RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import LiveRun
from testbed.runtimes.docker import container_files, executor
from testbed.runtimes.docker.container_actions import Devices
from testbed.runtimes.docker.containers import DIRECTORY_LABEL, RUN_LABEL, Container, CpuLimits
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.docker.specifications import (
    group_weights,
    launch,
    name_of,
)
from testbed.view import View

_MPS_TIMEOUT_SECONDS = 30.0
"""Within which MPS's daemon must answer."""

__all__ = ["DockerRuntime", "available", "check_host", "launcher", "live_runs", "logs", "take_down"]


def check_host() -> None:
    """See `testbed.runtimes.Emulator`."""
    with docker_engine.fit():
        pass


@contextmanager
def launcher(spec: RunSpec, view: View) -> Iterator[DockerRuntime]:
    """See `testbed.runtimes.Emulator`."""
    with docker_engine.fit() as client:
        with_gpus = any(device.gpu is not None for device in spec.plan.devices)
        built = images.ensure(client, view.progress, container_files.own_image(spec), cuda=with_gpus)
        labels = executor.helper(spec.directory.run)
        groups = own.of_groups(client, spec.topology, built, view.progress, labels)
        built = replace(built, groups=groups)
        spec.directory.write_manifest(images=asdict(built))
        runtime = DockerRuntime(client, built, spec)
        spec.directory.write_manifest(congestion_control=runtime.congestion_control)
        if (why := runtime.lack_of_meter) is not None:
            view.progress(f"What devices use of their GPUs will not be known: {why}")
        yield runtime


def live_runs() -> list[LiveRun]:
    """Runs that have a container or network here, which no Swarm has made."""
    with docker_engine.if_present() as client:
        if client is None:
            return []
        running: Counter[str] = Counter()
        directories: dict[str, str | None] = {}
        with as_host_error("list the containers"):
            for thing in [*executor.networks(client), *executor.containers(client)]:
                if not executor.is_swarms(thing):
                    labels = thing["Labels"]
                    directories.setdefault(labels[RUN_LABEL], labels.get(DIRECTORY_LABEL))
                    running[labels[RUN_LABEL]] += thing.get("State") == "running"
    return [LiveRun.labelled(run, "docker", running[run], folder) for run, folder in directories.items()]


def take_down(run: str, directory: RunDirectory | None) -> bool:
    """See `testbed.runtimes.Emulator`."""
    with docker_engine.if_present() as client:
        if client is not None:
            executor.remove(client, run, directory)
        return client is not None


def logs(run: str, tail: int) -> dict[str, list[str]]:
    """The last `tail` lines of each container of `run`, by component; none where no engine answers."""
    with docker_engine.if_present() as client:
        return {} if client is None else executor.logs(client, run, tail)


class DockerRuntime:
    """Implements `testbed.runtimes.Runtime`.

    Containers and networks are made in threads, which Ctrl-C does not interrupt: the engine would go on
    with a request that was broken off, and `stop` would look for its container too early.
    """

    def __init__(self, client: docker.DockerClient, images: Images, spec: RunSpec) -> None:
        self._engine = client
        self._spec = spec
        self._directory = spec.directory
        self._owner = container_files.owner()
        self.congestion_control = kernel.congestion_control()
        """Of all containers' TCP; None: the host's."""
        self._launch = launch(
            spec,
            images,
            owner=self._owner,
            congestion_control=self.congestion_control,
            cgroup_driver=executor.cgroup_driver(client),
        )
        self._devices = Devices(spec, self._exit_code, self._set_limits)
        self._containers: dict[str, str] = {}
        self._frozen: set[str] = set()
        """Ids of the containers that were paused when last listed."""
        """Id, by component."""
        self._codes: dict[str, int] = {}
        self._server_pids: list[int] = []
        self._inits: dict[str, int] = {}
        """Process id of each device with a GPU, as this host sees it."""
        self._meter: Meter | None = None
        self.lack_of_meter: str | None = None
        """Why the use of GPUs cannot be read, where there are any."""
        if uuids := {device.gpu.uuid for device in spec.plan.devices if device.gpu is not None}:
            try:
                self._meter = Meter(sorted(uuids))
            except OSError as error:
                self.lack_of_meter = str(error)
        self._pool = ThreadPoolExecutor(executor.PARALLEL)

    def start(self) -> Broker:
        run, what = self._directory.run, self._launch
        accounts = brokers.accounts(
            run, self._devices.states, secure=self._spec.topology.secure is not None
        )
        tls = self._spec.topology.broker.tls
        identity = new_identity(agent_configs.SERVER) if tls else None
        self._places = agent_configs.in_containers(identity.certificate if identity else None)
        agent_configs.write(self._spec, accounts, self._places)
        with_mps = self._launch.mps is not None
        container_files.prepare(self._spec, self._owner, accounts, identity, mps=with_mps)
        with as_host_error("start the containers"):
            port = self._pool.submit(self._start_broker).result()
            if what.mps is not None:
                self._start_mps(what.mps)
            components = [
                self._pool.submit(self._start, component)
                for component in (what.aggregator, *what.devices)
            ]
            for number, component in enumerate(components):
                component.result()
                if number == 1:  # both groups are there
                    self._weigh(started=False)
            found = executor.addresses(self._engine, name_of(run, "data"))
            isolated = self._pool.submit(self._isolate, found)
            if what.router is not None:
                self._pool.submit(self._start_router, what.router, accounts[ROUTER], found).result()
            isolated.result()
        return accounts[CONTROLLER].at("127.0.0.1", port)

    def limit(self, device: str) -> None:
        """Put `device` under its CPU quota; one that has ended meanwhile is left alone."""
        self._devices.limit(device)

    def begin(self) -> None:
        self._devices.begin()
        self._weigh(started=True)

    def _weigh(self, *, started: bool) -> None:
        """Set the weights of the run's control groups. Where that is not possible, other work can take
        CPU from devices, which their figures show."""
        weights = group_weights(self._spec.plan, started=started)
        image = self._launch.broker.image
        why = executor.weigh(self._engine, image, self._directory.run, weights)
        self._directory.write_manifest(cpu_weights=weights if why is None else {"refused": why})

    def act(self, device: str, action: Action) -> list[AddressedOrder]:
        """Do an action: the engine sets CPU limits, the router delay and loss where netem does not, and
        the device's init does all else."""
        return self._devices.act(device, action)

    def ended(self) -> dict[str, int]:
        with as_host_error("list the containers"):
            found = executor.containers(self._engine, self._directory.run)
            alive = {c["Id"] for c in found if c["State"] not in ("exited", "dead")}
            self._frozen = {c["Id"] for c in found if c["State"] == "paused"}
            for component, container in self._containers.items():
                if container in alive or component in self._codes:
                    continue
                if (code := executor.exit_code(self._engine, container)) is not None:
                    self._codes[component] = code
        return dict(self._codes)

    def stopped(self) -> set[str]:
        """Those that were paused when `ended` was called last."""
        return {component for component, id_ in self._containers.items() if id_ in self._frozen}

    def restart(self, component: str) -> int | None:
        with as_host_error(f"start the {component} again"):
            self._pool.submit(self._engine.api.start, self._containers[component]).result()
            self._codes.pop(component, None)
            self._server_pids.clear()
            if component != BROKER:
                return None
            return executor.published_port(self._engine, self._containers[component], MQTT_PORT)

    def telemetry(self) -> Sequence[Telemetry | GpuSample]:
        """Of GPUs alone: all else the devices send themselves, over the broker's socket. The driver
        knows the processes of containers by this host's ids, which they do not know themselves."""
        if self._meter is None:
            return []
        used, at = self._meter.read(), time.monotonic()
        names = [name for name, device in self._devices.states.items() if device.planned.gpu is not None]
        return [
            GpuSample(name, at, together([used[pid] for pid in pids if pid in used]))
            for name, pids in zip(names, map(self._pids, names), strict=True)
            if pids
        ]

    def _pids(self, device: str) -> list[int]:
        """Of the device's processes, as this host counts them; none where they have ended, or run
        elsewhere."""
        if device not in self._inits and device in self._containers:
            with as_host_error(f"look at {device}"):
                self._inits[device] = executor.pid(self._engine, self._containers[device])
        try:
            init = psutil.Process(self._inits.get(device) or -1)
            return [init.pid, *(child.pid for child in init.children(recursive=True))]
        except (psutil.NoSuchProcess, ValueError):
            return []

    def server_pids(self) -> list[int]:
        if not self._server_pids:
            servers = (BROKER, AGGREGATOR, ROUTER)
            with as_host_error("look at the servers"):
                pids = [
                    executor.pid(self._engine, self._containers[component])
                    for component in servers
                    if component in self._containers
                ]
            self._server_pids = [pid for pid in pids if pid]
        return self._server_pids

    def device_cpu_seconds(self) -> float | None:
        return cgroups.cpu_seconds(self._directory.run, DEVICES)

    def clocks(self) -> dict[str, float]:
        return {}

    def loads(self, at: float, used: Mapping[str, float]) -> dict[str, HostSample]:
        return {}

    def stop(self) -> None:
        if self._meter is not None:
            self._meter.close()
            self._meter = None
        self._pool.shutdown(cancel_futures=True)
        executor.remove(self._engine, self._directory.run, self._directory)

    def _exit_code(self, device: str) -> int | None:
        with as_host_error(f"look at {device}"):
            return executor.exit_code(self._engine, self._containers[device])

    def _set_limits(self, device: str, limits: CpuLimits) -> None:
        with as_host_error(f"limit the CPU of {device}"):
            memory = self._devices.memory(device)
            executor.limit(self._engine, self._containers[device], limits, memory)

    def _start(self, container: Container) -> str:
        self._containers[container.component] = executor.start(self._engine, container)
        return self._containers[container.component]

    def _start_broker(self) -> int:
        """Create the networks and start the broker; return its port on 127.0.0.1."""
        for network in self._launch.networks:
            executor.create_network(self._engine, network)
        port = executor.published_port(self._engine, self._start(self._launch.broker), MQTT_PORT)
        if port is None:
            log = executor.logs(self._engine, self._directory.run, tail=10).get(BROKER, [])
            raise HostError("\n".join(["the broker ended as soon as it was started:", *log]))
        return port

    def _start_mps(self, container: Container) -> None:
        """Start MPS and wait until its daemon answers: a client that does not find it would have the
        whole GPU. Raises HostError."""
        identity = self._pool.submit(self._start, container).result()
        deadline = time.monotonic() + _MPS_TIMEOUT_SECONDS
        while not (self._directory.mps / mps.READY).exists():
            code = executor.exit_code(self._engine, identity)
            if code is not None or time.monotonic() > deadline:
                what = "does not answer" if code is None else f"ended with exit code {code}"
                log = executor.logs(self._engine, self._directory.run, tail=10).get(MPS, [])
                raise HostError("\n".join([f"NVIDIA's MPS {what}:", *log]))
            time.sleep(0.1)

    def _isolate(self, found: Mapping[str, tuple[str, str]]) -> None:
        """Isolate the devices of the data network, whose MACs and addresses are `found`."""
        devices = {self._containers[name] for name in self._devices.states}
        endpoints = {key: each for key, each in found.items() if key in devices}
        network = name_of(self._directory.run, "data")
        image = self._launch.aggregator.image
        executor.isolate(self._engine, image, self._directory.run, network, endpoints)
        (self._directory.control / agent_configs.ISOLATED).touch()  # now clients start

    def _start_router(
        self, router: Container, account: brokers.Account, found: Mapping[str, tuple[str, str]]
    ) -> None:
        """Start the router last: it has to know the devices' addresses."""
        addresses = {
            name: found[self._containers[name]][1]
            for name in self._devices.states
            if self._containers[name] in found
        }
        agent_configs.write_router(self._spec, account, self._places, addresses)
        container_files.give(self._owner, self._directory.config(ROUTER))
        self._start(router)


def together(used: Sequence[Use]) -> GpuFigures:
    """What the processes of one device use."""
    memory = [one.memory for one in used if one.memory is not None]
    busy = [one.sm for one in used if one.sm is not None]
    return GpuFigures(
        memory=sum(memory) if memory or not used else None,
        sm=min(1.0, sum(busy)) if busy or not used else None,
        mps=bool(used) and all(one.mps for one in used),
    )
