"""Parts of the data on which the global model is evaluated: classes of the test set, samples of each
device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.shards import Shard


@dataclass(frozen=True, slots=True)
class Part:
    """Fields as in `events.EvaluatedPart`."""

    part: str
    name: str
    samples: int
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts on which the model is evaluated, in addition to the whole test set."""

    classes: bool = False
    device_set: Shard | None = None
    """Samples of the devices, one device after the other; None if devices are not parts."""
    device_samples: Mapping[str, int] = field(default_factory=dict)
    """Samples of each device in `device_set`, in the same order."""


NO_PARTS = Parts()
