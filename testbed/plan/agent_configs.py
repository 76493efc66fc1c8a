"""The agents' configuration files of a run, made from its topology and plan."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agents import pipeline
from agents.config import (
    FIT_KEEPALIVE,
    KEEPALIVE,
    AggregatorConfig,
    BrokerAccess,
    ClientConfig,
    ClientSetup,
    DeviceConfig,
    InitialModel,
    Named,
    RouterConfig,
    dump,
    silence_timeout,
)
from agents.links import probe_server
from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.rules.interface import ClientSide
from agents.tasks.interface import Task
from agents.timing import durations
from testbed.broker import SOCKET, Account, BrokerLimits, init_user
from testbed.host.cpusets import cpu_numbers
from testbed.plan import model_check, planned_actions, rounds
from testbed.plan.planned import Plan, PlannedDevice
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology, seeds

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Where a container finds its files.
AGGREGATOR_CONFIG = "/testbed/aggregator.json"
DEVICE_CONFIG = "/testbed/device.json"
ROUTER_CONFIG = "/testbed/router.json"
CLIENT_CONFIG = "/testbed/client.json"
RUN_DIRECTORY = "/testbed/run"
SHARD = "/testbed/shard.safetensors"
TEST_SET = "/testbed/test.safetensors"
CONTROL_FOLDER = "/testbed/control"
"""Of the broker's Unix socket, for the devices' inits."""
ISOLATED = "isolated"
"""Name of the file in that folder that says that the devices are isolated from each other."""
CLOCK = "clock.json"
"""Name of the file in that folder with the estimate of the aggregator's clock, where it is another's."""
CODE = "/opt/code"
"""Own code, in the agents' image."""
DEVICE_SET = "/testbed/devices.safetensors"
START = "/testbed/start.safetensors"
MPS_FOLDER = "/testbed/mps"
"""Of MPS's pipes, where devices share a GPU."""
DISK = "/testbed/disk"
"""A client's own folder."""
ROUTED_BROKER = "mqtt"
"""The broker's name for the router, which is itself the devices' `server`."""
IMPAIRMENTS = ("rtt", "jitter", "loss")
"""Fields of a link that are the router's, unless netem makes them; the rates are the device's own."""
CLIENT_USER = 10001
"""User and group id of the client in its container: an ordinary user without capabilities."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """All that a runtime needs to know about a run."""

    directory: RunDirectory
    topology: Topology
    plan: Plan
    samples: Mapping[str, int]
    """Training samples of each client."""
    verbose: bool = False
    """Have clients log each round."""
    remarks: Sequence[str] = ()
    """Sentences for a note of the run's records each."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the processes of a runtime find the broker and their files."""

    clients: tuple[str, int]
    """Host and port of the broker for the clients."""
    aggregator: tuple[str, int]
    """The same for the aggregator."""
    router: tuple[str, int]
    """The same for the router."""
    inits: tuple[str, int] = ("", 0)
    """Path of its Unix socket for the devices' inits, where there are any, and any port."""
    certificate: str | None = None
    """The broker's, as PEM, for the clients; None: they use no TLS."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Port to the broker through a device's link, by device; none without a relay."""
    clock: str | None = None
    """Path of the estimate of the aggregator's clock, where that is another host's."""
    mounted: bool = False
    """Whether files are mounted in containers; else processes find them where they are."""

    def client_broker(self, client: str) -> tuple[str, int]:
        """Host and port where `client` finds the broker."""
        host, port = self.clients
        return host, self.ports.get(client, port)

    def path(self, on_host: Path, in_container: str) -> str:
        """Where a process finds a file or folder."""
        return in_container if self.mounted else str(on_host)


# Not "broker": Docker answers with a container's host name too, on any network that it is on.
SERVER, CONTROL = "server", "control"
"""The broker's host names on the data and on the control network."""
MQTT_PORT, TLS_PORT = 1883, 8883


def in_containers(certificate: str | None) -> Places:
    """Places of the `docker` runtime; `certificate` is the broker's, None without TLS."""
    return Places(
        clients=(SERVER, MQTT_PORT if certificate is None else TLS_PORT),
        aggregator=(SERVER, MQTT_PORT),
        router=(CONTROL, MQTT_PORT),
        inits=(f"{CONTROL_FOLDER}/{SOCKET}", MQTT_PORT),
        certificate=certificate,
        mounted=True,
    )


def sent(spec: RunSpec, device: str) -> dict[str, Path]:
    """The files that are sent to a device on another host, by where it finds them."""
    weights = start_of(spec.topology, spec.directory).weights
    start = {} if weights is None else {START: Path(weights)}
    return {SHARD: spec.directory.shard(device), **start}


def init_name(device: str) -> str:
    """Name of the configuration of a device's init, beside that of its client."""
    return f"{device}.init"


def broker_limits(topology: Topology) -> BrokerLimits:
    """Limits of the run's broker."""
    devices, secure = len(topology.device_names), topology.secure
    beside, hostile = 0.0, 1
    if secure is not None:  # shares for each client, of every update that may be under way
        beside = (secure.updates + devices) / (secure.needed - secure.colluding)
        hostile = max(1, secure.colluding)
    # Numbers in buffers may have 8 bytes.
    numbers = model_check.check(topology) + model_check.buffers(topology)
    return BrokerLimits.of(numbers, devices, beside, hostile)


def keeps_models(topology: Topology, plan: Plan) -> bool:
    """Whether models come back encoded, as the difference to the one that was sent."""
    kind = topology.rule.build().client_side.kind
    encoded = any(pipeline.STEPS[step.name].field is not None for step in update_steps(topology, plan))
    return encoded and kind in ("model", "residual")  # the first residual is a model


def update_steps(topology: Topology, plan: Plan) -> list[Named]:
    """What is done to updates in this run: one of each step that any device does."""
    own = {step.name: step for device in plan.devices for step in device.steps}
    return pipeline.sort_steps([*own.values(), *topology.update_steps])


def start_of(topology: Topology, directory: RunDirectory) -> InitialModel:
    """What the processes of the run in `directory` build its module from, by the host's paths."""
    weights = str(directory.start) if directory.start.is_file() else None
    return InitialModel(weights, topology.task.frozen)


def importance(topology: Topology, samples: Mapping[str, int]) -> dict[str, float]:
    """p_i of every client; sums to 1: uniform, 1/N, or by samples, n_i/Σn."""
    if topology.task.importance == "uniform":
        return {client: 1 / len(samples) for client in samples}
    total = sum(samples.values())
    return {client: n / total for client, n in samples.items()}


def write(spec: RunSpec, accounts: Mapping[str, Account], places: Places) -> None:
    """Write the configuration of the aggregator and of every client and device init.

    The files carry passwords; they lie in `work/`, which is closed to other users.
    """
    file = spec.directory.config
    spec.directory.state.mkdir(mode=0o700, exist_ok=True)
    spec.directory.aggregator_state.mkdir(exist_ok=True)
    for device in spec.plan.devices:
        spec.directory.disk(device.name).mkdir(parents=True, exist_ok=True)
    topology, parameters = spec.topology, model_check.check(spec.topology)
    expected = rounds.expected(topology, spec.plan, parameters, spec.samples)
    slowest, size = planned_actions.slowest(topology, spec.plan), 4 * parameters
    aggregator = _aggregator(spec, accounts[AGGREGATOR], places, expected)
    silent = {name: longest_silence(size, rate) for name, rate in slowest.items()}
    dump(replace(aggregator, silence=silent), file(AGGREGATOR))
    absent, common = spec.plan.absent, topology.update_steps  # once, as they may name every client
    buffers = model_check.buffers(topology)
    for device in spec.plan.devices:
        setup = client_setup(spec, device, common)
        client = _client(spec, device, setup, accounts[device.name], places, parameters - buffers)
        dump(replace(client, buffers=buffers), file(device.name))
        account, present = accounts[init_user(device.name)], device.name not in absent
        dump(_device(spec, device, account, places, present=present), file(init_name(device.name)))


def write_router(spec: RunSpec, account: Account, places: Places, addresses: Mapping[str, str]) -> None:
    """Write the router's configuration, once the devices' `addresses` are known."""
    dump(router(spec, account.at(*places.router), places, addresses), spec.directory.config(ROUTER))


def router(
    spec: RunSpec,
    login: BrokerAccess,
    places: Places,
    addresses: Mapping[str, str],
    node: str | None = None,
) -> RouterConfig:
    """The configuration of the router of the devices with `addresses`: those of `node`, where there are
    several, each with random numbers of its own."""
    seed = spec.topology.seed
    devices = [device for device in spec.plan.devices if device.name in addresses]
    links = {d.name: d.host_link for d in devices if d.host_link is not None}
    return RouterConfig(
        run=spec.directory.run,
        broker=login,
        targets={ROUTED_BROKER: places.clients[1], AGGREGATOR: probe_server.PORT},
        addresses=addresses,
        links={
            name: {field: getattr(link, field) for field in IMPAIRMENTS}
            for name, link in links.items()
            if not spec.plan.netem
        },
        access={d.name: d.host_access for d in devices if d.host_access is not None},
        seed=seed if node is None else int(seeds.generator(seed, node, "router").integers(2**62)),
        several=node is not None,
    )


def longest_silence(model: int, rate: float) -> float:
    """Return the seconds within which a client that gets and sends `model` bytes at `rate` bits per
    second answers a request, which waits behind the models under way: no less than a broker waits for
    any client."""
    return max(silence_timeout(), 6 * 8 * model / rate)


def keepalive(task: Task) -> float:
    """Return the keep-alive of the clients that train `task`, in seconds of device time."""
    return FIT_KEEPALIVE if task.fits else KEEPALIVE


def _aggregator(
    spec: RunSpec, account: Account, places: Places, expected: Mapping[str, rounds.Round]
) -> AggregatorConfig:
    topology, most = spec.topology, spec.topology.evaluate.devices
    return AggregatorConfig(
        run=spec.directory.run,
        broker=account.at(*places.aggregator),
        task=topology.task.named,
        rule=topology.rule.named,
        clients=importance(topology, spec.samples),
        samples=spec.samples,
        evaluate_every=topology.evaluate.every,
        stop=topology.stop.build(),
        seed=topology.seed,
        test_set=places.path(spec.directory.test_set, TEST_SET),
        run_directory=places.path(spec.directory.path, RUN_DIRECTORY),
        threads=len(cpu_numbers(spec.plan.infrastructure_cpus)),
        start=_start(spec, places),
        segment=secrets.token_hex(4),
        durability=topology.durability,
        bounds=topology.bounds.build(),
        keeps_models=keeps_models(topology, spec.plan),
        patience=rounds.patience(spec.plan, expected),
        dilation=spec.plan.dilation,
        patient=planned_actions.has_steps(topology, spec.plan),
        cpus=sorted(cpu_numbers(spec.plan.infrastructure_cpus)),
        evaluation_cpus=sorted(cpu_numbers(spec.plan.evaluation_cpus)),
        evaluate_classes=topology.evaluate.classes,
        device_set=None if most is None else places.path(spec.directory.device_set, DEVICE_SET),
        device_samples={} if most is None else {name: min(n, most) for name, n in spec.samples.items()},
        evaluate_after=topology.evaluate.when == "after",
        code=_code(spec, places),
        steps=update_steps(topology, spec.plan),
    )


def client_setup(spec: RunSpec, device: PlannedDevice, common: Sequence[Named]) -> ClientSetup:
    """What the client of `device` does, in any runtime; `common` is what all do to their updates."""
    return ClientSetup(
        run=spec.directory.run,
        client=device.name,
        seed=spec.topology.seed,
        rule=spec.topology.rule.named,
        local=device.local,
        steps=pipeline.sort_steps([*device.steps, *common]),
        think=device.think,
        timing=device.timing,
        speed=device.speed,
    )


def _client(
    spec: RunSpec,
    device: PlannedDevice,
    setup: ClientSetup,
    account: Account,
    places: Places,
    parameters: int,
) -> ClientConfig:
    disk = places.path(spec.directory.disk(device.name), DISK)
    side: ClientSide = spec.topology.rule.build().client_side
    return ClientConfig(
        setup=setup,
        broker=account.at(*places.client_broker(device.name), places.certificate),
        task=spec.topology.task.named,
        shard=places.path(spec.directory.shard(device.name), SHARD),
        threads=device.threads,
        parameters=parameters,
        start=_start(spec, places),
        dilation=device.dilation,
        memory=f"{disk}/memory.safetensors" if side.kind == "residual" else None,
        outbox=disk,
        begun=f"{disk}/begun" if any(map(durations.vary, (device.timing, device.think))) else None,
        timeout_s=spec.topology.start.timeout,
        code=_code(spec, places),
        clock=places.clock,
        device=spec.topology.runtime.device if device.gpu is None else "cuda",
        gpu_memory=None if device.gpu is None else device.gpu.memory,
        keepalive=keepalive(spec.topology.task.build()),
        verbose=spec.verbose,
    )


def _code(spec: RunSpec, places: Places) -> str | None:
    """Where a process imports own code from."""
    return None if spec.topology.own_code is None else places.path(spec.directory.code, CODE)


def _start(spec: RunSpec, places: Places) -> InitialModel:
    start = start_of(spec.topology, spec.directory)
    weights = None if start.weights is None else places.path(Path(start.weights), START)
    return replace(start, weights=weights)


def _device(
    spec: RunSpec, device: PlannedDevice, account: Account, places: Places, *, present: bool
) -> DeviceConfig:
    return DeviceConfig(
        run=spec.directory.run,
        device=device.name,
        broker=account.at(*places.inits),
        data_address=places.clients[0],
        link=device.host_link,
        netem=spec.plan.netem,
        probed=device.host_end_to_end,
        telemetry_every=device.dilation,
        shared=device.shared,
        present=present,
        timeout_s=spec.topology.start.timeout,
        client_config=CLIENT_CONFIG,
        isolated=f"{CONTROL_FOLDER}/{ISOLATED}",
        hashes=_hashes(spec, device.name) if spec.plan.traits.many_hosts else {},
        clock=places.clock,
        user=CLIENT_USER,
    )


def _hashes(spec: RunSpec, device: str) -> dict[str, str]:
    found = {}
    for path, source in sent(spec, device).items():
        with source.open("rb") as file:
            found[path] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
