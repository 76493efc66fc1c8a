"""Memory that the processes of a run need at their most, in bytes, by the size of the model.

Figures are resident memory, measured with BERT-base (docs/concepts/models.md). Rules that keep
updates by themselves (`fedfa`, `port`, `trim`), and compressed models, take one model more of the
aggregator for each that they keep. A client's data, and what a step computes, come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from agents import pipeline
from agents.config import LocalTraining, Named
from agents.rules.interface import ClientSide

_MIB = 2**20
_CLIENT, _AGGREGATOR, _BROKER = 280 * _MIB, 320 * _MIB, 64 * _MIB
"""Without a model."""
_RESERVED = 512 * _MIB
"""For aggregator and broker, without a model."""
NODE_AGENT = 512 * _MIB
"""Limit of a container with an agent on a node of several."""
_ROUTER, _ROUTED = 256 * _MIB, 32 * _MIB
"""Limit of a router's container: its own, and of each device for the packets that are delayed."""
_MPS, _MPS_CLIENT = 4096 * _MIB, 512 * _MIB
"""Limit of the container of NVIDIA's MPS, chosen and not measured."""


class Limited(Protocol):
    """What has a limit of memory."""

    @property
    def memory(self) -> int: ...


def client(model: int, local: LocalTraining, side: ClientSide, steps: Sequence[Named] = ()) -> int:
    """Of a client: parameters and gradient; the model that came; the end, the difference, and one in
    reserve; what the optimizer keeps, the start where training stays near it, and the memory of a rule
    whose clients have one; and what is done to updates."""
    kept = {"sgd": int(local.momentum > 0)}.get(local.optimizer, 3)
    near = int(local.proximal > 0 or local.clip is not None)
    remembers = side.kind == "residual"
    own = _CLIENT + model * (6 + kept + near + 2 * remembers)
    return own + sum(pipeline.build_step(step).memory(model, remembers=remembers) for step in steps)


def aggregator(model: int, devices: int) -> int:
    """Of the aggregator: the model, the rule's sum, the evaluation's model and what it was copied from,
    what leaves, one in reserve; and an update of each device that comes in."""
    return _AGGREGATOR + model * (6 + devices)


def broker(model: int, devices: int) -> int:
    """Of the broker: a model under way to each device, or its update."""
    return _BROKER + model * devices


def reserved(model: int, devices: int) -> int:
    """Of aggregator and broker together: what is under way is in one of them."""
    return _RESERVED + model * (7 + devices)


def equal_limit(sizes: Sequence[int], budget: int) -> int:
    """The highest limit, in whole MiB, with which all `sizes`, cut to it, fit into `budget`."""
    left = budget
    for number, size in enumerate(sorted(sizes)):
        part = left // (len(sizes) - number)
        if size > part:
            return part // _MIB * _MIB
        left -= size
    return max(sizes, default=0)


def left(free: int, devices: Iterable[Limited], reserved: int) -> int:
    """Limit of the aggregator's container on a machine with `free` bytes: what the limits of the
    `devices` there leave, or half of it where that is more, as they are seldom reached; and what is
    `reserved` at the least. What a rule and an evaluation may need is not known."""
    return max(reserved, free // 2, free - sum(device.memory for device in devices))


def router(devices: int) -> int:
    """Limit of the container of a router of so many devices."""
    return _ROUTER + _ROUTED * devices


def mps(devices: int) -> int:
    """Limit of the container of NVIDIA's MPS, which serves so many devices."""
    return _MPS + _MPS_CLIENT * devices
