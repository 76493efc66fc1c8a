"""Settings of the aggregator's core, except the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agents.config import Named, StopConditions, UpdateBounds
from agents.rules.interface import ClientSide
from agents.timing.nanoseconds import Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEvaluation:
    """How long a finished run waits for its last evaluation."""

    timeout: float | None = 30.0
    """Host seconds; None without a limit."""
    dilation: float = 1.0
    """Host seconds per second of device time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    run: str
    schema: str
    """Hash that the model's schema and each update must have."""
    side: ClientSide
    importance: Mapping[str, float]
    """p_i of every client that trains, in device order."""
    idle: Sequence[str] = ()
    """Clients without a mini-batch. Their presence is recorded, but the rule does not know them."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Training samples that a client's updates must state, because a rule may use them as a weight. A
    client without an entry may state any number."""
    stop: StopConditions
    evaluate_every: Nanoseconds
    """Device time."""
    checkpoint_every: Nanoseconds | None = None
    """Device time; None if only the first and the last model are saved."""
    keeps_models: bool = False
    """Sent models are kept, because updates are encoded as differences to them."""
    bounds: UpdateBounds = field(default_factory=UpdateBounds)
    steps: Sequence[Named] = field(default_factory=list)
    """Clients' update pipelines, in the order of `agents.pipeline.STEPS`, at most one of each kind."""
    silence: Mapping[str, Nanoseconds] = field(default_factory=dict)
    """Time to answer a request for a report, after which the client counts as absent. Default: when the
    broker disconnects a silent client."""
    patience: Mapping[str, float] = field(default_factory=dict)
    """Nanoseconds for which a client may be silent even if its rounds so far were shorter; infinite if
    they vary at random with an unknown mean. Clients whose time the plan does not know have no entry."""
    clock_errors: Mapping[str, Nanoseconds] = field(default_factory=dict)
    """Maximum error of the times of clients on another clock than the aggregator's."""
    patient: bool = False
    """The run continues while no client is left."""
    evaluate_after: bool = False
    """Models are evaluated only after the run, and no evaluation is skipped."""
    last_evaluation: LastEvaluation | None = None
    """None if evaluations take no time."""
