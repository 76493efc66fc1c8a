"""Maximum memory of the processes of a run, in bytes, computed from the size of the model.

Figures are resident memory, measured with BERT-base (docs/concepts/models.md). The figures do not
include a client's data and the intermediate results of a step. They do not include the updates that a
rule keeps in the aggregator (`fedfa`, `port`, `trim`), or the models that the aggregator keeps for
compression. Each such update or model needs as much memory as one model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from agents import pipeline
from agents.config import LocalTraining, Named
from agents.rules.client_half import ClientSide, elements

_MIB = 2**20
_CLIENT, _AGGREGATOR, _BROKER = 280 * _MIB, 320 * _MIB, 64 * _MIB
"""Bytes without a model."""
_RESERVED = 512 * _MIB
"""Bytes for aggregator and broker together, without a model."""
NODE_AGENT = 512 * _MIB
"""Memory limit of a node agent's container, in bytes, for runs on several nodes."""
_ROUTER, _ROUTED = 256 * _MIB, 32 * _MIB
"""Memory limit of a router's container, in bytes; and in addition per device, for delayed packets."""
_MPS, _MPS_CLIENT = 4096 * _MIB, 512 * _MIB
"""Memory limit of the container of NVIDIA's MPS, in bytes; and in addition per device. Not measured."""


class HasMemoryLimit(Protocol):
    @property
    def memory(self) -> int: ...


def client(model: int, local: LocalTraining, side: ClientSide, steps: Sequence[Named] = ()) -> int:
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
    return own + sum(pipeline.build_step(step).memory(model, remembers=remembers) for step in steps)


def message(model: int, side: ClientSide) -> int:
    """Size in bytes of the larger of model and update, with the rule's own vectors."""
    beside = (side.model_vectors, side.update_vectors)
    return model + 4 * max(elements(vectors, model // 4) for vectors in beside)


def aggregator(model: int, devices: int) -> int:
    """Return bytes. `model`: size in bytes of the larger of model and update.

    The aggregator holds six vectors of the model's size: the model, the rule's sum, the evaluation's
    model and its source, the model being sent, and one in reserve. It also holds an incoming update per
    device.
    """
    return _AGGREGATOR + model * (6 + devices)


def broker(model: int, devices: int) -> int:
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


def aggregator_limit(free: int, devices: Iterable[HasMemoryLimit], reserved: int) -> int:
    """Return the bytes of the aggregator's container on a machine with `free` bytes of free memory.

    The limit is `free` without the memory limits of the `devices` on the machine. If half of `free` is
    more, the limit is that half, because devices seldom reach their limits. The limit is at least
    `reserved` bytes. How much memory a rule and an evaluation need is unknown.
    """
    return max(reserved, free // 2, free - sum(device.memory for device in devices))


def router_limit(devices: int) -> int:
    return _ROUTER + _ROUTED * devices


def mps_limit(devices: int) -> int:
    return _MPS + _MPS_CLIENT * devices
