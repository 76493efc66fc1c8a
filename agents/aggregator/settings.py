"""What a run requires of its aggregator, beyond the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agents.config import Named, StopConditions, UpdateBounds
from agents.rules.interface import ClientSide
from agents.timing.nanoseconds import Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEvaluation:
    """How long a run that is over waits for its last evaluation."""

    timeout: float | None = 30.0
    """Seconds of the host; None: as long as it takes."""
    dilation: float = 1.0
    """Seconds of the host that make one of device time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run requires of its aggregator, beyond the rule."""

    run: str
    schema: str
    """Hash of the model's schema; updates must carry the same."""
    side: ClientSide
    """What the rule requires of its clients."""
    importance: Mapping[str, float]
    """p_i of every client that may take part, in device order."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Of each client's shard: what its updates must say, as a rule may weight with it. Of a client that
    is not here, any number is taken."""
    stop: StopConditions
    evaluate_every: Nanoseconds
    checkpoint_every: Nanoseconds | None = None
    """None for no checkpoints but the first model and the last."""
    keeps_models: bool = False
    """Clients send models as encoded differences: those that they trained from are needed."""
    bounds: UpdateBounds = field(default_factory=UpdateBounds)
    steps: Sequence[Named] = field(default_factory=list)
    """What clients do to their updates: one of each step of the run, in the order of
    `agents.pipeline.STEPS`."""
    silence: Mapping[str, Nanoseconds] = field(default_factory=dict)
    """By client: after which it is gone where it was asked for a report and has not answered. Without an
    entry: when the broker gives up on it, too, as its keep-alive is the usual one."""
    patience: Mapping[str, float] = field(default_factory=dict)
    """By client, if the plan knows it: nanoseconds for which it may be silent, whatever its rounds took;
    infinite if its rounds differ by chance and their mean is not known."""
    patient: bool = False
    """Go on where no client is left."""
    evaluate_after: bool = False
    """Evaluations are made after the run: none is left out because another one goes on."""
    last_evaluation: LastEvaluation | None = None
    """None where evaluations take no device time."""
