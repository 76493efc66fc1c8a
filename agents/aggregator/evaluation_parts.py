"""Parts of the data, which are the classes of the test set and samples of each device: the global model
is evaluated on each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.shards import Shard


@dataclass(frozen=True, slots=True)
class Part:
    """The model on one part of the data; as in `events.EvaluatedPart`."""

    part: str
    name: str
    samples: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that the model is evaluated on, beside the test set as a whole."""

    classes: bool = False
    """Each class of the test set by itself."""
    device_set: Shard | None = None
    """Samples of the devices, one device after the other."""
    device_samples: Mapping[str, int] = field(default_factory=dict)
    """How many each device has of them, in their order."""


NO_PARTS = Parts()
