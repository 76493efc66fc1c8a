"""Costs of a training step, of a transfer, and of the processes in memory, for planning and virtual
time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agents.config import LocalTraining, Named
from agents.models.vectors import NONE, Buffers, Vector
from agents.pipeline.interface import NO_EXCHANGE, ClientContext, ExchangeCost
from agents.pipeline.steps import STEPS, build_client_steps, build_step
from agents.rules.client_half import ClientSide, elements, sizes
from agents.tasks.interface import Task
from agents.wire import payloads
from testbed import speed
from testbed.host import cache
from testbed.plan import model_check
from testbed.plan.planned_devices import PlannedDevice
from testbed.topology import Virtual

# Maximum memory of the processes of a run, in bytes, computed from the size of the model.
#
# Figures are resident memory, measured with BERT-base (docs/concepts/models.md). The figures do not
# include a client's data and the intermediate results of a step. They do not include the updates that a
# rule keeps in the aggregator (`fedfa`, `port`, `trim`), or the models that the aggregator keeps for
# compression. Each such update or model needs as much memory as one model.

_MIB = 2**20
_CLIENT, _AGGREGATOR, _BROKER = 280 * _MIB, 320 * _MIB, 64 * _MIB
"""Bytes without a model."""
_RESERVED = 512 * _MIB
"""Bytes for aggregator and broker together, without a model."""
NODE_AGENT = 512 * _MIB
"""Memory limit of a node agent's container, in bytes, for runs on several nodes."""
_ROUTER, _ROUTED = 256 * _MIB, 32 * _MIB
"""Memory limit of a router's container, in bytes; and in addition per device, for delayed packets."""


def client_memory(
    model: int, local: LocalTraining, side: ClientSide, steps: Sequence[Named] = ()
) -> int:
    """Return bytes.

    A client holds six vectors of the model's size: the parameters, the gradient, the received model, the
    end point, the difference, and one in reserve. It also holds the state of the optimizer and the
    memory of the pipeline steps. If a proximal term or clipping needs the starting point, the client
    holds that point, and the vectors that the rule keeps on the client, adds to the objective or sends.
    """
    kept = {"sgd": int(local.momentum > 0)}.get(local.optimizer, 3)
    near = int(local.proximal > 0 or local.clip is not None)
    remembers = side.kind == "residual"
    own = _CLIENT + model * (6 + kept + near + 2 * remembers + 2 * side.adds_terms)
    own += 4 * (elements(side.model_vectors, model // 4) + elements(side.update_vectors, model // 4))
    own += 3 * 4 * elements(side.memory, model // 4)
    return own + sum(build_step(step).memory(model, remembers=remembers) for step in steps)


def message_memory(model: int, side: ClientSide) -> int:
    """Size in bytes of the larger of model and update, with the rule's own vectors."""
    beside = (side.model_vectors, side.update_vectors)
    return model + 4 * max(elements(vectors, model // 4) for vectors in beside)


def aggregator_memory(model: int, devices: int) -> int:
    """Return bytes. `model`: size in bytes of the larger of model and update.

    The aggregator holds six vectors of the model's size: the model, the rule's sum, the evaluation's
    model and its source, the model being sent, and one in reserve. It also holds an incoming update per
    device.
    """
    return _AGGREGATOR + model * (6 + devices)


def broker_memory(model: int, devices: int) -> int:
    """Return bytes. The broker holds one model or update in flight per device."""
    return _BROKER + model * devices


def server_memory(model: int, devices: int) -> int:
    """Return bytes. A message in flight is counted once, because it is either in the aggregator or in
    the broker."""
    return _RESERVED + model * (7 + devices)


def equal_limit(sizes: Sequence[int], budget: int) -> int:
    """Return the highest limit with which all `sizes` fit into `budget`. A size above the limit counts
    as the limit. All values are in bytes; the limit is a whole number of MiB."""
    left = budget
    for number, size in enumerate(sorted(sizes)):
        part = left // (len(sizes) - number)
        if size > part:
            return part // _MIB * _MIB
        left -= size
    return max(sizes, default=0)


def aggregator_limit(free: int, used: int, reserved: int) -> int:
    """Return the bytes of the aggregator's container on a machine with `free` bytes of free memory.

    `used`: sum of the limits of the machine's devices. The limit is the rest of `free`. If half of
    `free` is more, the limit is that half, because devices seldom reach their limits. The limit is at
    least `reserved` bytes. How much memory a rule and an evaluation need is unknown.
    """
    return max(reserved, free // 2, free - used)


def router_limit(devices: int) -> int:
    return _ROUTER + _ROUTED * devices


MSS = 1448
"""Payload of a full packet in bytes, for Ethernet, IPv4, and TCP with time stamps."""
RTO_MIN = 0.2
"""Minimum that Linux adds to the round trip for a retransmission time-out, in seconds."""
HOPS = 0.001
"""Seconds that the broker, the sender and the receiver need for a small message. Measured
(docs/evidence/virtual-time.md)."""
_HEADERS = 66
"""Bytes of a packet's headers: Ethernet, IPv4, and TCP with time stamps."""
_MQTT = 64
"""Bytes of a message's header in MQTT, with the topic."""
_PUBACK = 4
"""Bytes of MQTT's acknowledgement of a message."""
SMALL = 64
DIGITS = 72
"""Bytes by which the header of a real update is longer than the header in `message_sizes`. In
`message_sizes`, each number is 0, so each number has only one digit."""

SLICED_SHARE = 1 / 8
"""Share of a core at which the time of a step in slices is measured."""
_UPDATE_TIME = 0.003
"""CPU seconds that an update costs on a whole core, in addition to the training steps: for decoding the
model, for encoding and sending the update, and for waking up. Measured
(docs/evidence/virtual-time.md)."""
_START_TIME = 3.0
"""Seconds from the order to start a client until the client is ready. Most of this time is for importing
torch. The client's CPU is not limited before the client is ready. Measured
(docs/evidence/virtual-time.md)."""


@dataclass(frozen=True, slots=True)
class StepTime:
    whole: float
    """CPU seconds with a whole core of this host."""
    sliced: float | None = None
    """CPU seconds with `SLICED_SHARE` of a core, where a step runs in slices; None if equal to
    `whole`."""

    def at(self, cpu: float) -> float:
        """Return CPU seconds with `cpu` cores, interpolated over the logarithm of `cpu`.

        With a smaller share, the pauses between slices are longer, and caches are colder after a pause
        (measured: docs/evidence/virtual-time.md).
        """
        if self.sliced is None or cpu >= 1:
            return self.whole
        depth = math.log(cpu) / math.log(SLICED_SHARE)
        return self.whole + depth * (self.sliced - self.whole)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs of a mini-batch step, of an update in addition to the steps, and of a client's start."""

    flops: float | None = None
    """Floating-point operations of a step, for devices with `gflops`."""
    time: StepTime | None = None
    """Time of a step on a core of this host, for devices with a `cpu` share."""
    update: float = 0.0
    """CPU seconds of an update, on a core of this host, in addition to the training steps."""
    start: float = 0.0
    """Seconds until a client that starts during the run is ready, whatever its CPU share."""
    exchange: ExchangeCost = NO_EXCHANGE
    """Costs of the other messages that clients exchange."""

    def seconds_on(self, device: PlannedDevice, work: float) -> float:
        """Convert CPU seconds on a core of this host to seconds on `device`.

        The result is 0 if the topology does not give the device's speed as a share of a core of this
        host.
        """
        if device.gflops is not None or device.cpu is None:
            return 0.0
        return work / (device.cpu * device.core_speed)

    def per_update(self, device: PlannedDevice) -> float:
        """Return seconds in addition to the training steps; 0 if the device's speed is not a CPU
        share."""
        return self.seconds_on(device, self.update)

    def per_start(self, device: PlannedDevice) -> float:
        """Return seconds until the client is ready; 0 if the device's speed is not a CPU share."""
        return 0.0 if device.gflops is not None or device.cpu is None else self.start

    def per_step(self, device: PlannedDevice) -> float:
        """Return seconds; 0 if only the device's `timing` is known."""
        if device.gflops is not None and self.flops is not None:
            return self.flops / (device.gflops * device.speed * 1e9)
        if device.cpu is not None and self.time is not None:
            cpu = device.cpu * device.core_speed
            return self.time.at(cpu) / cpu
        return 0.0


def bytes_on_link(size: int) -> int:
    return with_packet_headers(size + _MQTT)


def with_packet_headers(size: int) -> int:
    return size + _HEADERS * math.ceil(size / MSS)


def acknowledgement_bytes(size: int) -> int:
    """Return the bytes in the other direction of a link.

    MQTT acknowledges the message, and TCP acknowledges each packet except the last. If packets arrive
    less than 40 ms apart, TCP acknowledges only every second packet. The result ignores this, because
    the difference matters little on such a fast link.
    """
    return _PUBACK + math.ceil((size + _MQTT) / MSS) * _HEADERS


def step_cost(virtual: Virtual, flops: float | None) -> StepCost:
    """`flops`: of a step. If `virtual` gives the time of a step, all other costs are 0 by default, so
    that the run does not depend on any measurement."""
    timed = virtual.step_time is not None
    update = 0.0 if timed else _UPDATE_TIME
    start = 0.0 if timed else _START_TIME
    return StepCost(
        flops,
        step_time(virtual),
        update if virtual.update_time is None else virtual.update_time,
        start if virtual.start_time is None else virtual.start_time,
        ExchangeCost(virtual.mask_time or 0.0, virtual.share_time or 0.0, virtual.answer_time or 0.0),
    )


def step_time(virtual: Virtual) -> StepTime | None:
    if virtual.step_time is None:
        return None
    return StepTime(virtual.step_time, virtual.sliced_step_time)


def with_step_time(virtual: Virtual, step: StepTime) -> Virtual:
    """Fill in the measured time of a step, and all other costs: a run with the returned settings can be
    repeated on any host."""
    beside = step_cost(virtual, None)
    found = {
        "step_time": step.whole,
        "sliced_step_time": step.sliced,
        "start_time": beside.start,
        "update_time": beside.update,
        "packets": virtual.packets is not False,
    }
    return virtual.model_copy(update=found)


def step_work_key(local: LocalTraining) -> LocalTraining:
    """Leave out the settings that do not change the work of a step."""
    return replace(local, lr=0.0, lr_by_step=None, lr_by_version=None, steps=None, epochs=None)


def cache_step_time(
    task: Task, local: LocalTraining, step: StepTime, frozen: Sequence[str] = ()
) -> None:
    if (path := _step_time(task, local, frozen)) is not None:
        cache.keep(path, f"{step.whole!r} {step.sliced!r}\n")


def cached_step_time(task: Task, local: LocalTraining, frozen: Sequence[str] = ()) -> StepTime | None:
    """Return the last time that was measured on this host."""
    if (path := _step_time(task, local, frozen)) is None:
        return None
    try:
        whole, sliced = map(float, path.read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        return None
    return StepTime(whole, sliced) if 0 < whole <= sliced < math.inf else None


def _step_time(task: Task, local: LocalTraining, frozen: Sequence[str]) -> Path | None:
    if (fingerprint := model_check.fingerprint(task, frozen)) is None:
        return None
    facts = repr((fingerprint, step_work_key(local), speed.calibrated_host()))
    return cache.folder() / "steps" / hashlib.sha256(facts.encode()).hexdigest()[:16]


def goodput(rate: float | None, rtt: float, loss: float) -> float | None:
    """Return the rate that a TCP connection achieves on a link, in bit/s; None if there is no limit.

    `rate`: rate of the link in bit/s; None if there is no limit. `rtt`: round-trip time in seconds.
    `loss`: share of packets lost.

    TCP's recovery from losses limits the rate. The limit is eq. 30 of Padhye, Firoiu, Towsley and Kurose
    (1998), which adds time-outs to the formula of Mathis et al. (1997). W is the mean window in packets:
    CUBIC's (RFC 9438, section 5), or Reno's if that is larger. Reno's window is the first argument of
    the maximum. It is larger if the round trip is short or if many packets are lost.

        MSS / (RTT/W + RTO min(1, 3√(3p/8)) p (1 + 32p²)),   W = max(√(3/2p), 1.054 (RTT/p)^¾)

    The returned rate does not count lost packets. The formula assumes independent losses, and transfers
    that are long enough to leave slow start. BBR is faster, because it does not treat a loss
    as congestion.
    """
    if not loss:
        return rate
    window = max(math.sqrt(1.5 / loss), 1.054 * math.pow(rtt / loss, 0.75))
    timeouts = min(1.0, 3 * math.sqrt(3 * loss / 8)) * loss * (1 + 32 * loss**2)
    bound = 8 * MSS / (rtt / window + (rtt + RTO_MIN) * timeouts)
    return (1 - loss) * (bound if rate is None else min(bound, rate))


def message_sizes(
    run: str,
    schema: str,
    w: Vector,
    buffers: Buffers = NONE,
    steps: Sequence[Named] = (),
    clients: Sequence[str] = (),
    side: ClientSide | None = None,
) -> tuple[int, int]:
    """Return the sizes of a model and of an update on the wire, in bytes. `steps`: pipeline steps that
    the update has passed.

    `clients`: names of all clients. `side`: the rule's requirements on clients, which name the vectors
    that the rule sends; None if the rule sends none. Each number in a header counts as one digit; real
    headers of updates are `DIGITS` bytes longer.
    """
    vector, encoded = w, None
    encoding = [step for step in steps if STEPS[step.name].field is not None]
    context = ClientContext(
        run=run,
        name=clients[0] if clients else "client",
        parameters=w.size,
        rng=lambda *_: np.random.default_rng(0),
        simulated=True,
    )
    side = side or ClientSide()
    own: dict[str, Vector | payloads.Encoded] = {
        name: np.zeros(size, np.float32) for name, size in sizes(side.update_vectors, w.size).items()
    }
    for step in build_client_steps(encoding, context):
        for name in side.compressed:
            zeros = np.zeros(elements({name: side.update_vectors[name]}, w.size), np.float32)
            if (part := step.for_vector(zeros.size)) is not None:
                own[name] = part.apply(zeros, 0, 0)
        if step.simulated_exchange is not None:
            step.simulated_exchange.prepare(0, clients, 0)
        made = step.apply(np.zeros_like(w), 0, 0)
        if isinstance(made, payloads.Encoded):
            vector, encoded = np.zeros(0, np.float32), made
    model = payloads.ModelMessage(
        run=run,
        version=0,
        dispatch=0,
        schema=schema,
        vector=w,
        buffers=buffers,
        vectors={
            name: np.zeros(size, np.float32) for name, size in sizes(side.model_vectors, w.size).items()
        },
    )
    update = payloads.UpdateMessage(
        run=run,
        client="client",
        sequence=0,
        dispatch=0,
        base_version=0,
        schema=schema,
        kind="delta",
        samples=0,
        steps=0,
        effective_steps=1.0,
        loss=0.0,
        downloaded=0,
        train_start=0,
        train_end=0,
        sent=0,
        vector=vector,
        encoded=encoded,
        buffers=buffers,
        vectors=own,
    )
    return _size(model), _size(update)


def _size(message: payloads.ModelMessage | payloads.UpdateMessage) -> int:
    head, *views = payloads.lay_out(message)
    return len(head) + sum(view.nbytes for view in views)
