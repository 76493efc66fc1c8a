"""The `docker` runtime: one engine for what `testbed.runtimes.docker.specifications` describes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace

import docker

from agents.config import BrokerAccess
from agents.device_actions import DeviceAction
from agents.mqtt.topics import CONTROLLER, ROUTER
from agents.node import mps
from agents.wire.messages import AddressedOrder
from testbed import broker as brokers
from testbed.broker import BROKER
from testbed.broker.access import new_identity
from testbed.errors import HostError
from testbed.host import docker_engine, kernel
from testbed.host.docker_engine import is_available
from testbed.host.gpus import MPS
from testbed.images import Images
from testbed.plan import agent_configs
from testbed.plan.agent_configs import MQTT_PORT, RunSpec
from testbed.rundir.directory import RunDirectory
from testbed.runtimes import LiveRun
from testbed.runtimes.docker import container_files, executor
from testbed.runtimes.docker.container_actions import ContainerDevices
from testbed.runtimes.docker.executor import as_host_error
from testbed.runtimes.docker.meter import ContainerRef, DockerMeter, RunningContainers
from testbed.runtimes.docker.specifications import (
    DIRECTORY_LABEL,
    RUN_LABEL,
    Container,
    group_weights,
    launch,
    object_name,
)
from testbed.view import View

_MPS_TIMEOUT_SECONDS = 30.0
"""Maximum seconds to wait for an answer of MPS's daemon."""

__all__ = ["DockerRuntime", "check_host", "is_available", "launcher", "live_runs", "logs", "take_down"]


def check_host() -> None:
    """Raise HostError unless a Docker engine answers and can be used for runs."""
    with docker_engine.connect_fit():
        pass


@contextmanager
def launcher(spec: RunSpec, view: View) -> Iterator[DockerRuntime]:
    """Build missing images first. Raises HostError."""
    with docker_engine.connect_fit() as client:
        built = container_files.ensure_images(client, spec, view.progress)
        spec.directory.write_manifest(images=asdict(built))
        runtime = DockerRuntime(client, built, spec)
        spec.directory.write_manifest(congestion_control=runtime.congestion_control)
        if (why := runtime.meter.gpus.lack) is not None:
            view.progress(f"The devices' GPU use cannot be measured: {why}")
        yield runtime


def live_runs() -> list[LiveRun]:
    """Runs that have a container or network on this engine, except those of a Swarm."""
    with docker_engine.connect_if_present() as client:
        if client is None:
            return []
        running: Counter[str] = Counter()
        directories: dict[str, str | None] = {}
        with as_host_error("list the containers"):
            for thing in [*executor.networks(client), *executor.containers(client)]:
                if not executor.belongs_to_swarm(thing):
                    labels = thing["Labels"]
                    directories.setdefault(labels[RUN_LABEL], labels.get(DIRECTORY_LABEL))
                    running[labels[RUN_LABEL]] += thing.get("State") == "running"
    return [
        LiveRun.from_labels(run, "docker", running[run], folder) for run, folder in directories.items()
    ]


def take_down(run: str, directory: RunDirectory | None) -> bool:
    """Save logs to `directory`. Return False if no engine answers. Raises HostError if something may be
    left."""
    with docker_engine.connect_if_present() as client:
        if client is not None:
            executor.remove(client, run, directory)
        return client is not None


def logs(run: str, tail: int) -> dict[str, list[str]]:
    """Last `tail` lines, by component; empty if no engine answers."""
    with docker_engine.connect_if_present() as client:
        return {} if client is None else executor.logs(client, run, tail)


class DockerRuntime:
    """Containers and networks are created in threads, which Ctrl-C does not interrupt: the engine would
    continue with an interrupted request, and `stop` would look for the container before it exists."""

    def __init__(self, client: docker.DockerClient, images: Images, spec: RunSpec) -> None:
        self._engine = client
        self._spec = spec
        self._directory = spec.directory
        self._owner = container_files.owner()
        self.congestion_control = kernel.congestion_control()
        """TCP congestion control of all containers; None for the host's setting."""
        self._launch = launch(
            spec,
            images,
            owner=self._owner,
            congestion_control=self.congestion_control,
            cgroup_driver=executor.cgroup_driver(client),
        )
        self._containers = RunningContainers()
        self._devices = ContainerDevices(spec, self._containers.exit_code, self._containers.limit)
        self.meter = DockerMeter(spec, self._containers)
        self._pool = ThreadPoolExecutor(executor.PARALLEL)

    def start(self) -> BrokerAccess:
        run, what = self._directory.run, self._launch
        topology, server = self._spec.topology, self._spec.plan.server
        accounts = brokers.accounts(run, topology.device_names, peers=topology.has_exchange)
        tls = topology.broker.tls
        names = (agent_configs.SERVER,) if server is None else (agent_configs.SERVER, server[0])
        identity = new_identity(*names) if tls or server is not None else None
        self._places = agent_configs.container_places(identity.certificate if identity and tls else None)
        if identity is not None and server is not None:
            real = agent_configs.real_places(server, identity.certificate)
            self._places = replace(self._places, real=real)
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
                if number == 1:  # aggregator and a device: both control groups exist
                    self._set_weights(is_started=False)
            found = executor.addresses(self._engine, object_name(run, "data"))
            isolated = self._pool.submit(self._isolate, found)
            if what.router is not None:
                self._pool.submit(self._start_router, what.router, accounts[ROUTER], found).result()
            isolated.result()
        return accounts[CONTROLLER].at("127.0.0.1", port)

    def limit(self, device: str) -> None:
        """No effect on a device that has ended."""
        self._devices.limit(device)

    def measure_again(self, devices: Sequence[str]) -> list[AddressedOrder]:
        return self._devices.measure_again(devices)

    def begin(self) -> None:
        self._devices.begin()
        self._set_weights(is_started=True)

    def _set_weights(self, *, is_started: bool) -> None:
        """If weights cannot be set, other work on the host can take CPU time from devices, which the
        verdict then reports."""
        weights = group_weights(self._spec.plan, is_started=is_started)
        image = self._launch.broker.image
        why = executor.set_group_weights(self._engine, image, self._directory.run, weights)
        self._directory.write_manifest(cpu_weights=weights if why is None else {"refused": why})

    def act(self, device: str, action: DeviceAction) -> list[AddressedOrder]:
        """The engine sets CPU limits, the router delay and loss of a link, unless the devices use netem;
        the device's init does all else."""
        return self._devices.act(device, action)

    def exit_codes(self) -> dict[str, int]:
        with as_host_error("list the containers"):
            listed = executor.containers(self._engine, self._directory.run)
        self._containers.update_states(listed)
        return dict(self._containers.codes)

    def restart(self, component: str) -> int | None:
        with as_host_error(f"start the {component} again"):
            container = self._containers[component].id
            self._pool.submit(self._engine.api.start, container).result()
            self._containers.forget_exit(component)
            if component != BROKER:
                return None
            return executor.published_port(self._engine, container, MQTT_PORT)

    def stop(self) -> None:
        self.meter.gpus.close()
        self._pool.shutdown(cancel_futures=True)
        executor.remove(self._engine, self._directory.run, self._directory)

    def _start(self, container: Container) -> str:
        started = executor.start(self._engine, container)
        self._containers[container.component] = ContainerRef(self._engine, started)
        return started

    def _start_broker(self) -> int:
        """Create the networks, too. Return the broker's port on 127.0.0.1."""
        for network in self._launch.networks:
            executor.create_network(self._engine, network)
        port = executor.published_port(self._engine, self._start(self._launch.broker), MQTT_PORT)
        if port is None:
            log = executor.logs(self._engine, self._directory.run, tail=10).get(BROKER, [])
            raise HostError("\n".join(["the broker ended right after its start:", *log]))
        return port

    def _start_mps(self, container: Container) -> None:
        """Wait until its daemon answers: a client that does not find it would use the whole GPU. Raises
        HostError."""
        identity = self._pool.submit(self._start, container).result()
        deadline = time.monotonic() + _MPS_TIMEOUT_SECONDS
        while not (self._directory.mps / mps.READY).exists():
            code = executor.exit_code(self._engine, identity)
            if code is not None or time.monotonic() > deadline:
                reason = "does not answer" if code is None else f"ended with exit code {code}"
                log = executor.logs(self._engine, self._directory.run, tail=10).get(MPS, [])
                raise HostError("\n".join([f"NVIDIA's MPS {reason}:", *log]))
            time.sleep(0.1)

    def _isolate(self, found: Mapping[str, tuple[str, str]]) -> None:
        """`found`: MAC and IPv4 address on the data network, by container id."""
        devices = {self._containers[name].id for name in self._devices.states}
        endpoints = {key: each for key, each in found.items() if key in devices}
        network = object_name(self._directory.run, "data")
        image = self._launch.aggregator.image
        executor.isolate(self._engine, image, self._directory.run, network, endpoints)
        (self._directory.control / agent_configs.ISOLATED).touch()  # the inits now start their clients

    def _start_router(
        self, router: Container, account: brokers.Account, found: Mapping[str, tuple[str, str]]
    ) -> None:
        """Start the router. `found` has the MAC and IPv4 address of each container on the data network,
        by container id. The router needs the devices' addresses, so the devices must run already."""
        ids = {name: self._containers[name].id for name in self._devices.states}
        addresses = {name: found[one][1] for name, one in ids.items() if one in found}
        agent_configs.write_router(self._spec, account, self._places, addresses)
        container_files.give_to_containers(self._owner, self._directory.config(ROUTER))
        self._start(router)
