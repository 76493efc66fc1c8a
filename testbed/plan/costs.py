"""What a training step and a transfer cost, for virtual time and for the estimates of `testbed plan`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agents import pipeline
from agents.config import LocalTraining, Named
from agents.models.buffers import NONE, Buffers
from agents.models.vectors import Vector
from agents.pipeline.interface import NO_EXCHANGE, ClientContext, ExchangeCost
from agents.tasks.interface import Task
from agents.wire import payloads
from testbed.host import cache
from testbed.plan import model_check
from testbed.plan.planned import PlannedDevice
from testbed.speed import calibration
from testbed.topology import Virtual

MSS = 1448
"""Payload of a full packet in bytes: Ethernet, IPv4, TCP with time stamps."""
RTO_MIN = 0.2
"""What Linux adds to the round trip at least for a retransmission time-out, in seconds."""
HOPS = 0.001
"""Seconds that broker and both ends take for a small message (docs/evidence/virtual-time.md)."""
_HEADERS = 66
"""Bytes of a packet beside its payload: Ethernet, IPv4, TCP with time stamps."""
_MQTT = 64
"""Bytes of a message beside its payload: MQTT's header with the topic."""
_PUBACK = 4
"""Bytes by which MQTT acknowledges a message."""
SMALL = 64
"""Bytes of a request's payload."""
DIGITS = 72
"""Bytes that a real client's times and loss add to an update's header: `message_sizes` counts zeros."""

SLICED_SHARE = 1 / 8
"""Of a core, at which the time of a step in slices is measured."""
_UPDATE_TIME = 0.003
"""CPU time that an update costs a device beside its steps, in seconds on a whole core: decoding the
model, encoding and sending the update, waking up for both. Measured (docs/evidence/virtual-time.md)."""
_START_TIME = 3.0
"""Seconds from the order to start a client until it is ready, which it takes without a limit of its CPU:
importing torch, above all. Measured (docs/evidence/virtual-time.md)."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of CPU time of a step."""

    whole: float
    """On a whole core of this host."""
    sliced: float | None = None
    """In the slices that a device has of a core at `SLICED_SHARE`; None: as on a whole one."""

    def at(self, share: float) -> float:
        """At `share` of a core, by its logarithm: the longer the pauses between slices, the colder each
        of them begins (measured: docs/evidence/virtual-time.md)."""
        if self.sliced is None or share >= 1:
            return self.whole
        depth = math.log(share) / math.log(SLICED_SHARE)
        return self.whole + depth * (self.sliced - self.whole)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one mini-batch step costs, and an update beside its steps."""

    flops: float | None = None
    """Floating-point operations, for devices whose `gflops` are given."""
    time: StepTime | None = None
    """On a core of this host, for devices with a `cpu` share."""
    update: float = 0.0
    """Seconds of CPU time of an update, on such a core."""
    start: float = 0.0
    """Seconds until a client that starts during the run is ready; no share limits it until then."""
    exchange: ExchangeCost = NO_EXCHANGE
    """What clients say to each other, and answer beside updates."""

    def seconds_on(self, device: PlannedDevice, work: float) -> float:
        """How long `work`, CPU seconds on such a core, takes on `device`; 0 where its speed is not a
        share of this host's."""
        if device.gflops is not None or device.cpu is None:
            return 0.0
        return work / (device.cpu * device.core_speed)

    def per_update(self, device: PlannedDevice) -> float:
        """Seconds that an update takes on `device` beside its steps; 0 likewise."""
        return self.seconds_on(device, self.update)

    def per_start(self, device: PlannedDevice) -> float:
        """Seconds from the start of a client on `device` until it is ready; 0 likewise."""
        return 0.0 if device.gflops is not None or device.cpu is None else self.start

    def per_step(self, device: PlannedDevice) -> float:
        """Seconds that a step takes on `device`; 0 where only its `timing` is known."""
        if device.gflops is not None and self.flops is not None:
            return self.flops / (device.gflops * device.speed * 1e9)
        if device.cpu is not None and self.time is not None:
            share = device.cpu * device.core_speed
            return self.time.at(share) / share
        return 0.0


def on_link(size: int) -> int:
    """Bytes on a link of a message of `size` bytes: with its own header and those of its packets."""
    size += _MQTT
    return size + _HEADERS * math.ceil(size / MSS)


def acknowledged(size: int) -> int:
    """Bytes on a link the other way when a message of `size` bytes has arrived: MQTT's acknowledgement,
    and TCP's own of each packet before the last (where packets come less than 40 ms apart, of every
    second, which matters little on a link as fast as that)."""
    return _PUBACK + math.ceil((size + _MQTT) / MSS) * _HEADERS


def of(virtual: Virtual, flops: float | None) -> StepCost:
    """What `virtual` gives; `flops` of a step. Costs beside a step are 0 if only the time of a step is
    given, so that such a run does not depend on what was measured elsewhere."""
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
    """The time of a step, where `virtual` gives it."""
    if virtual.step_time is None:
        return None
    return StepTime(virtual.step_time, virtual.sliced_step_time)


def timed(virtual: Virtual, step: StepTime) -> Virtual:
    """`virtual` with the time of a step that was measured, and the other costs as they were beside it:
    it gives the same again anywhere."""
    beside = of(virtual, None)
    found = {
        "step_time": step.whole,
        "sliced_step_time": step.sliced,
        "start_time": beside.start,
        "update_time": beside.update,
        "packets": virtual.packets is not False,
    }
    return virtual.model_copy(update=found)


def step_work(local: LocalTraining) -> LocalTraining:
    """The same for local trainings of a task whose step is the same work."""
    return replace(local, lr=0.0, lr_by_step=None, lr_by_version=None, steps=None, epochs=None)


def keep_step_time(task: Task, local: LocalTraining, step: StepTime, frozen: Sequence[str] = ()) -> None:
    """Keep what a step was measured to take on this host, for later plans."""
    if (path := _step_time(task, local, frozen)) is not None:
        cache.keep(path, f"{step.whole!r} {step.sliced!r}\n")


def kept_step_time(task: Task, local: LocalTraining, frozen: Sequence[str] = ()) -> StepTime | None:
    """What a step took here when it was last measured; None where it never was."""
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
    facts = repr((fingerprint, step_work(local), calibration.this_host()))
    return cache.folder() / "steps" / hashlib.sha256(facts.encode()).hexdigest()[:16]


def goodput(rate: float | None, rtt: float, loss: float) -> float | None:
    """What a TCP connection makes of a link of `rate` bit/s (None for no limit) and `rtt` seconds that
    loses the share `loss` of the packets: bit/s, None for no limit.

    It sends at most as fast as its loss recovery lets it (Padhye, Firoiu, Towsley, Kurose 1998, eq. 30:
    Mathis et al. 1997 and time-outs), with CUBIC's mean window W in packets (RFC 9438, section 5), which
    for a short round trip or many losses is Reno's, the first one:

        MSS / (RTT/W + RTO min(1, 3√(3p/8)) p (1 + 32p²)),   W = max(√(3/2p), 1.054 (RTT/p)^¾)

    and what was lost is sent again. Assumes independent losses, and transfers long enough to have left
    slow start. BBR, which does not take a loss for congestion, is faster.
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
) -> tuple[int, int]:
    """Bytes of a model and of an update on the wire, after the `steps` of one of `clients`; their
    headers' digits vary, and are not counted."""
    vector, encoded = w, None
    encoding = [step for step in steps if pipeline.STEPS[step.name].field is not None]
    context = ClientContext(
        run=run,
        name=clients[0] if clients else "client",
        parameters=w.size,
        rng=lambda *_: np.random.default_rng(0),
        simulated=True,
    )
    for step in pipeline.build_client_steps(encoding, context):
        if step.simulated_exchange is not None:
            step.simulated_exchange.prepare(0, clients, 0)
        made = step.apply(np.zeros_like(w), 0, 0)
        if isinstance(made, payloads.Encoded):
            vector, encoded = np.zeros(0, np.float32), made
    model = payloads.ModelMessage(
        run=run, version=0, dispatch=0, schema=schema, vector=w, buffers=buffers
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
    )
    return _size(model), _size(update)


def _size(message: payloads.ModelMessage | payloads.UpdateMessage) -> int:
    head, *views = payloads.lay_out(message)
    return len(head) + sum(view.nbytes for view in views)
