"""Configuration of the processes of a run: frozen dataclasses, one JSON file per process.

The controller writes the files, and each agent's `main.py` reads its own file. Durations are in seconds
of device time, rates in bit/s, sizes in bytes.
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

from agents.conversion import convert
from agents.energy.settings import EnergyConfig

T = TypeVar("T")
BEGUN = "begun"
"""Name of the file on a client's disk that has one byte per training that the client has begun. The file
belongs to the emulation: it stays if the device loses its memory."""
KEEPALIVE, FIT_KEEPALIVE = 30, 300
"""MQTT keep-alive in seconds of device time. KEEPALIVE: for most clients. FIT_KEEPALIVE: for clients
whose task has its own `fit`. Such a `fit` may hold Python's interpreter lock for long, and no ping can
be sent meanwhile."""


def silence_timeout(keepalive: float = KEEPALIVE) -> float:
    """Return the seconds after which the broker disconnects a silent client (MQTT 3.1.1, section
    3.1.2.10)."""
    return 1.5 * keepalive


PROGRESS_BYTES = 1000
"""A transfer counts as a sign of life if it moves at least this number of bytes per keep-alive."""
OUTAGE_RATE = 8 * PROGRESS_BYTES / KEEPALIVE
"""Rate in bit/s below which a link counts as an outage."""


Durability = Literal["none", "checkpoint", "update", "recording"]
"""Maximum loss if the aggregator crashes (docs/concepts/durability.md). `none`: the whole run is lost.
`checkpoint`: everything after the last checkpoint is lost. `update`: no acknowledged update is lost.
`recording`: nothing is lost, and all inputs are kept for `testbed replay`."""
LOGGED: tuple[Durability, ...] = ("update", "recording")
"""Kinds of durability with which the aggregator logs each input before it handles it."""

# Types of fields that a topology may set; testbed.topology.fields parses and bounds them.
Count = Annotated[int, "count"]
Positive = Annotated[float, "positive"]
NotNegative = Annotated[float, "not negative"]
Rate = Annotated[int, "bit/s"]


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """Address of the broker, and a process's login. The password never appears in a repr or log."""

    host: str
    """Host name or IP address, or the path of a Unix socket. With a Unix socket, the port is ignored."""
    port: int
    username: str
    password: str = dataclasses.field(repr=False)
    certificate: str | None = None
    """The broker's certificate as PEM text; None if TLS is not used. No other certificate is trusted."""


@dataclass(frozen=True, slots=True)
class Named:
    """A task, a rule, a selection or a step, by name and parameters."""

    name: str
    """Name in TASKS, RULES, SELECTIONS or STEPS, or `module:Class` of user code."""
    params: Mapping[str, Any]
    """Values of the fields of the named dataclass."""


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
    """The model at the start of a run."""

    weights: str | None = None
    """Path of a safetensors file with the module's `state_dict`; None to start from the state that the
    task makes."""
    frozen: Sequence[str] = dataclasses.field(default_factory=list)
    """Patterns for the names of parameters that are neither trained nor sent."""


FROM_TASK = InitialModel()


@dataclass(frozen=True, slots=True)
class DrawnDuration:
    """Random duration in seconds. `agents.timing.durations` draws the values."""

    distribution: str
    """Name in `agents.timing.durations.DISTRIBUTIONS`."""
    params: Mapping[str, Any]
    """Values of the fields of the distribution's dataclass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSetup:
    """Settings of a client that are the same in every runtime (`agents.client.factory`)."""

    run: str
    client: str
    index: int = 0
    """Number of the client in device order, from 0."""
    seed: int
    """Seed of the run."""
    rule: Named
    local: LocalTraining
    steps: Sequence[Named] = dataclasses.field(default_factory=list)
    """Steps of the update pipeline, in the order of `agents.pipeline.STEPS`."""
    think: DrawnDuration | None = None
    """Delay between the end of a training and the sending of its update; None if there is no delay."""
    timing: DrawnDuration | None = None
    """Minimum duration of a training, measured from the time at which the training could begin; None if
    there is no minimum."""
    speed: float = 1.0
    """Divisor of `timing`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Configuration of a client process."""

    setup: ClientSetup
    broker: BrokerAccess
    task: Named
    shard: str
    """Path of the client's training data (`agents.shards`)."""
    threads: int
    """Number of torch's threads; 0 for torch's own choice."""
    parameters: int
    """Number of model parameters that are sent."""
    buffers: int = 0
    """Number of elements in the model's buffers, which are sent with the parameters."""
    own_elements: int = 0
    """Number of elements in the vectors that the rule sends with each model."""
    start: InitialModel = InitialModel()
    dilation: float = 1.0
    """Host seconds per second of device time."""
    memory: str | None = None
    """Path of the file in which the client keeps vectors over restarts; None if the rule needs no such
    vectors."""
    outbox: str | None = None
    """Path of the folder in which unacknowledged updates are kept over restarts; None if unacknowledged
    updates are not kept."""
    begun: str | None = None
    """Path of a file that has one byte per training that the client has begun. The file is kept over
    restarts. None if all trainings have the same duration."""
    timeout_s: float = 30.0
    """Host seconds within which the broker must answer."""
    code: str | None = None
    """Path of the folder with user code (`agents.user_code`); None if there is no user code."""
    clock: str | None = None
    """Path of the file with the estimate of the aggregator's clock; None on the aggregator's host."""
    share: str | None = None
    """Path of the file with the device's CPU share, in cores, which is written when the share is limited
    or changes; None if the control group of the client has a quota."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of the torch device on which the client trains."""
    gpu_memory: int | None = None
    """Bytes of GPU memory that PyTorch may allocate; None if the memory is not limited."""
    keepalive: float = KEEPALIVE
    """Keep-alive of the MQTT connection, in seconds of device time."""
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
class AggregatorConfig:
    """Configuration of the aggregator process."""

    run: str
    broker: BrokerAccess
    task: Named
    rule: Named
    clients: Mapping[str, float]
    """Importance p_i of each client. The values sum to 1."""
    idle: Sequence[str] = dataclasses.field(default_factory=list)
    """Clients without a mini-batch, which are not in `clients`: the rule sends them no models."""
    samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of training samples of each client."""
    evaluate_every: float
    """Seconds of device time between two evaluations."""
    stop: StopConditions
    seed: int
    """Seed of the run."""
    test_set: str
    """Path of the test set (`agents.shards`)."""
    run_directory: str
    """Path of the run directory."""
    threads: int
    """Number of torch's threads."""
    start: InitialModel = InitialModel()
    segment: str = ""
    """Id of the present segment of the run. A new segment begins when all processes of the run are
    started again."""
    durability: Durability = "update"
    patience: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """For some clients, seconds of device time for which the client may always be silent. A client whose
    rounds took longer may be silent for longer. Clients whose time the plan does not know have no
    entry."""
    silence: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """For each client, the seconds of device time that the client has to answer when the aggregator asks
    which dispatch the client works on. A client that does not answer in time counts as absent. A client
    without an entry has `silence_timeout()` seconds."""
    clock_errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """For each client on another clock than the aggregator's, the seconds by which its times may be
    wrong."""
    patient: bool = False
    """Whether the run continues when no client is left, because clients will come back."""
    dilation: float = 1.0
    """Host seconds per second of device time."""
    evaluation_cpus: Sequence[int] = dataclasses.field(default_factory=list)
    """CPUs reserved for evaluations. If the list is empty, evaluations run on the aggregator's CPUs."""
    cpus: Sequence[int] = dataclasses.field(default_factory=list)
    """CPUs of the aggregator if evaluations have their own CPUs; empty otherwise."""
    evaluate_classes: bool = False
    """Whether each class of the test set is also evaluated separately."""
    device_set: str | None = None
    """Path of a file with samples of the devices, one device after the other, for evaluation per device.
    None if models are not evaluated per device."""
    device_samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of samples of each device in `device_set`, in the same order."""
    evaluate_after: bool = False
    """Whether models are evaluated after the run, without a time limit, instead of during the run."""
    bounds: UpdateBounds = UpdateBounds()
    keeps_models: bool = False
    """Whether the models that are sent to clients are kept, because updates are encoded as differences
    to these models."""
    last_evaluation_timeout_s: float = 30.0
    """Host seconds that a finished run waits for its last evaluation."""
    code: str | None = None
    """Path of the folder with user code (`agents.user_code`); None if there is no user code."""
    selection: Named | None = None
    """Selection of the clients that train next; None if the rule draws by itself."""
    steps: Sequence[Named] = dataclasses.field(default_factory=list)
    """Steps of the clients' update pipelines, in the order of `agents.pipeline.STEPS`. There is at most
    one step of each kind."""


Way = Literal["up", "down"]
"""Direction of traffic: from the devices to the server (`up`), or to the devices (`down`)."""
WAYS: tuple[Way, Way] = ("up", "down")


@dataclass(frozen=True, slots=True)
class Background:
    """Other people's traffic on a segment, in one direction, in device time
    (`agents.links.background`)."""

    number: int
    """Position in the segment's list of background traffic, from 0."""
    way: Way
    kind: str
    """Name in `agents.links.background.KINDS`."""
    params: Mapping[str, Any]
    """Values of the fields of the kind's dataclass."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A link that several devices share, such as a Wi-Fi cell or a backhaul. The segments of a run form
    a tree; the server is behind the roots."""

    name: str
    parent: str | None = None
    """Name of the next segment on the way to the server; None if the server comes next."""
    up: int | None = None
    """Total rate in bit/s from the devices; None if it is not limited."""
    down: int | None = None
    """Total rate in bit/s to the devices; None if it is not limited."""
    rtt: float = 0.0
    """Round-trip time in seconds that the segment adds, half of it in each direction."""
    jitter: float = 0.0
    """Maximum deviation of the delay in each direction, in seconds. Deviations are uniform."""
    loss: float = 0.0
    """Share of packets lost in each direction, from 0 to 1."""
    queue: int | None = None
    """Length of the queue in each direction in bytes; None for 200 ms of the rate."""
    background: tuple[Background, ...] = ()

    def rate(self, way: Way) -> int | None:
        """Return the total rate in the direction `way` in bit/s; None if it is not limited."""
        return self.up if way == "up" else self.down

    def with_changes(self, changes: Mapping[str, float | None]) -> Segment:
        """Return this segment with the fields in `changes` replaced."""
        values: dict[str, Any] = dict(changes)
        return dataclasses.replace(self, **values)


def path_of(name: str | None, segments: Mapping[str, Segment]) -> tuple[Segment, ...]:
    """Return the segments from the segment `name` to the root; empty for None. `segments`: the tree, by
    name."""
    found = []
    while name is not None:
        found.append(segments[name])
        name = segments[name].parent
    return tuple(found)


@dataclass(frozen=True, slots=True)
class AccessLink:
    """Access link requested for a device."""

    up: int | None = None
    """Uplink rate in bit/s; None if the rate is not limited."""
    down: int | None = None
    """Downlink rate in bit/s; None if the rate is not limited."""
    rtt: float = 0.0
    """Round-trip time in seconds that the link adds. Each direction adds half of this time."""
    jitter: float = 0.0
    """Jitter in seconds: the delay in each direction is uniform in rtt/2 ± jitter. Packets stay in
    order."""
    loss: float = 0.0
    """Share of packets lost in each direction, from 0 to 1."""

    @property
    def is_outage(self) -> bool:
        """Whether the link carries no packets, or too few to keep a connection alive."""
        return self.loss >= 1 or any((rate or math.inf) < OUTAGE_RATE for rate in (self.up, self.down))

    def with_changes(self, changes: Mapping[str, float | None]) -> AccessLink:
        """Return this link with the fields in `changes` replaced."""
        values: dict[str, Any] = dict(changes)
        return dataclasses.replace(self, **values)

    def through(self, path: Sequence[Segment]) -> AccessLink:
        """Return the link that consists of this link and the segments of `path`: the lowest rates, the
        sums of delay and jitter, and the combined loss."""
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
        """Return this link with its own rates, and with delay, jitter and loss of the whole path through
        the segments of `path`."""
        return self.through(path).with_changes({"up": self.up, "down": self.down})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Configuration of a device's init."""

    run: str
    device: str
    broker: BrokerAccess
    """Address of the broker for the init, and the init's login. The init does not use the access link to
    reach the broker; only the client uses this link."""
    data_address: str
    """Host name at which the client reaches the broker, over the access link."""
    link: AccessLink | None
    """The device's own link; None if the link is not shaped."""
    probed: AccessLink | None
    """Expected rates of the device's own link, and expected delay, jitter and loss of the whole path to
    the server, for a measurement; None if nothing is measured."""
    client_config: str
    """Path of the ClientConfig of the client process that the init starts."""
    isolated: str
    """Path of a file that is created when the device is isolated or, on a real device, when its clock
    has been compared. No client starts before that."""
    turns: str | None
    """Folder with the files of `agents.device.turns`; None on a real device, which starts at once."""
    user: int | None
    """Numeric id of the client process's user and group; None on a real device, where the client runs as
    the user of the init."""
    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 hash of each file that was sent to this device's host, by path."""
    present: bool = True
    """Whether the client starts with the run. Otherwise an order starts the client later."""
    paused: bool = False
    """Whether the client is frozen from its start on, until an order continues it."""
    telemetry_every: float = 1.0
    """Host seconds between two telemetry samples. Each sample uses some of the device's own CPU
    share."""
    timeout_s: float = 30.0
    """Host seconds within which the router must answer."""
    clock: str | None = None
    """Path of the file with the estimate of the aggregator's clock; None on the aggregator's host."""
    netem: bool = False
    """Whether the kernel's netem emulates delay, jitter and loss in the device. Otherwise the router
    emulates them."""
    energy: EnergyConfig | None = None
    """Settings for the account of the device's energy; None if its energy is not counted."""
    cpu: float | None = None
    """The device's CPU share at the start of the run, in host cores of device time, to which
    `EnergyConfig.busy` refers; None if its energy is not counted. On a real device, the share to which
    the init's control group limits it; None if there is no such group."""
    dilation: float = 1.0
    """Host seconds per second of device time."""
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
    """For each host name on the server's side, its port (for TCP and UDP). The first entry belongs to
    the broker."""
    addresses: Mapping[str, str]
    """IPv4 address of each device."""
    links: Mapping[str, Mapping[str, float]]
    """`rtt`, `jitter` and `loss` of each device's link, in the units of `AccessLink`."""
    segments: Sequence[Segment]
    """Tree of the shared links, in host time except for their background traffic. A parent comes before
    its children."""
    attached: Mapping[str, str]
    """Segment that each device is attached to. A device without a segment has no entry."""
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
    """Write `config` as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n", encoding="utf-8")


def load(cls: type[T], path: Path) -> T:
    """Read a file that `dump` wrote. Raises ValueError if the file's content does not fit `cls`."""
    return from_dict(cls, json.loads(path.read_text(encoding="utf-8")))


def from_dict(cls: type[T], values: Any) -> T:
    """Build the dataclass `cls`, with nested dataclasses, from plain values such as dicts and lists.

    Raises ValueError for unknown or missing fields, and for values of another type.
    """
    try:
        found = convert(values, cls)
    except msgspec.ValidationError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error
    if unknown := ", ".join(_unknown(values, msgspec.to_builtins(found))):
        raise ValueError(f"{cls.__name__} has no field {unknown}")
    return found


def _unknown(values: Mapping[str, Any], known: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of fields that are in `values`, at any depth, but not in `known`."""
    for name, value in values.items():
        if name not in known:
            yield path + name
        elif isinstance(value, Mapping):
            yield from _unknown(value, known[name], f"{path}{name}.")
