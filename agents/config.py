"""Configuration of the processes of a run: frozen dataclasses, one JSON file per process.

The controller writes the files, each agent's `main.py` reads its own. Durations are in seconds of device
time unless a class says otherwise, rates in bit/s, sizes in bytes.
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

from agents.checks import convert
from agents.energy import EnergyConfig
from agents.timing.nanoseconds import Nanoseconds

T = TypeVar("T")
BEGUN = "begun"
"""File on a client's disk with one byte per training that the client has begun. It belongs to the
emulation, and stays if the device loses its memory."""
KEEPALIVE, FIT_KEEPALIVE = 30, 300
"""MQTT keep-alive in seconds of device time. FIT_KEEPALIVE: for tasks with their own `fit`, which may
hold Python's interpreter lock for long, so that no ping can be sent."""


def silence_timeout(keepalive: float = KEEPALIVE) -> float:
    """Seconds after which the broker disconnects a silent client (MQTT 3.1.1, section 3.1.2.10)."""
    return 1.5 * keepalive


PROGRESS_BYTES = 1000
"""A transfer of this many bytes per keep-alive counts as a sign of life."""
OUTAGE_RATE = 8 * PROGRESS_BYTES / KEEPALIVE
"""Rate in bit/s below which a link counts as an outage."""


Durability = Literal["none", "checkpoint", "update", "recording"]
"""Maximum loss if the aggregator crashes (docs/concepts/durability.md). `none`: the whole run.
`checkpoint`: everything after the last checkpoint. `update`: no acknowledged update. `recording`:
nothing, and all inputs are kept for `testbed replay`."""
LOGGED: tuple[Durability, ...] = ("update", "recording")
"""Each input is logged before the aggregator handles it."""

# Types of fields that a topology may set; testbed.topology.fields parses and bounds them.
Count = Annotated[int, "count"]
Positive = Annotated[float, "positive"]
NotNegative = Annotated[float, "not negative"]
Rate = Annotated[int, "bit/s"]


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """The password never appears in a repr or log."""

    host: str
    """Host name or IP address, or the path of a Unix socket, for which the port is ignored."""
    port: int
    username: str
    password: str = dataclasses.field(repr=False)
    certificate: str | None = None
    """PEM text of the only certificate that is trusted; None without TLS."""


@dataclass(frozen=True, slots=True)
class Named:
    """One of our own tasks, rules and the like, or a user's."""

    name: str
    """Name in a table such as RULES, or `module:Class` of user code."""
    params: Mapping[str, Any]
    """Fields of the named dataclass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Factor of the step size at n = 0, 1, 2, ..., where n counts local steps or versions of the
    model."""

    shape: Literal["linear", "cosine", "exponential"] = "linear"
    """How the factor changes with m = n - warmup, from 1 at m = 0 to `to` at m = `over`. For m above
    `over`, linear and cosine stay at `to`, and exponential continues as to^(m/over)."""
    over: Count
    """Number of local steps or versions, counted from the end of the warm-up, after which the factor is
    `to`."""
    to: NotNegative = 0.0
    """Factor at n = warmup + over."""
    every: Count = 1
    """The factor changes only when n - warmup is a multiple of this value. With `shape: exponential,
    over: 30, to: 0.1, every: 30` the step size is divided by 10 whenever n has grown by 30."""
    warmup: Annotated[int, "count from 0"] = 0
    """While n is below this value, the factor is (n + 1)/(warmup + 1)."""

    def factor(self, n: int) -> float:
        """Return the factor at `n`."""
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
class LocalTraining:
    """Local training of one round on the client's shard. Each round starts with a new optimizer."""

    steps: Count | None = None
    """Number of mini-batch steps per round. Set either `steps` or `epochs`."""
    epochs: Count | None = None
    """Number of passes over the shard per round. Set either `steps` or `epochs`."""
    batch_size: Count = 32
    """Number of samples per mini-batch."""
    last_batch: Literal["keep", "drop", "merge"] = "keep"
    """Use of the samples that are left in a pass after the last full mini-batch. keep: they are a
    smaller mini-batch. drop: they are left out of this pass. merge: they are added to the last full
    mini-batch."""
    lr: Positive = 0.1
    """Step size."""
    lr_by_step: Schedule | None = None
    """Factor of lr, as a function of the number of the local step in a training; None if there is no
    such factor."""
    lr_by_version: Schedule | None = None
    """Factor of lr, as a function of the version of the model that the client trains from; None if there
    is no such factor."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimizer of local training."""
    momentum: Annotated[float, "below 1"] = 0.0
    """Momentum of sgd (heavy ball): v ← momentum·v + g."""
    beta1: Annotated[float, "below 1"] = 0.9
    """Decay of the mean of gradients, for adam and adamw."""
    beta2: Annotated[float, "below 1"] = 0.999
    """Decay of the mean of squared gradients, for adam and adamw."""
    epsilon: Positive = 1e-8
    """Term added to the denominator, for adam and adamw."""
    weight_decay: NotNegative = 0.0
    """Weight decay: sgd and adam add weight_decay·w to the gradient, and adamw subtracts
    lr·weight_decay·w from w. Unlike the task's `l2`, weight decay is not part of the loss."""
    clip_gradient: Positive | None = None
    """Maximum ℓ2 norm of each step's gradient, before weight decay; None if gradients are not
    clipped."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the forward pass, set by torch's autocast. Parameters and optimizer stay in float32.
    With float16, a GPU is needed, and the loss is scaled."""
    proximal: NotNegative = 0.0
    """FedProx's mu (Li et al. 2020): (mu/2)·‖w − w_b‖² is added to the local loss. w_b is the received
    model."""
    clip: Positive | None = None
    """Maximum ℓ2 norm of an update; None if updates are not clipped."""
    fednova: bool = False
    """Send Δ_i/a_i instead of the update Δ_i. a_i is the effective number of local steps (Wang et al.
    2020)."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("found both steps and epochs, expected one of them")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(
                f"momentum is {self.momentum:g}, expected 0 with {self.optimizer}, which has beta1"
            )
        if self.fednova and (self.optimizer != "sgd" or self.lr_by_step is not None):
            raise ValueError(
                "fednova needs sgd with a constant step size: use optimizer sgd without lr_by_step, or "
                "remove fednova"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the training is SGD in float32 with a constant step size and unclipped gradients.
        Batched virtual training supports only such settings."""
        return (
            self.optimizer == "sgd"
            and self.lr_by_step is None
            and self.clip_gradient is None
            and self.precision == "float32"
        )

    def rate(self, version: int, assigned: float | None = None) -> float:
        """Return the step size of a training from `version`. `assigned`: step size from the rule, which
        replaces `lr`; None if the rule assigns no step size."""
        lr = self.lr if assigned is None else assigned
        return lr if self.lr_by_version is None else lr * self.lr_by_version.factor(version)

    def count(self, samples: int) -> int:
        """Return the number of mini-batch steps of a training on a shard of `samples` samples."""
        batches, _ = self.batches(samples)
        if self.steps is not None:
            return self.steps if batches else 0
        return (self.epochs or 1) * batches

    def batches(self, samples: int) -> tuple[int, int]:
        """Return the number of mini-batches in a pass over `samples` samples, and the number of samples
        in the last mini-batch. All other mini-batches have `batch_size` samples. Both numbers are 0 if
        there is no mini-batch."""
        full, rest = divmod(samples, self.batch_size)
        if rest == 0 or self.last_batch == "drop":
            return full, self.batch_size if full else 0
        if self.last_batch == "merge" and full:
            return full, self.batch_size + rest
        return full + 1, rest

    def first_batch(self, samples: int) -> int:
        """Return the number of samples in the first mini-batch of a pass; 0 if there is no
        mini-batch."""
        batches, last = self.batches(samples)
        return self.batch_size if batches > 1 else last

    def work(self, samples: int) -> float:
        """Return the work of a training in steps of `batch_size` samples. A smaller mini-batch counts as
        a whole step. A larger mini-batch counts in proportion to its samples."""
        batches, last = self.batches(samples)
        steps = self.count(samples)
        passes = steps // batches if batches else 0
        return steps + passes * max(0.0, last / self.batch_size - 1)


@dataclass(frozen=True, slots=True)
class InitialModel:
    """Model at the start of a run."""

    weights: str | None = None
    """Path of a safetensors file with the module's `state_dict`; None for the state that the task
    makes."""
    frozen: Sequence[str] = dataclasses.field(default_factory=list)
    """Patterns for names of parameters that are neither trained nor sent."""


FROM_TASK = InitialModel()


@dataclass(frozen=True, slots=True)
class DrawnDuration:
    """Random seconds, drawn by `agents.timing.durations`."""

    distribution: str
    """Name in `agents.timing.durations.DISTRIBUTIONS`."""
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSetup:
    """Settings of a client that are the same in every runtime (`agents.client.factory`)."""

    run: str
    client: str
    index: int = 0
    """Number of the client in device order, from 0."""
    seed: int
    rule: Named
    local: LocalTraining
    steps: Sequence[Named] = dataclasses.field(default_factory=list)
    """Update pipeline, in the order of `pipeline.steps.STEPS`."""
    think: DrawnDuration | None = None
    """Delay between the end of a training and the sending of its update."""
    timing: DrawnDuration | None = None
    """Minimum duration of a training, from when it could begin."""
    speed: float = 1.0
    """Divisor of `timing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    setup: ClientSetup
    broker: BrokerAccess
    task: Named
    shard: str
    """Path of the training data (`agents.shards`)."""
    threads: int
    """Number of torch's threads; 0 for torch's own choice."""
    parameters: int
    """Number of parameters that are sent."""
    buffers: int = 0
    """Number of elements in buffers, which are sent, too."""
    own_elements: int = 0
    """Number of elements in the vectors that the rule sends with each model."""
    start: InitialModel = InitialModel()
    dilation: float = 1.0
    """Host seconds per second of device time."""
    memory: str | None = None
    """Path of the file with vectors that outlive restarts, if the rule needs any."""
    outbox: str | None = None
    """Path of the folder with unacknowledged updates, if they are kept over restarts."""
    begun: str | None = None
    """Path of the file with one byte per training that the client has begun; None if all trainings have
    the same duration."""
    timeout_s: float = 30.0
    """Host seconds within which the broker must answer."""
    code: str | None = None
    """Folder with user code (`agents.user_code`)."""
    clock: str | None = None
    """File with the estimate of the aggregator's clock; None on its host."""
    share: str | None = None
    """File with the device's CPU share, in cores, written when it is limited or changes; None if the
    client's control group has a quota."""
    device: Literal["cpu", "cuda"] = "cpu"
    gpu_memory: int | None = None
    """Bytes that PyTorch may allocate; None if not limited."""
    keepalive: float = KEEPALIVE
    """Keep-alive of MQTT, in seconds of device time."""
    verbose: bool = False
    """Log the start and the end of each round."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions that end a run. The run ends when one of them is met."""

    after: Annotated[float, "s above 0"] | None = None
    """Device time in seconds since the start of the run clock; None if time does not end the run."""
    updates: Count | None = None
    """Number of applied updates; None if the number of updates does not end the run."""
    target_accuracy: Annotated[float, "share above 0"] | None = None
    """Accuracy on the test set, from 0 to 1; None if the accuracy does not end the run."""

    def __post_init__(self) -> None:
        if self.after is None and self.updates is None and self.target_accuracy is None:
            raise ValueError(
                "found no condition, expected after, updates or target_accuracy such as after: 60s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBounds:
    """Bounds of an update. An update beyond a bound is rejected with a reason, or clipped."""

    norm: Positive | None = None
    """C, maximum ℓ2 norm of an update. If clients send models, C is the maximum norm of the difference
    between the sent model and the global model. None if there is no bound."""
    over_norm: Literal["clip", "drop"] = "clip"
    """Treatment of an update whose norm is above `norm`. clip: Δ ← Δ · C/‖Δ‖ (Sun et al. 2019, arXiv
    1911.07963). drop: the update is rejected."""
    staleness: Annotated[int, "count from 0"] | None = None
    """Maximum number of versions between the model that the update was trained from and the model at the
    update's arrival. None if there is no bound."""

    def __post_init__(self) -> None:
        if self.norm is None and self.over_norm == "drop":
            raise ValueError("over_norm needs a norm, such as norm: 10")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of the aggregator's core that the plan makes. Times are nanoseconds of device time."""

    run: str
    importance: Mapping[str, float]
    """p_i of every client that trains, in device order; they sum to 1."""
    idle: Sequence[str] = dataclasses.field(default_factory=list)
    """Clients without a mini-batch. Their presence is recorded, but the rule does not know them."""
    samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Training samples that a client's updates must state, because a rule may use them as a weight. A
    client without an entry may state any number."""
    stop: StopConditions
    evaluate_every: Nanoseconds
    keeps_models: bool = False
    """Sent models are kept, because updates are encoded as differences to them."""
    bounds: UpdateBounds = UpdateBounds()
    steps: Sequence[Named] = dataclasses.field(default_factory=list)
    """Clients' update pipelines, in the order of `pipeline.steps.STEPS`, at most one of each kind."""
    silence: Mapping[str, Nanoseconds] = dataclasses.field(default_factory=dict)
    """Time to answer a request for a report, after which the client counts as absent. Default: when the
    broker disconnects a silent client."""
    patience: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Time for which a client may be silent even if its rounds so far were shorter; infinite if they
    vary at random with an unknown mean. Clients whose time the plan does not know have no entry."""
    clock_errors: Mapping[str, Nanoseconds] = dataclasses.field(default_factory=dict)
    """Maximum error of the times of clients on another clock than the aggregator's."""
    patient: bool = False
    """The run continues when no client is left, because clients will come back."""
    evaluate_after: bool = False
    """Models are evaluated only after the run, without a time limit, and no evaluation is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorConfig:
    settings: RunSettings
    broker: BrokerAccess
    task: Named
    rule: Named
    seed: int
    test_set: str
    """Path of the test set (`agents.shards`)."""
    run_directory: str
    threads: int
    start: InitialModel = InitialModel()
    leg: str = ""
    """Id of the present leg of the run. A new one begins when all processes are started again."""
    durability: Durability = "update"
    dilation: float = 1.0
    """Host seconds per second of device time."""
    evaluation_cpus: Sequence[int] = dataclasses.field(default_factory=list)
    """Reserved for evaluations; empty for the aggregator's CPUs."""
    cpus: Sequence[int] = dataclasses.field(default_factory=list)
    """CPUs of the aggregator if evaluations have their own."""
    evaluate_classes: bool = False
    """Each class of the test set is also evaluated separately."""
    device_set: str | None = None
    """Path of a file with samples of the devices, one device after the other, for evaluation per
    device."""
    device_samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Samples of each device in `device_set`, in the same order."""
    last_evaluation_timeout_s: float = 30.0
    """Host seconds that a finished run waits for its last evaluation."""
    code: str | None = None
    """Folder with user code (`agents.user_code`)."""
    chooser: Named | None = None
    """Chooser of the clients that train next; None if the rule draws by itself."""


Way = Literal["up", "down"]
"""Direction of traffic: from the devices to the server (`up`), or to the devices (`down`)."""
WAYS: tuple[Way, Way] = ("up", "down")


@dataclass(frozen=True, slots=True)
class Background:
    """Other people's traffic on a segment, in one direction, in device time
    (`agents.links.background`)."""

    number: int
    """Position in the segment's list, from 0."""
    way: Way
    kind: str
    """Name in `agents.links.background.KINDS`."""
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """A link that several devices share, such as a Wi-Fi cell or a backhaul. The segments of a run form
    a tree; the server is behind the roots."""

    name: str
    parent: str | None = None
    """Next segment on the way to the server; None if the server comes next."""
    up: int | None = None
    """bit/s from all devices; None if not limited."""
    down: int | None = None
    """bit/s to all devices; None if not limited."""
    rtt: float = 0.0
    """Round-trip seconds that the segment adds, half of it in each direction."""
    jitter: float = 0.0
    """Maximum deviation of the delay in each direction, in seconds, uniform."""
    loss: float = 0.0
    """Share of packets lost in each direction, from 0 to 1."""
    queue: int | None = None
    """Bytes in each direction; None for 200 ms of the rate."""
    background: tuple[Background, ...] = ()

    def rate(self, way: Way) -> int | None:
        """bit/s; None if not limited."""
        return self.up if way == "up" else self.down

    def with_changes(self, changes: Mapping[str, float | None]) -> Segment:
        values: dict[str, Any] = dict(changes)
        return dataclasses.replace(self, **values)


def path_of(name: str | None, segments: Mapping[str, Segment]) -> tuple[Segment, ...]:
    """From `name` to the root; empty for None."""
    found = []
    while name is not None:
        found.append(segments[name])
        name = segments[name].parent
    return tuple(found)


@dataclass(frozen=True, slots=True)
class AccessLink:
    """Access link requested for a device."""

    up: int | None = None
    """bit/s; None if not limited."""
    down: int | None = None
    """bit/s; None if not limited."""
    rtt: float = 0.0
    """Round-trip seconds that the link adds, half of it in each direction."""
    jitter: float = 0.0
    """The delay in each direction is uniform in rtt/2 ± jitter seconds. Packets stay in order."""
    loss: float = 0.0
    """Share of packets lost in each direction, from 0 to 1."""

    def rate(self, way: Way) -> int | None:
        """bit/s; None if not limited."""
        return self.up if way == "up" else self.down

    @property
    def is_outage(self) -> bool:
        """No packets, or too few to keep a connection alive."""
        return self.loss >= 1 or any((rate or math.inf) < OUTAGE_RATE for rate in (self.up, self.down))

    def with_changes(self, changes: Mapping[str, float | None]) -> AccessLink:
        values: dict[str, Any] = dict(changes)
        return dataclasses.replace(self, **values)

    def through(self, path: Sequence[Segment]) -> AccessLink:
        """This link and the segments of `path` together: the lowest rates, the sums of delay and jitter,
        and the combined loss."""
        if not path:
            return self
        passed = (1 - self.loss) * math.prod(1 - one.loss for one in path)
        return AccessLink(
            up=_slower(self.up, *(one.up for one in path)),
            down=_slower(self.down, *(one.down for one in path)),
            rtt=self.rtt + math.fsum(one.rtt for one in path),
            jitter=self.jitter + math.fsum(one.jitter for one in path),
            loss=self.loss if not any(one.loss for one in path) else 1 - passed,
        )

    def delayed_by(self, path: Sequence[Segment]) -> AccessLink:
        """This link's rates, with delay, jitter and loss of the whole path."""
        return self.through(path).with_changes({"up": self.up, "down": self.down})


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSettings:
    """Settings of a device's features (`agents.device.part`)."""

    device: str
    present: bool = True
    """The client starts with the run, else by an order."""
    cpu: float | None = None
    """CPU share at the start of the run, in host cores of device time, to which `EnergyConfig.busy`
    refers, if energy is counted. On a real device, the share to which the init's control group limits
    it, if there is one."""
    dilation: float = 1.0
    """Host seconds per second of device time."""
    energy: EnergyConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig(FeatureSettings):
    """Configuration of a device's init."""

    run: str
    broker: BrokerAccess
    """The init does not reach the broker over the access link; only the client does."""
    data_address: str
    """Host name at which the client reaches the broker, over the access link."""
    link: AccessLink | None
    """The device's own link; None if it is not shaped."""
    probed: AccessLink | None
    """Expected rates of the device's own link, and delay, jitter and loss of the whole path to the
    server, for a measurement, if any."""
    client_config: str
    """Path of the ClientConfig of the client."""
    isolated: str
    """Path of a file that is created when the device is isolated or, on a real device, when its clock
    has been compared. No client starts before that."""
    turns: str | None
    """Folder with the files of `agents.device.turns`; None on a real device, which starts at once."""
    user: int | None
    """Id of the client's user and group; None on a real device, where the client runs as the init's
    user."""
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of each file that was sent to this host, by path."""
    paused: bool = False
    """The client is frozen from its start on, until an order continues it."""
    telemetry_every: float = 1.0
    """Host seconds between two samples, which use some of the device's own CPU share."""
    timeout_s: float = 30.0
    """Host seconds within which the router must answer."""
    clock: str | None = None
    """File with the estimate of the aggregator's clock; None on its host."""
    netem: bool = False
    """The kernel's netem emulates delay, jitter and loss in the device, else the router."""
    disk: str = ""
    """Folder with the files that the client keeps when it restarts; empty if no power-off erases
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Configuration of the router between the devices and the broker."""

    run: str
    broker: BrokerAccess
    """Address of the broker on the control network, and the router's login."""
    targets: Mapping[str, int]
    """By host name on the server's side: port for TCP and UDP. The first entry is the broker's."""
    addresses: Mapping[str, str]
    links: Mapping[str, Mapping[str, float]]
    """`rtt`, `jitter` and `loss` of each device's link, as in `AccessLink`."""
    segments: Sequence[Segment]
    """In host time except for their background traffic. A parent comes before its children."""
    attached: Mapping[str, str]
    """Devices without a segment have no entry."""
    seed: int
    """Seed of the packet losses and delays."""
    background_seed: int = 0
    """Seed of the background traffic: that of the run."""
    several: bool = False
    """Whether there are other routers for other devices. Orders are sent to all routers."""
    dilation: float = 1.0
    """Host seconds per second of device time."""


def _slower(*rates: int | None) -> int | None:
    return min((rate for rate in rates if rate is not None), default=None)


def dump(config: Any, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n", encoding="utf-8")


def load(cls: type[T], path: Path) -> T:
    """Raises ValueError if the content does not fit `cls`."""
    return from_dict(cls, json.loads(path.read_text(encoding="utf-8")))


def from_dict(cls: type[T], values: Any) -> T:
    """From plain values such as dicts and lists, with nested dataclasses. Raises ValueError for unknown
    or missing fields, and for values of another type."""
    try:
        found = convert(values, cls)
    except msgspec.ValidationError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
    if unknown := ", ".join(_unknown(values, msgspec.to_builtins(found))):
        raise ValueError(f"{cls.__name__} has no field {unknown}")
    return found


def _unknown(values: Mapping[str, Any], known: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of fields that are in `values`, at any depth, but not in `known`."""
    for name, value in values.items():
        if name not in known:
            yield path + name
        elif isinstance(value, Mapping):
            yield from _unknown(value, known[name], f"{path}{name}.")
