"""Configuration files of a run's agents, made from the run's topology and plan."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agents import random_generators
from agents.config import (
    BEGUN,
    FIT_KEEPALIVE,
    KEEPALIVE,
    AggregatorConfig,
    BrokerAccess,
    ClientConfig,
    ClientSetup,
    DeviceConfig,
    FeatureSettings,
    InitialModel,
    Named,
    RouterConfig,
    RunSettings,
    dump,
    silence_timeout,
)
from agents.disk import files
from agents.links import probe_server
from agents.mqtt.topics import AGGREGATOR, ROUTER
from agents.pipeline.steps import STEPS, build_step, sort_steps
from agents.rules.client_half import ClientSide, elements
from agents.tasks.interface import Task
from agents.timing import durations
from agents.timing.clock_sync import LARGEST_ERROR
from agents.timing.nanoseconds import SECOND, from_seconds
from testbed.broker import SOCKET, Account, BrokerLimits, init_user
from testbed.host.cpus import cpu_numbers
from testbed.plan import model_check, planned_devices, rounds
from testbed.plan.features import PARTS
from testbed.plan.planned_devices import Plan, PlannedDevice, segment_in_host_time
from testbed.rundir.directory import RunDirectory
from testbed.topology import Topology

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Paths of files in a container.
AGGREGATOR_CONFIG = "/testbed/aggregator.json"
DEVICE_CONFIG = "/testbed/device.json"
ROUTER_CONFIG = "/testbed/router.json"
CLIENT_CONFIG = "/testbed/client.json"
RUN_DIRECTORY = "/testbed/run"
SHARD = "/testbed/shard.safetensors"
TEST_SET = "/testbed/test.safetensors"
CONTROL_FOLDER = "/testbed/control"
"""Folder with the broker's Unix socket, through which the devices' inits connect."""
ISOLATED = "isolated"
"""Name of the file in `CONTROL_FOLDER` that exists if the devices are isolated from each other."""
CLOCK = "clock.json"
"""Name of the file in `CONTROL_FOLDER` with the estimate of the aggregator's clock. The file exists only
if the aggregator runs on another host."""
CODE = "/opt/code"
"""Folder of the user's own code in the agents' image."""
DEVICE_SET = "/testbed/devices.safetensors"
START = "/testbed/start.safetensors"
MPS_FOLDER = "/testbed/mps"
DISK = "/testbed/disk"
"""Folder whose content is kept when a client restarts."""
ROUTED_BROKER = "mqtt"
"""Name of the broker in the router's configuration. Devices reach the router by the name `server`."""
IMPAIRMENTS = ("rtt", "jitter", "loss")
"""Fields of a link that the router emulates, unless devices use netem. The device itself emulates the
rates."""
CLIENT_USER = 10001
"""User and group id of the client in its container: an ordinary user without capabilities."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    directory: RunDirectory
    topology: Topology
    plan: Plan
    samples: Mapping[str, int]
    """Client -> number of training samples."""
    verbose: bool = False
    remarks: Sequence[str] = ()
    """Sentences that are recorded as notes."""


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of the broker and paths of the files, as the processes of a runtime see them."""

    clients: tuple[str, int]
    """Host and port of the broker, as for aggregator and router."""
    aggregator: tuple[str, int]
    router: tuple[str, int]
    inits: tuple[str, int] = ("", 0)
    """Path of the broker's Unix socket, and a port that is not used. The path is empty if devices have
    no init."""
    certificate: str | None = None
    """The broker's certificate as PEM; None without TLS."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Device -> port that leads to the broker through the device's link; empty without a relay."""
    clock: str | None = None
    """Path of the file with the estimate of the aggregator's clock; None if the aggregator and the
    clients use the same clock."""
    are_files_mounted: bool = False
    """Whether files are mounted in containers. Otherwise processes use the host's paths."""
    are_paths_relative: bool = False
    """Whether paths are relative to the working directory of the process, as on a real device."""
    real: Places | None = None
    """Places of the real devices of the run; None if there is none."""

    def client_broker(self, client: str) -> tuple[str, int]:
        host, port = self.clients
        return host, self.ports.get(client, port)

    @property
    def are_processes(self) -> bool:
        """Whether the agents are local processes, whose CPU shares no control group limits."""
        return not self.are_files_mounted and not self.are_paths_relative

    def path(self, on_host: Path, in_container: str) -> str:
        if self.are_paths_relative:
            return Path(in_container).name
        return in_container if self.are_files_mounted else str(on_host)


# Not "broker": Docker also resolves a container's host name, on any network that it is on.
SERVER, CONTROL = "server", "control"
"""The broker's host names on the data and on the control network."""
MQTT_PORT, TLS_PORT = 1883, 8883


def container_places(certificate: str | None) -> Places:
    """`certificate`: the broker's certificate, as PEM; None without TLS."""
    return Places(
        clients=(SERVER, MQTT_PORT if certificate is None else TLS_PORT),
        aggregator=(SERVER, MQTT_PORT),
        router=(CONTROL, MQTT_PORT),
        inits=(f"{CONTROL_FOLDER}/{SOCKET}", MQTT_PORT),
        certificate=certificate,
        are_files_mounted=True,
    )


def real_places(server: tuple[str, int], certificate: str) -> Places:
    """`server`: address and port at which real devices reach the broker. `certificate`: as PEM."""
    return Places(
        clients=server,
        aggregator=server,
        router=server,
        inits=server,
        certificate=certificate,
        clock=CLOCK,
        are_paths_relative=True,
    )


def files_to_send(spec: RunSpec, device: str) -> dict[str, Path]:
    """Return path in the container -> path on this host."""
    weights = initial_model(spec.topology, spec.directory).weights
    start = {} if weights is None else {START: Path(weights)}
    return {SHARD: spec.directory.shard(device), **start}


def init_name(device: str) -> str:
    """Name of the configuration of a device's init. That of the device's client has the device's
    name."""
    return f"{device}.init"


def broker_limits(topology: Topology) -> BrokerLimits:
    waiting = [build_step(step).waiting_models() for step in topology.update_steps]
    beside = sum(models for models, _ in waiting)
    hostile = max([1, *(clients for _, clients in waiting)])
    # Numbers in buffers may have 8 bytes.
    numbers = model_check.check(topology) + model_check.buffers(topology) + max(own_elements(topology))
    return BrokerLimits.for_run(numbers, len(topology.device_names), beside, hostile)


def own_elements(topology: Topology) -> tuple[int, int]:
    """Return the sizes of the rule's own vectors, in elements: first of all vectors sent with a model,
    then of all vectors sent with an update."""
    side: ClientSide = topology.rule.build().client_side
    if not side.model_vectors and not side.update_vectors:
        return 0, 0
    parameters = model_check.check(topology) - model_check.buffers(topology)
    return elements(side.model_vectors, parameters), elements(side.update_vectors, parameters)


def keeps_models(topology: Topology, plan: Plan) -> bool:
    """Whether the aggregator must keep the models that it sends, because the rule compares updates with
    these models, or because updates come back encoded as differences to these models."""
    rule = topology.rule.build()
    if rule.keeps_bases:
        return True
    kind = rule.client_side.kind
    encoded = any(STEPS[step.name].field is not None for step in update_steps(topology, plan))
    return encoded and kind in ("model", "residual")  # the first residual is a model


def update_steps(topology: Topology, plan: Plan) -> list[Named]:
    """Return one step of each kind that any device has."""
    own = {step.name: step for device in plan.devices for step in device.steps}
    return sort_steps([*own.values(), *topology.update_steps])


def devices_return(topology: Topology, plan: Plan) -> bool:
    """Whether devices that have gone may come back, so that a run continues without any."""
    return planned_devices.has_action_steps(topology, plan) or any(
        part.brings_back(device) for part in PARTS for device in plan.devices
    )


def initial_model(topology: Topology, directory: RunDirectory) -> InitialModel:
    """Initial state and frozen parameters. Paths are paths on the host."""
    weights = str(directory.start) if directory.start.is_file() else None
    return InitialModel(weights, topology.task.frozen)


def importance(spec: RunSpec) -> dict[str, float]:
    """Return client -> importance p_i of the client, for every client that trains. p_i is 1/N (uniform),
    or n_i/Σn (by samples), with N clients and n_i samples. The sum of all p_i is 1."""
    idle = {*spec.topology.idle_devices(spec.samples)}
    samples = {client: n for client, n in spec.samples.items() if client not in idle}
    if spec.topology.task.importance == "uniform":
        return {client: 1 / len(samples) for client in samples}
    total = sum(samples.values())
    return {client: n / total for client, n in samples.items()}


def write(spec: RunSpec, accounts: Mapping[str, Account], places: Places) -> None:
    """The files contain passwords, so they are in the folder `work/`, which other users cannot read."""
    file = spec.directory.config
    spec.directory.state.mkdir(mode=0o700, exist_ok=True)
    spec.directory.aggregator_state.mkdir(exist_ok=True)
    for device in spec.plan.devices:
        spec.directory.disk(device.name).mkdir(parents=True, exist_ok=True)
    topology, parameters = spec.topology, model_check.check(spec.topology)
    expected = rounds.estimate_rounds(topology, spec.plan, parameters, spec.samples)
    downlink, _ = own_elements(topology)
    slowest, size = planned_devices.lowest_rates(topology, spec.plan), 4 * (parameters + downlink)
    seen = {
        device.name: places if device.host is None or places.real is None else places.real
        for device in spec.plan.devices
    }
    error, patience = from_seconds(LARGEST_ERROR), rounds.patience(spec.plan, expected)
    settings = replace(
        run_settings(spec),
        silence={name: from_seconds(longest_silence(size, rate)) for name, rate in slowest.items()},
        patience={name: SECOND * seconds for name, seconds in patience.items()},
        clock_errors={name: error for name, own in seen.items() if own.clock is not None},
        evaluate_after=topology.evaluate.when == "after",
    )
    dump(_aggregator(spec, accounts[AGGREGATOR], places, settings), file(AGGREGATOR))
    absent, common = spec.plan.absent, topology.update_steps  # computed once: they may name every client
    buffers = model_check.buffers(topology)
    for index, device in enumerate(one.as_shaped for one in spec.plan.devices):
        setup = client_setup(spec, device, index, common)
        own = seen[device.name]
        client = _client(spec, device, setup, accounts[device.name], own, parameters - buffers)
        account, present = accounts[init_user(device.name)], device.name not in absent
        init = _device(spec, device, account, own, present=present)
        for part in PARTS:
            client, init = part.client(client, device), replace(init, **part.init(device))
        dump(replace(client, buffers=buffers, own_elements=downlink), file(device.name))
        dump(
            init if device.host is None else _on_real_device(init, device, own),
            file(init_name(device.name)),
        )


def write_router(spec: RunSpec, account: Account, places: Places, addresses: Mapping[str, str]) -> None:
    """`addresses`: device -> IP address."""
    dump(
        router_config(spec, account.at(*places.router), places, addresses), spec.directory.config(ROUTER)
    )


def router_config(
    spec: RunSpec,
    login: BrokerAccess,
    places: Places,
    addresses: Mapping[str, str],
    node: str | None = None,
) -> RouterConfig:
    """Make the configuration of the router of the devices in `addresses`.

    `node`: name of the router's node; None if there is only one machine. Each node has its own router,
    with its own random numbers.
    """
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
            if not spec.plan.uses_netem
        },
        segments=[segment_in_host_time(one, spec.plan.dilation) for one in spec.plan.segments.values()],
        attached={d.name: d.segment for d in devices if d.segment is not None},
        dilation=spec.plan.dilation,
        seed=seed
        if node is None
        else int(random_generators.generator(seed, node, "router").integers(2**62)),
        background_seed=seed,
        several=node is not None,
    )


def longest_silence(model: int, rate: float) -> float:
    """Return the seconds within which a client must answer a request.

    The request may wait behind several models in flight. `model`: size of a model in bytes. `rate`: rate
    of the link in bit/s. The result is at least the time that a broker waits for any client.
    """
    return max(silence_timeout(), 6 * 8 * model / rate)


def model_bytes(topology: Topology) -> int:
    """Size of a model that is sent to a client, in bytes, without its header."""
    return 4 * (model_check.check(topology) + own_elements(topology)[0])


def keepalive(task: Task) -> float:
    """Keep-alive in seconds of device time."""
    return FIT_KEEPALIVE if task.fits else KEEPALIVE


def run_settings(spec: RunSpec) -> RunSettings:
    """Return the settings of the aggregator's core that are equal in all runtimes."""
    topology = spec.topology
    return RunSettings(
        run=spec.directory.run,
        importance=importance(spec),
        idle=topology.idle_devices(spec.samples),
        samples=spec.samples,
        stop=topology.stop.build(),
        evaluate_every=from_seconds(topology.evaluate.every),
        keeps_models=keeps_models(topology, spec.plan),
        bounds=topology.bounds.build(),
        steps=update_steps(topology, spec.plan),
        patient=devices_return(topology, spec.plan),
    )


def _aggregator(
    spec: RunSpec, account: Account, places: Places, settings: RunSettings
) -> AggregatorConfig:
    topology, most = spec.topology, spec.topology.evaluate.devices
    evaluated = {} if most is None else {name: min(n, most) for name, n in spec.samples.items() if n}
    return AggregatorConfig(
        settings=settings,
        broker=account.at(*places.aggregator),
        task=topology.task.named,
        rule=topology.rule.named,
        chooser=topology.named_selection,
        seed=topology.seed,
        test_set=places.path(spec.directory.test_set, TEST_SET),
        run_directory=places.path(spec.directory.path, RUN_DIRECTORY),
        threads=len(cpu_numbers(spec.plan.infrastructure_cpus)),
        start=_initial_model(spec, places),
        leg=secrets.token_hex(4),
        durability=topology.durability,
        dilation=spec.plan.dilation,
        cpus=sorted(cpu_numbers(spec.plan.infrastructure_cpus)),
        evaluation_cpus=sorted(cpu_numbers(spec.plan.evaluation_cpus)),
        evaluate_classes=topology.evaluate.classes,
        device_set=None if most is None else places.path(spec.directory.device_set, DEVICE_SET),
        device_samples=evaluated,
        code=_code(spec, places),
    )


def client_setup(
    spec: RunSpec, device: PlannedDevice, index: int, common: Sequence[Named]
) -> ClientSetup:
    """Return the part of a client's configuration that is equal in all runtimes.

    `index`: number of the device in device order. `common`: pipeline steps that all devices have.
    """
    return ClientSetup(
        run=spec.directory.run,
        client=device.name,
        index=index,
        seed=spec.topology.seed,
        rule=spec.topology.rule.named,
        local=device.local,
        steps=sort_steps([*device.steps, *common]),
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
    remembers = side.kind == "residual" or bool(side.memory) or spec.topology.task.build().fits
    return ClientConfig(
        setup=setup,
        broker=account.at(*places.client_broker(device.name), places.certificate),
        task=spec.topology.task.named,
        shard=places.path(spec.directory.shard(device.name), SHARD),
        threads=device.threads,
        parameters=parameters,
        start=_initial_model(spec, places),
        dilation=device.dilation,
        memory=f"{disk}/memory.safetensors" if remembers else None,
        outbox=disk,
        begun=f"{disk}/{BEGUN}" if any(map(durations.vary, (device.timing, device.think))) else None,
        timeout_s=spec.topology.start.timeout,
        code=_code(spec, places),
        clock=places.clock,
        share=str(spec.directory.share(device.name)) if places.are_processes else None,
        device="cpu" if device.host is not None else spec.topology.runtime.device,
        keepalive=keepalive(spec.topology.task.build()),
        verbose=spec.verbose,
    )


def feature_settings(device: PlannedDevice, *, present: bool) -> FeatureSettings:
    own = {name: value for part in PARTS for name, value in part.init(device).items()}
    return FeatureSettings(device=device.name, present=present, dilation=device.dilation, **own)


def _code(spec: RunSpec, places: Places) -> str | None:
    return None if spec.topology.user_code is None else places.path(spec.directory.code, CODE)


def _initial_model(spec: RunSpec, places: Places) -> InitialModel:
    start = initial_model(spec.topology, spec.directory)
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
        netem=spec.plan.uses_netem,
        probed=device.host_probed,
        telemetry_every=device.dilation,
        present=present,
        timeout_s=spec.topology.start.timeout,
        client_config=CLIENT_CONFIG,
        isolated=f"{CONTROL_FOLDER}/{ISOLATED}",
        turns=CONTROL_FOLDER,
        hashes=_hashes(spec, device.name) if spec.plan.traits.many_hosts else {},
        clock=places.clock,
        user=CLIENT_USER,
        dilation=device.dilation,
        disk=DISK,
    )


def _on_real_device(init: DeviceConfig, device: PlannedDevice, places: Places) -> DeviceConfig:
    """Nothing is isolated on a real device, and the controller measures its link."""
    return replace(
        init,
        broker=replace(init.broker, certificate=places.certificate),
        client_config=Path(CLIENT_CONFIG).name,
        isolated=CLOCK,
        turns=None,
        user=None,
        hashes={},
        netem=device.shape is not None and device.shape.needs_netem,
        probed=None,
        cpu=device.cpu,
    )


def _hashes(spec: RunSpec, device: str) -> dict[str, str]:
    return {path: files.sha256(source) for path, source in files_to_send(spec, device).items()}
