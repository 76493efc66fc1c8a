"""Configuration of the processes of a run: frozen dataclasses, handed over as one JSON file.

The controller writes them; each agent's `main.py` reads its own. Durations are in seconds of device
time, rates in bit/s, sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

T = TypeVar("T")
KEEPALIVE, FIT_KEEPALIVE = 30, 300
"""Keep-alive of MQTT in seconds of device time: of most clients, and of those whose task has its own
`fit`. Such code may hold Python's interpreter all along, so that no ping is sent meanwhile."""


def silence(keepalive: float = KEEPALIVE) -> float:
    """Seconds after which a broker gives up on a silent client (MQTT 3.1.1, section 3.1.2.10)."""
    return 1.5 * keepalive


PROGRESS_BYTES = 1000
"""Bytes that a transfer must move per keep-alive to count as a sign of life."""
OUTAGE_RATE = 8 * PROGRESS_BYTES / KEEPALIVE
"""Rate in bit/s below which a link counts as an outage."""


Durability = Literal["none", "checkpoint", "update", "recording"]
"""What a crash of the aggregator takes: the run; what came after its last checkpoint; nothing that was
acknowledged; nothing, and all inputs are kept for `testbed replay` (docs/concepts/durability.md)."""
LOGGED: tuple[Durability, ...] = ("update", "recording")
"""With these the aggregator logs each input ahead."""

# What a topology may give for a field; testbed.topology.fields reads and bounds it.
Count = Annotated[int, "count"]
Positive = Annotated[float, "positive"]
NotNegative = Annotated[float, "not negative"]
Rate = Annotated[int, "bit/s"]


@dataclass(frozen=True, slots=True)
class Broker:
    """Where the broker is and who we are there. The password stays out of every repr and log."""

    host: str
    """Or the path of its Unix socket; the port means nothing then."""
    port: int
    username: str
    password: str = dataclasses.field(repr=False)
    certificate: str | None = None
    """The broker's, as PEM: TLS with who can prove that it is this one's; None: no TLS."""


@dataclass(frozen=True, slots=True)
class Named:
    """A task or a rule: its name in TASKS or RULES, or `module:Class` of own code, and the parameters of
    its dataclass."""

    name: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a step size is multiplied with at n = 0, 1, 2, ...: local steps, or versions of the model."""

    shape: Literal["linear", "cosine", "exponential"] = "linear"
    """With m = n - warmup: from 1 at m = 0 to `to` at m = `over`; linear and cosine stay there,
    exponential, to^(m/over), goes on."""
    over: Count
    to: NotNegative = 0.0
    every: Count = 1
    """The factor changes at multiples of this m alone; `over: 30, to: 0.1, every: 30` is a tenth of it
    every 30."""
    warmup: Annotated[int, "count from 0"] = 0
    """As long as n is below this, the factor is (n + 1)/(warmup + 1)."""

    def factor(self, n: int) -> float:
        if n < self.warmup:
            return (n + 1) / (self.warmup + 1)
        m = (n - self.warmup) // self.every * self.every
        if self.shape == "exponential":
            return float(self.to ** (m / self.over))
        done = min(1.0, m / self.over)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return 1 - (1 - self.to) * done


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Local training of one round on the client's shard. The optimizer begins anew in each."""

    steps: Count | None = None
    """Mini-batch steps per round; this or `epochs` is to be given."""
    epochs: Count | None = None
    """Passes over the shard per round."""
    batch_size: Count = 32
    lr: Positive = 0.1
    """Step size."""
    lr_by_step: Schedule | None = None
    """Multiplies lr in the course of each training, by its local steps."""
    lr_by_version: Schedule | None = None
    """Multiplies lr in the course of the run, by the version that the client trains from."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Annotated[float, "below 1"] = 0.0
    """Of sgd: heavy ball, v ← momentum·v + g."""
    beta1: Annotated[float, "below 1"] = 0.9
    """Of adam and adamw."""
    beta2: Annotated[float, "below 1"] = 0.999
    """Of adam and adamw."""
    epsilon: Positive = 1e-8
    """Of adam and adamw."""
    weight_decay: NotNegative = 0.0
    """Adds weight_decay·w to the gradient; adamw takes lr·weight_decay·w off w itself. It is no part of
    the loss, which the task's `l2` is."""
    clip_gradient: Positive | None = None
    """Upper bound of the ℓ2 norm of each step's gradient, before weight decay."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """bfloat16, and on a GPU float16, with the loss scaled: torch's autocast in the forward pass;
    parameters and optimizer stay float32."""
    proximal: NotNegative = 0.0
    """FedProx's mu (Li et al. 2020): adds (mu/2)·‖w − w_b‖² to the local loss."""
    clip: Positive | None = None
    """Upper bound of an update's ℓ2 norm."""
    fednova: bool = False
    """Send Δ_i/a_i, a_i the effective number of local steps (Wang et al. 2020)."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("found both steps and epochs, expected one of them")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"momentum is {self.momentum:g}, expected 0 with {self.optimizer}, which has beta1"
            )
        if self.fednova and (self.optimizer != "sgd" or self.lr_by_step is not None):
            raise ValueError(
                "fednova normalises by what sgd does in steps of one size: take sgd without "
                "lr_by_step, or remove fednova"
            )

    @property
    def is_plain(self) -> bool:
        """Whether it is SGD with steps of one size, each by the whole gradient: batched virtual training
        does no other."""
        return (
            self.optimizer == "sgd"
            and self.lr_by_step is None
            and self.clip_gradient is None
            and self.precision == "float32"
        )

    def rate(self, version: int, assigned: float | None = None) -> float:
        """Step size of a training from `version`; what the rule `assigned` takes the place of lr."""
        lr = self.lr if assigned is None else assigned
        return lr if self.lr_by_version is None else lr * self.lr_by_version.factor(version)

    def count(self, samples: int) -> int:
        """Mini-batch steps of one training on a shard of `samples` samples."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 1) * -(-samples // self.batch_size)


@dataclass(frozen=True, slots=True)
class Start:
    """What of a task's model is given when a run begins."""

    weights: str | None = None
    """Path of a safetensors file with the module's state, by name; None: as the task makes it."""
    frozen: Sequence[str] = dataclasses.field(default_factory=list)
    """Patterns of names of parameters that neither train nor travel: they stay as they are here."""


FROM_TASK = Start()


@dataclass(frozen=True, slots=True)
class Duration:
    """A random duration, in seconds; `agents.timing.durations` draws from it."""

    distribution: str
    params: Mapping[str, Any]
    """Of the dataclass in `agents.timing.durations.DISTRIBUTIONS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSetup:
    """What a client does, in every runtime (`agents.client.making`)."""

    run: str
    client: str
    seed: int
    rule: Named
    local: Local
    steps: Sequence[Named] = dataclasses.field(default_factory=list)
    """What is done to its updates: rows of `agents.pipeline.STEPS`, in that order."""
    think: Duration | None = None
    """Delay between the end of a training and its update."""
    timing: Duration | None = None
    """Floor under the time from when a training could begin to its end."""
    speed: float = 1.0
    """Divides `timing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    setup: ClientSetup
    broker: Broker
    task: Named
    shard: str
    """Path of the client's own training data (`agents.shards`)."""
    threads: int
    parameters: int
    """Number of the model's parameters that are sent."""
    buffers: int = 0
    """Numbers in the model's buffers, which are sent too."""
    start: Start = Start()
    dilation: float = 1.0
    """Seconds of the host that make one of device time."""
    memory: str | None = None
    """Path of a file that outlives the process, for a rule whose clients remember."""
    outbox: str | None = None
    """Path of a folder that outlives the process, for updates that are not acknowledged."""
    begun: str | None = None
    """Path of a file that outlives the process, as many bytes long as the client has begun trainings;
    None where no duration varies from one training to the next."""
    timeout_s: float = 30.0
    """Within which the broker must answer: it is the last to become reachable."""
    code: str | None = None
    """Path of the folder of own code (`agents.own_code`)."""
    clock: str | None = None
    """Path of the estimate of the aggregator's clock (`agents.timing`), if that is another host's."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What it trains on."""
    gpu_memory: int | None = None
    """Bytes of the GPU's memory that PyTorch may take; None: not limited."""
    keepalive: float = KEEPALIVE
    """Keep-alive of its MQTT connection, in seconds of device time."""
    verbose: bool = False
    """Say in the log when each round begins and ends."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The run ends at whichever comes first."""

    after: Annotated[float, "s above 0"] | None = None
    """Since the run clock started."""
    updates: Count | None = None
    """Updates applied."""
    target_accuracy: Annotated[float, "share above 0"] | None = None
    """As evaluated."""

    def __post_init__(self) -> None:
        if self.after is None and self.updates is None and self.target_accuracy is None:
            raise ValueError(
                "found no condition, expected after, updates or target_accuracy such as after: 60s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What an update may be at most. One over a bound is dropped with a reason, or clipped."""

    norm: Positive | None = None
    """C, of the ℓ2 norm of an update: of what is sent or, of a model, of its distance to the global
    one."""
    over_norm: Literal["clip", "drop"] = "clip"
    """clip: Δ ← Δ · C/‖Δ‖ (Sun et al. 2019, arXiv 1911.07963)."""
    staleness: Annotated[int, "count from 0"] | None = None
    """Of the version that it was trained from, when it arrives."""

    def __post_init__(self) -> None:
        if self.norm is None and self.over_norm == "drop":
            raise ValueError("over_norm is of use with a norm only, such as norm: 10")


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorConfig:
    run: str
    broker: Broker
    task: Named
    rule: Named
    clients: Mapping[str, float]
    """Importance p_i of each client; sums to 1."""
    samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Of each client's shard."""
    evaluate_every: float
    stop: Stop
    seed: int
    test_set: str
    run_directory: str
    threads: int
    start: Start = Start()
    segment: str = ""
    """Id of this segment of the run: another one each time that all its processes are started."""
    durability: Durability = "update"
    patience: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By client, as far as it is known: for how long it may be silent, whatever its rounds took."""
    silence: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By client: seconds of device time after which it is gone where it was asked for a report and has
    not answered. Of a client that is not here: as its keep-alive is the usual one."""
    patient: bool = False
    """Wait where no client is left: some will come back."""
    dilation: float = 1.0
    """Seconds of the host that make one of device time."""
    evaluation_cpus: Sequence[int] = dataclasses.field(default_factory=list)
    """CPUs that only evaluate; none: evaluations run where the rest does."""
    cpus: Sequence[int] = dataclasses.field(default_factory=list)
    """CPUs of the rest, where evaluations have their own."""
    evaluate_classes: bool = False
    """Each class of the test set by itself too."""
    device_set: str | None = None
    """Path of samples of the devices, one device after the other, to evaluate each on its own."""
    device_samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many each device has of them."""
    evaluate_after: bool = False
    """Evaluate after the run, and as long as that takes."""
    bounds: Bounds = Bounds()
    keeps_models: bool = False
    """Keep each model that is trained from, for updates that come as the difference to it."""
    last_evaluation_timeout_s: float = 30.0
    """Seconds of the host that a run which is over waits for its last evaluation."""
    code: str | None = None
    """Path of the folder of own code (`agents.own_code`)."""
    steps: Sequence[Named] = dataclasses.field(default_factory=list)
    """What clients do to their updates: one of each step of the run, in the order of
    `agents.pipeline.STEPS`."""


@dataclass(frozen=True, slots=True)
class Access:
    """A link that several devices share, such as a Wi-Fi cell; None means unlimited."""

    name: Annotated[str, "name"]
    up: Rate | None = None
    """From all its devices together."""
    down: Rate | None = None
    """To all its devices together."""

    def __post_init__(self) -> None:
        if self.up is None and self.down is None:
            raise ValueError("found neither up nor down, expected a rate such as down: 50mbit")


@dataclass(frozen=True, slots=True)
class Link:
    """Access link requested for a device; None means unlimited."""

    up: int | None = None
    down: int | None = None
    rtt: float = 0.0
    """Round-trip time in seconds that the link adds, half of it each way."""
    jitter: float = 0.0
    """Seconds: each way's delay is uniform in rtt/2 ± jitter; packets stay in order."""
    loss: float = 0.0
    """Share of the packets that are lost, each way."""

    @property
    def is_outage(self) -> bool:
        """Whether nothing passes, or so little that a connection over the link breaks."""
        return self.loss >= 1 or any((rate or math.inf) < OUTAGE_RATE for rate in (self.up, self.down))

    def changed(self, changes: Mapping[str, float | None]) -> Link:
        """With other values in the fields that `changes` names."""
        values: dict[str, Any] = dict(changes)
        return dataclasses.replace(self, **values)

    def behind(self, access: Access | None) -> Link:
        """What a device has of this link that is alone on what it shares."""
        if access is None:
            return self
        return dataclasses.replace(
            self, up=_slower(self.up, access.up), down=_slower(self.down, access.down)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """For the device's init (PID 1 of its container)."""

    run: str
    device: str
    broker: Broker
    """Not over the access link, which is the client's alone."""
    data_address: str
    """The client's broker host, behind the access link."""
    link: Link | None
    """The device's own; None where it is not shaped."""
    probed: Link | None
    """The whole way to the server, where it is to be measured."""
    shared: str
    """Name of what it shares with other devices on that way; else its own."""
    client_config: str
    """Path of the ClientConfig for the client process that init starts."""
    isolated: str
    """Path of a file that is there as soon as the device is isolated: before, no client starts."""
    user: int
    """Numeric user and group of the client process."""
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of files that were sent to this device's host, by path."""
    present: bool = True
    """Whether the client starts with the run, or only when a command starts it."""
    telemetry_every: float = 1.0
    """Seconds of the host between two samples, which are taken at the device's own CPU share."""
    timeout_s: float = 30.0
    """Within which the router must answer, which is started last of all."""
    clock: str | None = None
    """Path of the estimate of the aggregator's clock (`agents.timing`), if that is another host's."""
    netem: bool = False
    """Whether delay, jitter and loss of the link are made here, by the kernel; else by the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """For the router between the devices and the broker."""

    run: str
    broker: Broker
    """On the control network."""
    targets: Mapping[str, int]
    """Host names on the server's side, the broker's first, and the port of each, of TCP and UDP."""
    addresses: Mapping[str, str]
    """IPv4 address of each device."""
    links: Mapping[str, Mapping[str, float]]
    """`rtt`, `jitter` and `loss` of each device, as in `Link`."""
    access: Mapping[str, Access]
    """What devices share; only those that do."""
    seed: int
    several: bool = False
    """Whether there are other routers, with other devices: orders go to all of them."""


def _slower(*rates: int | None) -> int | None:
    return min((rate for rate in rates if rate is not None), default=None)


def dump(config: Any, path: Path) -> None:
    """Write `config` as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n", encoding="utf-8")


def load(cls: type[T], path: Path) -> T:
    """Read what `dump` wrote. Raises ValueError for a file that does not fit `cls`."""
    return from_dict(cls, json.loads(path.read_text(encoding="utf-8")))


def from_dict(cls: type[T], values: Any) -> T:
    """Build the dataclass `cls`, nested dataclasses included, from plain values.

    Raises ValueError for fields that are unknown or missing, or of another type.
    """
    try:
        found = msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
    if unknown := ", ".join(_unknown(values, msgspec.to_builtins(found))):
        raise ValueError(f"{cls.__name__} has no field {unknown}")
    return found


def _unknown(values: Mapping[str, Any], known: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The fields of `values` that `known` lacks, in parts of it too."""
    for name, value in values.items():
        if name not in known:
            yield path + name
        elif isinstance(value, Mapping):
            yield from _unknown(value, known[name], f"{path}{name}.")
