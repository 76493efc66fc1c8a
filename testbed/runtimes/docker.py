"""The `docker` runtime: one container per device, one each for broker and aggregator, and networks.

    data network     (internal)  broker, aggregator, clients: FL's own traffic, over the devices' links
    control network  (no NAT)    broker, device inits, and the controller through 127.0.0.1

Where devices have links, a router stands between them and the broker, which then has its alias on the
data network; broker and aggregator are on a third, behind it:

    server network   (internal)  broker, aggregator, router

A device's container runs its init as root with the few capabilities that shaping and dropping privileges
need, in its own namespaces; the client in it is an ordinary user. Everything is labelled with the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import docker
from docker.errors import APIError, NotFound
from docker.types import LogConfig, Mount

from agents.config import Broker
from agents.device_actions import (
    Action,
    Crash,
    Disconnect,
    Join,
    Leave,
    Pause,
    Reconnect,
    Restart,
    Resume,
    SetCpu,
    SetLink,
    name_of,
)
from agents.topics import AGGREGATOR, CONTROLLER, ROUTER
from testbed import broker as brokers
from testbed import configs, kernel
from testbed.broker import BROKER
from testbed.configs import IMPAIRMENTS
from testbed.director import Order
from testbed.engine import ERRORS
from testbed.errors import BadInputError, HostError
from testbed.images import Images
from testbed.plan import PlannedDevice, dilated
from testbed.rundir import RunDirectory

RUN_LABEL = "testbed.run"
PART_LABEL = "testbed.part"
DIRECTORY_LABEL = "testbed.directory"

_DATA_ALIAS, MQTT_PORT = configs.IN_CONTAINERS.data
_CONTROL_ALIAS, _ = configs.IN_CONTAINERS.control
_PIDS = 128
_PARALLEL = 2
"""Containers that are started, or removed, at once. More are hardly faster, as the engine does one thing
after the other, and now and then make it miscount what is on a network, which it then keeps until it is
restarted (moby issue 42119)."""
_KILLED = 137
"""Exit code of what somebody has removed."""
_LEAST_WEIGHT, _MOST_WEIGHT = 2, 262_144
"""The kernel's bounds of a container's weight against others."""
_LETTING_GO = 3.0
"""Seconds after which a network is given up on that the engine believes to be in use."""
_REMOVAL = 20.0
"""Seconds that the engine has to remove a run's containers."""


class DockerRuntime:
    """Implements `testbed.runtimes.Runtime`.

    Things are made in threads, which Ctrl-C does not interrupt: the engine would go on with a request
    that was broken off, and `stop` would look for its container too early.
    """

    def __init__(self, engine: docker.DockerClient, images: Images, spec: configs.RunSpec) -> None:
        self._engine = engine
        self._images = images
        self._spec = spec
        self._directory = spec.directory
        self._owner = os.getuid() or configs.CLIENT_USER
        self._devices = {device.name: device for device in spec.plan.devices}
        self._containers: dict[str, str] = {}
        self._away = set(spec.absent)
        """Devices whose client is not there, or was told to end, and may start."""
        self._codes: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(_PARALLEL)
        self.congestion_control = kernel.congestion_control()
        """Of all containers' TCP; None: the host's."""

    def start(self) -> Broker:
        accounts = brokers.accounts(self._directory.run, self._devices)
        configs.write(self._spec, accounts, configs.IN_CONTAINERS)
        self._open_files()
        networks = _Networks.of(self._directory.run)
        with _as_host_error("start the containers"):
            port = self._pool.submit(self._start_broker, accounts, networks).result()
            parts = [self._pool.submit(self._start_aggregator, networks)]
            parts += [self._pool.submit(self._start_device, d, networks) for d in self._devices.values()]
            for part in parts:
                part.result()
            if self._spec.routed:
                self._pool.submit(self._start_router, accounts[ROUTER], networks).result()
        return accounts[CONTROLLER].at("127.0.0.1", port)

    def limit(self, device: str) -> None:
        """Put `device` under its CPU quota; one that has ended meanwhile is left alone."""
        self._limit(self._devices[device])

    def act(self, device: str, action: Action) -> list[Order]:
        """CPU limits are the engine's, delay and loss the router's where netem does not make them, all
        else the device's init's."""
        match action:
            case SetCpu(share):
                changed = replace(self._devices[device], cpu=share)
                self._limit(changed)
                self._devices[device] = changed
                return []
            case SetLink(asked):
                changes = dilated(asked, self._spec.plan.dilation)
                impaired = {name: value or 0.0 for name, value in changes.items() if name in IMPAIRMENTS}
                rates = {name: value for name, value in changes.items() if name not in IMPAIRMENTS}
                if impaired and not self._spec.routed:
                    raise BadInputError(
                        f"{', '.join(impaired)} cannot change in this run, which has no router: no "
                        "device has a link. Give one a link in its topology, as in link: {rtt: 1ms}"
                    )
                if self._spec.netem:
                    return [(device, {"do": "set", **rates, **impaired})]
                orders: list[Order] = []
                if rates:
                    orders.append((device, {"do": "set", **rates}))
                if impaired:
                    orders.append((ROUTER, {"device": device, "link": impaired}))
                return orders
            case Crash() | Leave():
                self._away.add(device)
            case Restart() | Join():
                with _as_host_error(f"look at {device}"):
                    code = self._exit_code(self._containers[device])
                if code is not None:
                    raise BadInputError(
                        f"{device} cannot start again: its container has ended (exit code {code}) with "
                        "its client, which nobody had told to end. See its log."
                    )
                if device in self._away:  # else it is there, and stays under its quota
                    self._away.discard(device)
                    # Start-up is no part of the experiment, but must not take what others are promised.
                    self._update(device, cpu_quota=-1, cpu_shares=_LEAST_WEIGHT)
            case Pause() | Resume() | Disconnect() | Reconnect():
                pass
            case _:
                assert_never(action)
        return [(device, {"do": name_of(action)})]

    def _limit(self, planned: PlannedDevice) -> None:
        self._update(
            planned.name,
            cpu_period=planned.period,
            cpu_quota=planned.quota,
            cpu_shares=planned.weight,
            cpuset_cpus=self._spec.plan.device_cpus,
        )

    def _update(self, device: str, **limits: Any) -> None:
        container = self._containers[device]
        with _as_host_error(f"limit the CPU of {device}"):
            try:
                self._engine.api.update_container(container, **limits)
            except APIError:
                if self._exit_code(container) is None:
                    raise

    def ended(self) -> dict[str, int]:
        with _as_host_error("list the containers"):
            alive = {
                c["Id"]
                for c in _containers(self._engine, self._directory.run)
                if c["State"] not in ("exited", "dead")
            }
            for part, container in self._containers.items():
                if container in alive or part in self._codes:
                    continue
                if (code := self._exit_code(container)) is not None:
                    self._codes[part] = code
        return dict(self._codes)

    def telemetry(self) -> list[dict[str, Any]]:
        """Nothing: the devices send their own, over the control network."""
        return []

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        remove(self._engine, self._directory.run, self._directory)

    def _exit_code(self, container: str) -> int | None:
        """None while it runs."""
        try:
            state = self._engine.api.inspect_container(container)["State"]
        except NotFound:
            return _KILLED
        return None if state["Running"] else int(state["ExitCode"])

    def _open_files(self) -> None:
        """Let any user read configurations and shards: a container gets its own alone, whoever it runs
        as, and on the host `work/` is closed to others. Our umask may say otherwise."""
        for path in self._directory.work.iterdir():
            if path.is_file():
                path.chmod(0o644)

    def _labels(self, part: str) -> dict[str, str]:
        return {
            RUN_LABEL: self._directory.run,
            PART_LABEL: part,
            DIRECTORY_LABEL: str(self._directory.path),
        }

    def _create_networks(self, names: _Networks) -> None:
        create = self._engine.api.create_network
        create(names.data, driver="bridge", internal=True, labels=self._labels("data"))
        # Not internal, because an internal network cannot publish the broker's port on 127.0.0.1.
        options = {
            "com.docker.network.bridge.enable_ip_masquerade": "false",
            "com.docker.network.bridge.host_binding_ipv4": "127.0.0.1",
        }
        create(names.control, driver="bridge", options=options, labels=self._labels("control"))
        if self._spec.routed:
            create(names.server, driver="bridge", internal=True, labels=self._labels("server"))

    def _start_broker(self, accounts: Mapping[str, brokers.Account], networks: _Networks) -> int:
        """Create the networks and start the broker; return its port on 127.0.0.1."""
        self._create_networks(networks)
        folder = self._directory.work / BROKER
        brokers.write_mosquitto(folder, accounts, "0.0.0.0", MQTT_PORT, seen_at="/testbed")  # noqa: S104
        self._give_away([folder, *folder.iterdir()])
        container = self._create(
            BROKER,
            self._images.broker,
            [],
            networks=[
                (networks.control, _CONTROL_ALIAS),
                (self._behind(networks), _DATA_ALIAS, configs.ROUTED_BROKER),
            ],
            mounts=[_read_only(folder, "/testbed")],
            user=self._owner,
            ports={MQTT_PORT: ("127.0.0.1", None)},
        )
        bindings = self._engine.api.inspect_container(container)["NetworkSettings"]["Ports"]
        if not bindings:
            said = self._engine.api.logs(container, tail=10).decode("utf-8", "replace")
            raise HostError(f"the broker ended as soon as it was started:\n{said}")
        return int(bindings[f"{MQTT_PORT}/tcp"][0]["HostPort"])

    def _start_aggregator(self, networks: _Networks) -> None:
        directory = self._directory
        appended = [directory.events]
        if self._spec.topology.record == "updates":
            appended.append(directory.inputs)
        for file in appended:
            file.touch()  # what is not there cannot be mounted
        written = [*appended, directory.models]
        self._give_away(written)
        inside = Path(configs.IN_CONTAINERS.run_directory(directory))
        self._create(
            AGGREGATOR,
            self._images.agent,
            [
                *(["python3", "-m", "agents.turns"] if self._spec.routed else []),
                *("python3", "-m", "agents.aggregator.main", configs.AGGREGATOR_CONFIG),
            ],
            networks=[(self._behind(networks), AGGREGATOR)],
            mounts=[
                _read_only(directory.config(AGGREGATOR), configs.AGGREGATOR_CONFIG),
                _read_only(directory.test_set, configs.TEST_SET),
                *(_writable(path, inside / path.name) for path in written),
            ],
            user=self._owner,
        )

    def _behind(self, networks: _Networks) -> str:
        """The network that broker and aggregator are on."""
        return networks.server if self._spec.routed else networks.data

    def _start_router(self, account: brokers.Account, networks: _Networks) -> None:
        """Last of all: it has to know the devices' addresses."""
        attached = self._engine.api.inspect_network(networks.data)["Containers"]
        addresses = {
            name: attached[self._containers[name]]["IPv4Address"].partition("/")[0]
            for name in self._devices
            if self._containers[name] in attached
        }
        configs.write_router(self._spec, account, configs.IN_CONTAINERS, addresses)
        config = self._directory.config(ROUTER)
        config.chmod(0o644)  # as `_open_files` does with those that were there before
        self._create(
            ROUTER,
            self._images.agent,
            ["python3", "-m", "agents.router.main", configs.ROUTER_CONFIG],
            networks=[
                (networks.data, _DATA_ALIAS),
                (networks.server, ROUTER),
                (networks.control, ROUTER),
            ],
            mounts=[_read_only(config, configs.ROUTER_CONFIG)],
            user=0,
            cap_add=["NET_ADMIN", "NET_RAW", "SYS_NICE"],
            sysctls={"net.ipv4.ip_forward": "1"},
        )

    def _start_device(self, device: PlannedDevice, networks: _Networks) -> None:
        directory = self._directory
        memory = []
        if self._spec.remembers:
            folder = directory.memory(device.name).parent
            self._let_write(folder)
            memory = [_writable(folder, configs.MEMORY)]
        self._create(
            device.name,
            self._images.agent,
            ["python3", "-m", "agents.device.main", configs.DEVICE_CONFIG],
            networks=[(networks.data, device.name), (networks.control, device.name)],
            mounts=[
                _read_only(directory.config(configs.init_name(device.name)), configs.DEVICE_CONFIG),
                _read_only(directory.config(device.name), configs.CLIENT_CONFIG),
                _read_only(directory.shard(device.name), configs.SHARD),
                *memory,
            ],
            user=0,
            cap_add=["SETUID", "SETGID", "KILL", "NET_ADMIN"],
            sysctls={"net.ipv4.ping_group_range": "0 2147483647"},  # it measures its link by echoes
            mem_limit=device.memory,
            memswap_limit=device.memory,
            environment={name: str(device.threads) for name in configs.THREAD_VARIABLES},
        )

    def _create(
        self,
        part: str,
        image: str,
        command: list[str],
        *,
        networks: list[tuple[str, ...]],
        mounts: list[Mount],
        user: int,
        ports: dict[int | str, tuple[str, None]] | None = None,
        environment: dict[str, str] | None = None,
        sysctls: Mapping[str, str] | None = None,
        **host: Any,
    ) -> str:
        """Create and start a container with least privilege; its id.

        `networks` has the name of each network and the container's aliases on it.
        """
        api = self._engine.api
        if part in (BROKER, AGGREGATOR, ROUTER):
            host["cpuset_cpus"] = self._spec.plan.infrastructure_cpus
            host["cpu_shares"] = _MOST_WEIGHT  # on a host with one core the devices have it too
        host_config = api.create_host_config(
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            pids_limit=_PIDS,
            tmpfs={"/tmp": "size=16m,noexec,nosuid"},  # noqa: S108
            log_config=LogConfig(type="json-file", config={"max-size": "8m", "max-file": "1"}),
            mounts=mounts,
            port_bindings=ports,
            sysctls={**self._tcp(), **(sysctls or {})},
            **host,
        )
        (first, *aliases), *others = networks
        container: str = api.create_container(
            image,
            command or None,
            name=f"testbed-{self._directory.run}-{part}",
            hostname=part,
            user=f"{user}:{user}",
            labels=self._labels(part),
            environment=environment,
            ports=list(ports) if ports else None,
            host_config=host_config,
            networking_config={"EndpointsConfig": {first: api.create_endpoint_config(aliases=aliases)}},
        )["Id"]
        for network, *aliases in others:
            api.connect_container_to_network(container, network, aliases=aliases)
        api.start(container)
        self._containers[part] = container
        return container

    def _tcp(self) -> dict[str, str]:
        name = self.congestion_control
        return {} if name is None else {kernel.CONGESTION_CONTROL: name}

    def _let_write(self, folder: Path) -> None:
        """Let the client, an ordinary user in its container, write into `folder`."""
        if os.getuid() == 0:
            os.chown(folder, configs.CLIENT_USER, configs.CLIENT_USER)
        else:
            folder.chmod(0o777)  # `work/`, around it, is closed to others

    def _give_away(self, paths: Iterable[Path]) -> None:
        """Make the containers' user the owner where we are root; elsewhere it is us already."""
        if os.getuid() == 0:
            for path in paths:
                os.chown(path, self._owner, self._owner)


@dataclass(frozen=True, slots=True)
class _Networks:
    data: str
    control: str
    server: str

    @classmethod
    def of(cls, run: str) -> _Networks:
        return cls(*(f"testbed-{run}-{name}" for name in ("data", "control", "server")))


def runs(engine: docker.DockerClient) -> dict[str, dict[str, Any]]:
    """Runs that have a container or network here: run id to its directory and number of containers."""
    found: dict[str, dict[str, Any]] = {}
    with _as_host_error("list the containers"):
        networks = engine.api.networks(filters={"label": RUN_LABEL})
        for thing in [*networks, *_containers(engine, None)]:
            labels = thing["Labels"]
            entry = found.setdefault(
                labels[RUN_LABEL], {"directory": labels.get(DIRECTORY_LABEL), "running": 0}
            )
            entry["running"] += thing.get("State") == "running"
    return found


def remove(engine: docker.DockerClient, run: str, directory: RunDirectory | None = None) -> None:
    """Remove every container, network and volume of `run`, by label.

    Their logs go to `directory`, where there is one. What is gone already is no error, nor is another
    who removes the same. Raises HostError.
    """

    def end(container: dict[str, Any]) -> None:
        try:
            _if_there(partial(engine.api.remove_container, container["Id"], v=True, force=True))
        except APIError:  # on an overloaded host the engine may give up on one that is slow to die
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)

    deadline = time.monotonic() + _REMOVAL
    with _as_host_error("remove the containers"), ThreadPoolExecutor(_PARALLEL) as pool:
        if directory is not None and directory.logs.is_dir():
            list(pool.map(partial(_save_log, engine, directory), _containers(engine, run)))
        while (containers := _containers(engine, run)) and time.monotonic() < deadline:
            list(pool.map(end, containers))
        for network in engine.api.networks(filters={"label": f"{RUN_LABEL}={run}"}):
            _if_there(partial(_remove_network, engine, network["Id"]))


def _remove_network(engine: docker.DockerClient, network: str) -> None:
    """An engine that is still letting go of a container says for a moment that it is on the network."""
    deadline = time.monotonic() + _LETTING_GO
    while True:
        try:
            return engine.api.remove_network(network)
        except APIError as error:
            if error.status_code != 403 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def logs(engine: docker.DockerClient, run: str, tail: int) -> dict[str, str]:
    """The last `tail` lines that each container of `run` has said so far, by its part."""
    texts: dict[str, str] = {}

    def read(container: dict[str, Any]) -> None:
        text = engine.api.logs(container["Id"], tail=tail)
        texts[container["Labels"][PART_LABEL]] = text.decode("utf-8", "replace")

    with _as_host_error("read the logs"):
        for container in _containers(engine, run):
            _if_there(partial(read, container))
    return texts


def _containers(engine: docker.DockerClient, run: str | None) -> list[dict[str, Any]]:
    """Containers of `run` (of all runs), as the engine lists them: one request, no inspection."""
    label = RUN_LABEL if run is None else f"{RUN_LABEL}={run}"
    found: list[dict[str, Any]] = engine.api.containers(all=True, filters={"label": label})
    return found


def _save_log(engine: docker.DockerClient, directory: RunDirectory, container: dict[str, Any]) -> None:
    """Append what the container has said to its log: a resumed run has one already."""

    def save() -> None:
        text = engine.api.logs(container["Id"])
        with (directory.logs / f"{container['Labels'][PART_LABEL]}.log").open("ab") as file:
            file.write(text)

    _if_there(save)


def _if_there(action: Callable[[], object]) -> None:
    """Do `action`; that its object has gone meanwhile (or is going) is what we want anyway."""
    try:
        action()
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # removal is already in progress
            raise


def _read_only(source: Path, target: str | Path) -> Mount:
    return Mount(str(target), str(source), type="bind", read_only=True)


def _writable(source: Path, target: str | Path) -> Mount:
    return Mount(str(target), str(source), type="bind")


@contextmanager
def _as_host_error(what: str) -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise HostError(f"the Docker engine could not {what}: {error}") from error
